"""Built templates on disk: what a crash or a damaged file leaves is no end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsec.control.template_store import TemplateStore, digest_of
from dsec.errors import StoreDamaged
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
