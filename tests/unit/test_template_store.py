"""Built templates on disk: what a crash or a damaged file leaves is no end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsec.control.template_store import TemplateStore, digest_of, owner_of
from dsec.errors import NotFound, StoreDamaged
from dsec.model.built import Built
from dsec.templates.document import parse
from dsec.templates.dump import digest

BASE = "sha256:" + "c" * 64


def built(version: str = "1.0.0") -> Built:
    template = parse(
        f"name: one\nversion: {version}\nruntime: {{base: system}}\n", source="one.yaml"
    ).template
    blueprint = digest(template)
    return Built(
        digest=digest_of(blueprint, BASE, (), ""),
        blueprint=blueprint,
        template=template,
        base="system",
        base_digest=BASE,
        layers=(),
        lock="",
        unenforced=(),
        floating=(),
        built_at=1.0,
    )


def path_of(root: Path, one: Built) -> Path:
    return root / "built" / f"{one.digest.removeprefix('sha256:')}.json"


@pytest.mark.parametrize(
    ("field", "value"), [("base_digest", "sha256:" + "d" * 64), ("lock", "x"), ("layers", [BASE])]
)
def test_what_was_changed_on_disk_is_refused_by_digest(tmp_path: Path, field: str, value: object) -> None:
    store = TemplateStore(tmp_path)
    store.put(built())
    path = path_of(tmp_path, built())
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(StoreDamaged, match="not sha256:"):
        store.find("one")


def test_a_changed_blueprint_is_refused_by_digest(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    store.put(built())
    path = path_of(tmp_path, built())
    path.write_text(path.read_text().replace('"env": {}', '"env": {"EVIL": "1"}'))
    assert "EVIL" in path.read_text()
    with pytest.raises(StoreDamaged, match="not sha256:"):
        store.find("one")


def test_a_damaged_one_is_whole_again_when_it_is_built_again(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    store.put(built())
    path_of(tmp_path, built()).write_text("{")
    with pytest.raises(StoreDamaged, match="no built template"):
        store.find("one")
    store.put(built())
    assert store.find("one") == built()


def test_a_tag_that_was_being_written_is_none(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    store.put(built())
    (tmp_path / "tags/one/.latest.0123abcd").write_text(built().digest)
    assert [each.tag for each in store.tags()] == ["latest"]
    assert store.remove("one")
    assert not list((tmp_path / "built").iterdir())


def test_a_line_of_the_history_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    store.put(built())
    with (tmp_path / "history/one").open("a") as lines:
        lines.write('{"name": "on')
    store.put(built("2.0.0"))
    assert [each.digest for each in store.history("one")] == [built().digest, built("2.0.0").digest]


class Keeper:
    """Notes what is held, and whether the record was there then."""

    def __init__(self, root: Path) -> None:
        self.held: dict[str, set[str]] = {}
        self.said: list[tuple[str, bool]] = []
        self._root = root

    def _say(self, what: str) -> None:
        self.said.append((what, any(self._root.glob("built/*.json"))))

    def hold(self, digest: str, owner: str) -> None:
        self._say("hold")
        self.held.setdefault(owner, set()).add(digest)

    def let_go(self, owner: str) -> None:
        self._say("let go")
        self.held.pop(owner, None)


def test_a_record_is_there_only_while_its_images_are_held(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    store = TemplateStore(tmp_path, keeper)
    store.put(built())
    assert keeper.held == {owner_of(built().digest): {BASE}}
    store.put(built(), "again")
    store.remove("one")
    assert keeper.held
    store.remove("one:again")
    assert not keeper.held
    # Whoever is killed in between leaves a reference without a record: that counts for minutes only.
    assert keeper.said == [("hold", False), ("hold", True), ("let go", False)]


def test_what_cannot_be_held_is_not_kept(tmp_path: Path) -> None:
    class Empty(Keeper):
        def hold(self, digest: str, owner: str) -> None:
            raise NotFound("no such image")

    store = TemplateStore(tmp_path, Empty(tmp_path))
    with pytest.raises(NotFound):
        store.put(built())
    assert not list((tmp_path / "built").iterdir())
    assert store.tags() == ()


def test_damaged_records_that_no_tag_means_go_with_the_next_name(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    store = TemplateStore(tmp_path, keeper)
    first, second = built(), built("2.0.0")
    for each in (first, second):
        store.put(each)
    other = tmp_path / "built" / f"{'9' * 64}.json"
    for path in (path_of(tmp_path, first), other):
        path.write_text("torn")
    (tmp_path / "tags/two").mkdir()
    (tmp_path / "tags/two/latest").write_text("sha256:" + "9" * 64)
    assert [each.digest for each in store.remove("one")] == [second.digest]
    assert list((tmp_path / "built").iterdir()) == [other], (
        "a tag means it: building that again makes it whole"
    )
    assert not keeper.held


def test_a_record_that_changes_is_read_again(tmp_path: Path) -> None:
    """What is remembered of a record is good for as long as its file is the same one, unchanged."""
    store, made = TemplateStore(tmp_path), built()
    store.put(made)
    assert store.find("one") is store.find(made.reference)
    path = path_of(tmp_path, made)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"env": {}', b'"env":{} '))
    assert store.find("one") == made
    path.write_bytes(whole.replace(b'"one"', b'"two"'))
    with pytest.raises(StoreDamaged):
        store.find("one")
    path.write_bytes(whole)
    assert store.find("one") == made
    store.remove("one")
    with pytest.raises(NotFound):
        store.find(made.reference)


def test_what_is_remembered_is_what_finding_would_find(tmp_path: Path) -> None:
    ours, theirs = TemplateStore(tmp_path), TemplateStore(tmp_path)  # another engine's
    first, second = built("1.0.0"), built("2.0.0")
    name = first.template.name
    assert ours.remembered(name) is None
    theirs.put(first)
    assert ours.remembered(name) is None
    assert ours.find(name) == ours.remembered(name) == ours.remembered(f"{name}@{first.digest}") == first
    theirs.put(second)
    assert ours.remembered(name) is None
    assert ours.find(name) == ours.remembered(name) == second
    assert ours.remembered(f"other@{second.digest}") is None
    path_of(tmp_path, second).write_text("{}")
    assert ours.remembered(name) is None
    theirs.remove(name)
    assert ours.remembered(name) is None
    assert ours.remembered("no/name") is None
