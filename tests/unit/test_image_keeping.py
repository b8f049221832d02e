"""Looking at a store, taking images out of it by hand, and making room."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import anyio
import pytest

from dsec.control.images import ImageKeeping
from dsec.errors import Conflict, DsecError, NotFound, StoreDamaged
from dsec.images import catalogue, gc
from dsec.images.gc import collect
from dsec.images.holds import holders
from dsec.images.shelf import Shelf
from dsec.images.store import ImageStore

OLD = 1_700_000_000


def digest_of(letter: str) -> str:
    return "sha256:" + letter * 64


def put(shelf: Shelf, letter: str, *names: str, size: int = 1000, used: int = OLD) -> str:
    """An image of that many bytes, last asked for then."""
    shelf.prepare()
    for name in names or (letter,):
        file = shelf.root / "building" / letter
        file.write_bytes(letter.encode() * size)
        shelf.publish(name, name, file, {"digest": digest_of(letter)})
        file.unlink(missing_ok=True)
    for path in shelf.root.glob(f"images/{letter * 64}.*"):
        os.utime(path, (used, used))
    return digest_of(letter)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "store")


@pytest.fixture
def images(shelf: Shelf) -> ImageKeeping:
    return ImageKeeping(ImageStore(shelf.root, bases=shelf.root / "bases.toml"))


def test_what_is_stored_is_told(shelf: Shelf, images: ImageKeeping, tmp_path: Path) -> None:
    assert anyio.run(images.list) == ()
    one = put(shelf, "b", "one", "also-one", size=7)
    other = put(shelf, "a", "other")
    (shelf.root / "names/other").unlink()
    shelf.hold(one, "template-1")
    shelf.hold(one, "dsec-1", tmp_path)
    found = anyio.run(images.list)
    assert [(each.digest, each.names, each.size) for each in found] == [
        (one, ("also-one", "one"), 7),
        (other, (), 1000),
    ]
    assert found[0].used_at == OLD
    assert found[0].held_by == (f"dsec-1 ({tmp_path})", "template-1")
    assert anyio.run(images.verify, one) == found[0]


def test_an_image_that_is_not_what_was_stored(shelf: Shelf, images: ImageKeeping) -> None:
    one = put(shelf, "a")
    path = shelf.root / f"images/{one[7:]}.erofs"
    path.chmod(0o600)
    path.write_bytes(b"b" * 1000)
    with pytest.raises(StoreDamaged, match="holds sha256:"):
        anyio.run(images.verify, one)


def test_what_is_needed_is_not_removed(shelf: Shelf, images: ImageKeeping, tmp_path: Path) -> None:
    one = put(shelf, "a", "one", "two")
    home = tmp_path / "engine"
    home.mkdir()
    shelf.hold(one, "dsec-1", home)
    anyio.run(images.remove, "one")  # another name stands for it
    for name in ("two", one):
        with pytest.raises(Conflict, match="dsec-1") as caught:
            anyio.run(images.remove, name)
        assert caught.value.hint
        assert str(home) in caught.value.message
    assert [each.names for each in anyio.run(images.list)] == [("two",)]
    shelf.release(one, "dsec-1")
    anyio.run(images.remove, "two")
    assert anyio.run(images.list) == ()
    assert not list((shelf.root / "images").iterdir())
    with pytest.raises(NotFound):
        anyio.run(images.remove, "two")


def test_a_digest_removes_all_names(shelf: Shelf, images: ImageKeeping) -> None:
    one = put(shelf, "a", "one", "two")
    put(shelf, "b")
    anyio.run(images.remove, one)
    assert [each.names for each in anyio.run(images.list)] == [("b",)]
    with pytest.raises(NotFound):
        anyio.run(images.remove, one)


def test_a_hold_of_an_engine_that_is_gone_holds_nothing(
    shelf: Shelf, images: ImageKeeping, tmp_path: Path
) -> None:
    one, home = put(shelf, "a"), tmp_path / "engine"
    home.mkdir()
    shelf.hold(one, "dsec-1", home)
    shelf.hold(one, "template-1")
    (shelf.root / "names/a").unlink()
    assert collect(shelf.root) == ()
    shutil.rmtree(home)
    (gone,) = collect(shelf.root)
    assert gone.name == f"{one[7:]}.dsec-1"
    assert (shelf.root / f"images/{one[7:]}.erofs").exists()  # the template's
    shelf.release(one, "template-1")
    freed = anyio.run(images.collect, None)
    assert freed.bytes == 1000
    assert anyio.run(images.list) == ()


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"relative/path", b"/" + b"x" * 300, b"/proc/1/root/\0"]
)
def test_a_hold_that_cannot_be_judged_holds(shelf: Shelf, content: bytes) -> None:
    one = put(shelf, "a")
    (shelf.root / f"held/{one[7:]}.x").write_bytes(content)
    assert collect(shelf.root) == ()
    assert list(holders(shelf.root)) == [one[7:]]


def test_a_hold_that_was_never_written_out_goes(shelf: Shelf) -> None:
    one = put(shelf, "a")
    torn = shelf.root / f"held/.{one[7:]}.x.0123abcd"
    torn.write_bytes(b"")
    assert collect(shelf.root) == ()
    os.utime(torn, (OLD, OLD))
    (shelf.root / "names/a").unlink()
    assert torn in collect(shelf.root)
    assert not list((shelf.root / "images").iterdir())


def test_beyond_a_budget_the_longest_unused_go_first(shelf: Shelf, images: ImageKeeping) -> None:
    for number, letter in enumerate("abcde"):
        put(shelf, letter, used=OLD + number)
    shelf.hold(digest_of("a"), "template-1")
    freed = anyio.run(images.collect, 3000)
    assert (freed.bytes, [each.names for each in anyio.run(images.list)]) == (2000, [("a",), ("d",), ("e",)])
    assert (anyio.run(images.collect, 3000)).paths == ()
    anyio.run(images.collect, 0)
    assert [each.names for each in anyio.run(images.list)] == [("a",)]


def test_what_was_asked_for_a_moment_ago_stays(shelf: Shelf, images: ImageKeeping) -> None:
    put(shelf, "a", used=OLD)
    put(shelf, "b", used=2**31)
    anyio.run(images.collect, 0)
    assert [each.names for each in anyio.run(images.list)] == [("b",)]


TEMPLATE = "template-" + "f" * 64
MADE = "setup-" + "1" * 64


def record(shelf: Shelf, letter: str = "f") -> Path:
    """Of a built template."""
    path = shelf.root / "templates/built" / f"{letter * 64}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


@pytest.mark.parametrize("module", [gc, catalogue])
def test_nobody_holds_what_is_being_removed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, module: object
) -> None:
    one = put(shelf, "a")
    (shelf.root / "names/a").unlink()
    ended: list[DsecError | None] = []

    def hold() -> None:
        try:
            Shelf(shelf.root).hold(one, "other-1")
        except NotFound as error:
            ended.append(error)
        else:
            ended.append(None)

    other = threading.Thread(target=hold)

    def removed(path: Path) -> None:
        if other.ident is None:
            other.start()
            other.join(0.3)  # without a lock it is held by then
        path.unlink()

    monkeypatch.setattr(module, "remove", removed)
    if module is gc:
        assert collect(shelf.root)
    else:
        catalogue.take_out(shelf.root, "", one)
    other.join()
    assert isinstance(ended[0], NotFound)
    assert not list((shelf.root / "held").iterdir())


def test_a_template_holds_for_as_long_as_its_record_is_there(shelf: Shelf, images: ImageKeeping) -> None:
    one = put(shelf, "a")
    (shelf.root / "names/a").unlink()
    shelf.hold(one, TEMPLATE)
    reference = shelf.root / f"held/{one[7:]}.{TEMPLATE}"
    assert collect(shelf.root) == (), "it is young: its record may be about to be written"
    os.utime(reference, (OLD, OLD))
    path = record(shelf)
    assert collect(shelf.root) == ()
    with pytest.raises(Conflict, match="template-fff"):
        anyio.run(images.remove, one)
    path.unlink()
    assert anyio.run(images.list)[0].held_by == ()
    assert reference in collect(shelf.root)
    assert anyio.run(images.list) == ()


def test_a_reference_that_is_made_again_is_young(shelf: Shelf) -> None:
    one = put(shelf, "a")
    (shelf.root / "names/a").unlink()
    shelf.hold(one, TEMPLATE)
    os.utime(shelf.root / f"held/{one[7:]}.{TEMPLATE}", (OLD, OLD))
    shelf.hold(one, TEMPLATE)
    assert collect(shelf.root) == ()


def test_a_home_that_is_not_mounted_is_not_gone(shelf: Shelf, images: ImageKeeping, tmp_path: Path) -> None:
    one, home = put(shelf, "a"), tmp_path / "disk/engine"
    (shelf.root / "names/a").unlink()
    home.mkdir(parents=True)
    shelf.hold(one, "dsec-1", home)
    reference = shelf.root / f"held/{one[7:]}.dsec-1"
    where, _, device = reference.read_bytes().partition(b"\0")
    assert (where, device) == (os.fsencode(home), b"%d" % tmp_path.stat().st_dev)
    shutil.rmtree(tmp_path / "disk")
    for other in (
        b"\0%d" % (int(device) + 1),
        b"",
    ):  # of a disk that is elsewhere now, and of an earlier release
        reference.write_bytes(where + other)
        assert collect(shelf.root) == ()
        assert anyio.run(images.list)[0].held_by
    reference.write_bytes(where + b"\0" + device)
    assert reference in collect(shelf.root)


def test_what_was_made_from_something_is_kept_only_as_long_as_it_is_needed(
    shelf: Shelf, images: ImageKeeping
) -> None:
    one = put(shelf, "a", MADE)
    assert (shelf.root / "made" / MADE).exists()
    assert anyio.run(images.list)[0].names == ()
    shelf.hold(one, TEMPLATE)
    record(shelf)
    assert collect(shelf.root) == ()
    meaning = shelf.meaning(MADE)
    assert meaning is not None
    assert shelf.load(MADE, MADE, meaning).digest == one
    shelf.let_go(TEMPLATE)
    os.utime(shelf.root / "made" / MADE, (OLD, OLD))
    assert collect(shelf.root) == (), "it was asked for a moment ago"
    os.utime(shelf.root / f"images/{one[7:]}.used", (OLD, OLD))
    assert shelf.root / "made" / MADE in collect(shelf.root)
    assert anyio.run(images.list) == ()
    assert shelf.meaning(MADE) is None


def test_what_earlier_releases_kept_among_the_names_moves(shelf: Shelf, images: ImageKeeping) -> None:
    one = put(shelf, "a", "system", MADE)
    for name in (MADE, "tree-" + "2" * 64):
        (shelf.root / "names" / name).write_text(json.dumps({"name": name, "digest": one}))
    (shelf.root / "made" / MADE).unlink()
    shelf.prepare()
    assert sorted(path.name for path in (shelf.root / "names").iterdir()) == ["system"]
    assert shelf.meaning(MADE) == {"name": MADE, "digest": one}
    assert anyio.run(images.list)[0].names == ("system",)


def test_what_is_published_without_a_name_has_none(shelf: Shelf, tmp_path: Path) -> None:
    shelf.prepare()
    file = tmp_path / "file"
    file.write_bytes(b"x")
    shelf.publish("", digest_of("a"), file, {"digest": digest_of("a")})
    assert not [*(shelf.root / "names").iterdir(), *(shelf.root / "made").iterdir()]
    assert shelf.by_digest("any", digest_of("a")) is not None


def test_what_shows_this_machine_is_called_so(shelf: Shelf, tmp_path: Path) -> None:
    shelf.prepare()
    file = tmp_path / "file"
    file.write_bytes(b"x")
    shelf.publish("host", "host", file, {"digest": digest_of("a"), "shows": ["/usr/bin"]})
    found = shelf.by_digest("system", digest_of("a"))
    assert found is not None
    assert (found.name, found.mutable) == ("host", True)
