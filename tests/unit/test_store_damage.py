"""Stores whose files are not what was written: whoever asks gets an error of this project, with a hint, and never waits."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from dsec.control.template_store import TemplateStore, digest_of
from dsec.errors import Busy, Denied, DsecError, NotFound, StorageFull, StoreDamaged
from dsec.images.builds import locked, work_directory
from dsec.images.disk import MOST_BYTES, of_disk, read_small, typed
from dsec.images.shelf import Shelf
from dsec.images.store import ImageStore
from dsec.model.built import Built
from dsec.templates.document import parse
from dsec.templates.dump import digest

DIGEST = "sha256:" + "a" * 64


def bad_bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def nested(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def wrong_types(path: Path) -> None:
    path.write_text(json.dumps({"digest": 5, "sources": 7, "config": {"env": 3}}))


def escaping(path: Path) -> None:
    path.write_text('{"digest": "sha256:../../../etc/passwd"}')


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)


DAMAGES = [bad_bytes, nothing, nested, wrong_types, escaping, directory, fifo, link, huge]
Damage = Callable[[Path], None]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """With one image, of a name."""
    shelf = Shelf(tmp_path / "store")
    shelf.prepare()
    file = tmp_path / "image"
    file.write_bytes(b"content")
    shelf.publish("one", "one", file, {"digest": DIGEST})
    return shelf


def image_of(shelf: Shelf) -> object:
    meaning = shelf.meaning("one")
    assert meaning is not None
    return shelf.load("one", "one", meaning)


def refused(act: Callable[[], object], *kinds: type[DsecError]) -> DsecError:
    with pytest.raises(kinds) as caught:
        act()
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_name(shelf: Shelf, damage: Damage) -> None:
    assert image_of(shelf)  # control
    damage(shelf.root / "names/one")
    assert "names/one" in refused(lambda: image_of(shelf), StoreDamaged).hint
    refused(lambda: list(shelf.names()), StoreDamaged)
    refused(lambda: anyio.run(ImageStore(shelf.root).list), StoreDamaged)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", ["json", "erofs"])
def test_a_damaged_image(shelf: Shelf, damage: Damage, suffix: str) -> None:
    path = shelf.root / f"images/{DIGEST[7:]}.{suffix}"
    path.chmod(0o600)
    damage(path)
    if suffix == "erofs" or damage not in (wrong_types, escaping):  # the file was checked, and is the same
        refused(lambda: image_of(shelf), StoreDamaged)
    refused(lambda: shelf.by_digest("", DIGEST), StoreDamaged)


@pytest.mark.parametrize("damage", [bad_bytes, nothing, nested, fifo, link, huge])
def test_a_damaged_stamp_is_checked_again(shelf: Shelf, damage: Damage) -> None:
    path = shelf.root / f"images/{DIGEST[7:]}.checked"
    before = path.read_bytes()
    damage(path)
    assert image_of(shelf)
    assert path.read_bytes() == before


def test_facts_of_another_image_are_not_taken(shelf: Shelf) -> None:
    path = shelf.root / f"images/{DIGEST[7:]}.json"
    path.write_text(path.read_text().replace("a" * 64, "b" * 64))
    assert "is of sha256:bbb" in refused(lambda: shelf.by_digest("", DIGEST), StoreDamaged).message


@pytest.mark.parametrize("damage", [bad_bytes, nothing, fifo])
def test_whatever_a_lock_holds_it_locks(tmp_path: Path, damage: Damage) -> None:
    path = tmp_path / "lock"
    path.touch()
    damage(path)
    with locked(path), pytest.raises(Busy), locked(path, seconds=0):
        pass


@pytest.mark.parametrize("damage", [directory, link])
def test_a_lock_that_is_none(shelf: Shelf, damage: Damage) -> None:
    path = shelf.root / "lock"
    path.touch()
    damage(path)
    error = refused(lambda: locked(path).__enter__(), StoreDamaged)
    assert str(path) in error.hint


def test_files_among_half_made_things_go(shelf: Shelf) -> None:
    (shelf.root / "building/stray").write_bytes(b"\xff\xfe")
    with work_directory(shelf.root) as work:
        assert [work] == list((shelf.root / "building").iterdir())


def test_a_file_in_place_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"")
    for act in (
        lambda: Shelf(tmp_path / "store").prepare(),
        lambda: TemplateStore(tmp_path / "store").put(built()),
    ):
        refused(act, StoreDamaged)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EROFS, Denied),
        (errno.EACCES, Denied),
        (errno.EMFILE, Busy),
        (errno.EIO, StoreDamaged),
    ],
)
def test_what_the_disk_says(tmp_path: Path, number: int, kind: type[DsecError]) -> None:
    def act() -> None:
        with typed(tmp_path):
            raise OSError(number, os.strerror(number), str(tmp_path / "x"))

    assert refused(act, kind).facts["errno"] == number
    assert type(of_disk(OSError(number, "x"), tmp_path)) is kind


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StorageFull), (errno.EACCES, Denied)])
def test_no_room_to_note_a_use(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DsecError]
) -> None:
    def touch(path: Path, **_: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "touch", touch)
    refused(lambda: image_of(shelf), kind)


def test_a_store_that_is_mounted_read_only_is_read(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", touch)
    assert image_of(shelf)


def test_a_reference_names_the_home_of_its_engine(shelf: Shelf, tmp_path: Path) -> None:
    shelf.hold(DIGEST, "sb-1", tmp_path)
    shelf.hold(DIGEST, "template-1")
    found = {path.suffix: path.read_bytes() for path in (shelf.root / "held").iterdir()}
    device = tmp_path.parent.stat().st_dev
    assert found == {".sb-1": b"%s\0%d" % (os.fsencode(tmp_path), device), ".template-1": b""}
    with pytest.raises(NotFound):
        shelf.hold("sha256:" + "b" * 64, "sb-1", tmp_path)
    assert len(list((shelf.root / "held").iterdir())) == 2


def built(version: str = "1.0.0") -> Built:
    text = f"name: one\nversion: {version}\nruntime: {{base: system}}\n"
    template = parse(text, source="one.yaml").template
    blueprint = digest(template)
    return Built(
        digest=digest_of(blueprint, DIGEST, (), ""),
        blueprint=blueprint,
        template=template,
        base="system",
        base_digest=DIGEST,
        layers=(),
        lock="",
        unenforced=(),
        floating=(),
        built_at=1.0,
    )


@pytest.fixture
def templates(tmp_path: Path) -> TemplateStore:
    store = TemplateStore(tmp_path / "templates")
    store.put(built())
    return store


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tag(templates: TemplateStore, tmp_path: Path, damage: Damage) -> None:
    path = tmp_path / "templates/tags/one/latest"
    assert templates.find("one") == built()  # control
    damage(path)
    for act in (lambda: templates.find("one"), templates.tags):
        assert str(path) in refused(act, StoreDamaged).hint
    assert templates.find(built().reference) == built()
    if path.is_dir():
        refused(lambda: templates.put(built()), StoreDamaged)
        refused(lambda: templates.remove("one"), StoreDamaged)
    else:
        templates.put(built())  # what is built again is whole again
        assert templates.find("one") == built()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_template(templates: TemplateStore, tmp_path: Path, damage: Damage) -> None:
    damage(tmp_path / "templates/built" / f"{built().digest[7:]}.json")
    refused(lambda: templates.find("one"), StoreDamaged)


@pytest.mark.parametrize("damage", [bad_bytes, nothing, nested, wrong_types])
def test_lines_of_the_history_that_are_none(templates: TemplateStore, tmp_path: Path, damage: Damage) -> None:
    damage(tmp_path / "templates/history/one")
    assert templates.history("one") == ()
    templates.put(built("2.0.0"))
    assert [each.digest for each in templates.history("one")] == [built("2.0.0").digest]


@pytest.mark.parametrize("damage", [directory, fifo, link])
def test_a_history_that_is_no_file(templates: TemplateStore, tmp_path: Path, damage: Damage) -> None:
    damage(tmp_path / "templates/history/one")
    refused(lambda: templates.history("one"), StoreDamaged)
    refused(lambda: templates.put(built("2.0.0")), StoreDamaged)


def test_a_history_far_too_long_is_begun_anew(templates: TemplateStore, tmp_path: Path) -> None:
    huge(tmp_path / "templates/history/one")
    refused(lambda: templates.history("one"), StoreDamaged)
    templates.put(built("2.0.0"))
    assert [each.digest for each in templates.history("one")] == [built("2.0.0").digest]


def test_the_history_keeps_the_newest_thousand(templates: TemplateStore, tmp_path: Path) -> None:
    path = tmp_path / "templates/history/one"
    line = path.read_text().replace(built().digest, "%s")
    path.write_text("".join(line.replace("%s", str(each)) for each in range(1999)))
    templates.put(built("2.0.0"))
    assert len(path.read_text().splitlines()) == 2000
    before = templates.history("one")
    templates.put(built())
    lines = path.read_text().splitlines()
    assert len(lines) == 1000
    assert templates.history("one")[:-1] == before[1:]
    assert templates.history("one")[-1].digest == built().digest


def test_a_template_store_with_a_lock_that_is_none(templates: TemplateStore, tmp_path: Path) -> None:
    directory(tmp_path / "templates/lock")
    refused(lambda: templates.put(built("2.0.0")), StoreDamaged)
    assert templates.find("one") == built()


def test_what_may_not_be_read_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: object, *_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", opened)
    refused(lambda: read_small(tmp_path / "x"), Denied)
    refused(lambda: TemplateStore(tmp_path).find("one"), Denied)
    refused(lambda: TemplateStore(tmp_path).find(built().reference), Denied)
    refused(lambda: TemplateStore(tmp_path).history("one"), Denied)
