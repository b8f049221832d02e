"""Bundles: the same tree on the other side, and nothing at all of one that was changed on its way."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import anyio
import pytest

from dsec.errors import BadRequest, DsecError, StorageFull, TooLarge, Unsupported
from dsec.images.attributes import OPAQUE
from dsec.images.bundle import MAGIC, SUM_BYTES, head
from dsec.images.carrier import Carrier
from dsec.images.host import build_skeleton
from dsec.images.layer_copy import copy_layer
from dsec.images.limits import LATEST
from dsec.images.store import ImageStore
from dsec.images.tree import tree_digest
from dsec.ports.storage import Image
from dsec.stores.mounts import mount_image
from dsec.testing.images import Entry, directory, file, hardlink, layer, symlink

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(300)]
ABOUT = {"name": "something"}


@contextlib.contextmanager
def looked(path: Path) -> Iterator[Path]:
    yield path


def filled(tree: Path) -> Path:
    """Everything that a tree may have."""
    (tree / "folder/deep").mkdir(parents=True)
    (tree / "folder/file").write_bytes(b"content" * 1000)
    os.link(tree / "folder/file", tree / "again")
    (tree / "link").symlink_to("/etc/passwd")
    (tree / "odd\udcff\n name=").write_bytes(b"")
    (tree / ("long" * 60)).mkdir()
    (tree / ("long" * 60) / ("n" * 200)).write_bytes(b"x")
    with (tree / "sparse").open("wb") as sparse:
        sparse.truncate(3 << 20)
        sparse.seek(1 << 20)
        sparse.write(b"middle")
    os.mkfifo(tree / "fifo")
    os.mknod(tree / "socket", stat.S_IFSOCK | 0o600)
    os.mknod(tree / "gone", stat.S_IFCHR, os.makedev(0, 0))
    os.setxattr(tree / "folder", OPAQUE, b"y")
    os.setxattr(tree / "folder/file", "user.odd=\udcfe %", b"\0=\xff\n")
    os.chown(tree / "folder/file", 1000, 65535)
    (tree / "folder/file").chmod(0o6751)
    for number, path in enumerate((*tree.rglob("*"), tree)):
        os.utime(path, ns=(0, number * 10**17 + number), follow_symlinks=False)
    return tree


async def exported(store: Path, *trees: Path) -> bytes:
    carrier = Carrier(store)
    sources = [(tree_digest(tree), looked(tree)) for tree in trees]
    return b"".join([piece async for piece in carrier.pack("test", ABOUT, sources)])


async def pieces(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


async def imported(store: Path, data: bytes, *, max_bytes: int = 1 << 30) -> list[Image]:
    carrier = Carrier(store, max_bytes=max_bytes)
    async with carrier.arrived("test", pieces(data)) as bundle:
        assert bundle.about == ABOUT
        return await carrier.images(bundle, [part.digest for part in bundle.parts])


def left(store: Path) -> list[Path]:
    """What is in a store, but for locks."""
    return [
        path
        for path in store.rglob("*")
        if path.is_file() and path.parent.name != "locks" and path.name != "lock"
    ]


def test_a_tree_is_the_same_on_the_other_side(tmp_path: Path) -> None:
    tree = filled(tmp_path / "tree")
    small = tmp_path / "small"
    small.mkdir()
    data = anyio.run(exported, tmp_path / "one", tree, small)
    assert data == anyio.run(exported, tmp_path / "two", tree, small), "the same trees are the same bytes"
    assert not left(tmp_path / "one")
    images = anyio.run(imported, tmp_path / "other", data)
    assert [image.digest for image in images] == [tree_digest(tree), tree_digest(small)]
    assert not list((tmp_path / "other/building").iterdir())
    descriptor = mount_image(images[0].path)
    try:
        root = Path(f"/proc/self/fd/{descriptor}")
        assert (root / "again").stat().st_ino == (root / "folder/file").stat().st_ino
        assert stat.S_ISCHR((root / "gone").lstat().st_mode)
        assert os.getxattr(root / "folder", OPAQUE) == b"y"
        assert os.getxattr(root / "folder/file", "user.odd=\udcfe %") == b"\0=\xff\n"
        assert anyio.run(packed_again, tmp_path / "other", root, images[0].digest) == anyio.run(
            packed_again, tmp_path / "other", tree, images[0].digest
        )
    finally:
        os.close(descriptor)


async def packed_again(store: Path, tree: Path, digest: str) -> bytes:
    return b"".join([piece async for piece in Carrier(store).pack("test", ABOUT, [(digest, looked(tree))])])


def test_what_is_stored_is_not_unpacked_again(tmp_path: Path) -> None:
    data = anyio.run(exported, tmp_path / "store", filled(tmp_path / "tree"))
    (first,) = anyio.run(imported, tmp_path / "store", data)
    before = first.path.stat()
    forged = bundle_of(first.digest, layer(file("no tree")))  # would be refused if it were looked at
    (again,) = anyio.run(imported, tmp_path / "store", forged)
    assert (again.path.stat().st_ino, again.path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def bundle_of(
    digest: str, archive: bytes, *, packed: bool = True, about: Mapping[str, object] = ABOUT
) -> bytes:
    """A bundle with a correct sum, whatever is in it."""
    body = gzip.compress(archive, mtime=0) if packed else archive
    whole = head("test", about, [(digest, len(body))]) + body
    return whole + hashlib.sha256(whole).digest()


ROOT = directory(".", mode=0o755)


HOSTILE: Mapping[str, tuple[Entry, ...]] = {
    "no root": (file("a"),),
    "a root that is a file": (file("."),),
    "nothing": (),
    "an absolute path": (ROOT, file("/a")),
    "a path that leads out": (ROOT, file("../a")),
    "dots within": (ROOT, directory("d"), file("d/../a")),
    "another spelling": (ROOT, file("a"), file("./a")),
    "the same twice": (ROOT, file("a"), file("a")),
    "no directory": (ROOT, file("d/a")),
    "through a link": (ROOT, symlink("d", "/"), file("d/a")),
    "a link in place of a directory": (ROOT, directory("d"), symlink("d", "/"), file("d/a")),
    "a hard link to the outside": (ROOT, hardlink("a", "/etc/passwd")),
    "a hard link to a directory": (ROOT, directory("d"), hardlink("a", "d")),
    "a hard link to itself": (ROOT, hardlink("a", "a")),
    "a device": (ROOT, Entry(name="null", kind=tarfile.CHRTYPE, device=(1, 3))),
    "a block device": (ROOT, Entry(name="disk", kind=tarfile.BLKTYPE)),
    "a strange owner": (ROOT, file("a", uid=65536)),
    "an attribute of overlays": (
        ROOT,
        directory("d", pax={"LIBARCHIVE.xattr.trusted.overlay.redirect": "L2V0Yw=="}),
    ),
    "an opaque file": (ROOT, file("d", pax={f"LIBARCHIVE.xattr.{OPAQUE}": "eQ=="})),
    "an opaque root": (directory(".", pax={f"LIBARCHIVE.xattr.{OPAQUE}": "eQ=="}),),
    "a capability": (ROOT, file("d", pax={"LIBARCHIVE.xattr.security.capability": "AQAAAg=="})),
    "an attribute without a value": (ROOT, file("d", pax={"LIBARCHIVE.xattr.user.a": "%%"})),
    "a date that is none": (ROOT, file("d", pax={"mtime": "1.5"})),
    "a sparse file": (
        ROOT,
        file("d", pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "5"}),
    ),
    "too deep": (ROOT, *(directory("/".join("d" * depth)) for depth in range(1, 203))),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(tmp_path: Path, what: str) -> None:
    data = bundle_of(f"sha256:{'0' * 64}", layer(*HOSTILE[what]))
    with pytest.raises((BadRequest, TooLarge)) as caught:
        anyio.run(imported, tmp_path / "store", data)
    assert "what is said to be" not in str(caught.value), "it was refused before it was a tree"
    assert not left(tmp_path / "store")
    assert sorted(os.listdir(tmp_path)) == ["store"]


def test_an_honest_one_of_the_same_making_is_taken(tmp_path: Path) -> None:
    """Positive control for what is refused."""
    archive = layer(ROOT, directory("d"), file("d/a", b"x"), hardlink("e", "d/a"), symlink("l", "/"))
    with pytest.raises(BadRequest, match="what is said to be") as caught:
        anyio.run(imported, tmp_path / "store", bundle_of(f"sha256:{'0' * 64}", archive))
    data = bundle_of(str(caught.value.facts["found"]), archive)
    assert anyio.run(imported, tmp_path / "store", data)


def test_another_tree_is_refused(tmp_path: Path) -> None:
    archive = layer(ROOT, file("a", b"x"))
    data = bundle_of(f"sha256:{'0' * 64}", archive)
    with pytest.raises(BadRequest, match="what is said to be"):
        anyio.run(imported, tmp_path / "store", data)
    assert not left(tmp_path / "store")


def test_a_bomb_is_bounded(tmp_path: Path) -> None:
    bomb = gzip.compress(layer(ROOT, file("a", bytes(20 << 20))))
    data = bundle_of(f"sha256:{'0' * 64}", bomb, packed=False)
    with pytest.raises(TooLarge):
        anyio.run(lambda: imported(tmp_path / "store", data, max_bytes=10 << 20))
    padded = gzip.compress(layer(ROOT)) + gzip.compress(bytes(1 << 20)) * 100  # after the end of the archive
    with pytest.raises(TooLarge):
        anyio.run(
            lambda: imported(
                tmp_path / "store", bundle_of(f"sha256:{'0' * 64}", padded, packed=False), max_bytes=10 << 20
            )
        )
    with pytest.raises(TooLarge):
        anyio.run(lambda: imported(tmp_path / "store", bytes(11 << 20), max_bytes=10 << 20))
    assert not left(tmp_path / "store")


def test_every_damage_is_seen(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(random.Random(1).randbytes(3000))
    data = anyio.run(exported, tmp_path / "from", tree)
    chance = random.Random(2)
    damaged = [
        data[:size] for size in (0, 5, len(MAGIC), len(MAGIC) + 8, 100, len(data) - SUM_BYTES, len(data) - 1)
    ]
    damaged.append(data + b"\0")
    for position in (*range(0, 150, 7), *(chance.randrange(len(data)) for _ in range(60)), len(data) - 1):
        flipped = bytearray(data)
        flipped[position] ^= 1 << chance.randrange(8)
        damaged.append(bytes(flipped))
    for each in damaged:
        with pytest.raises((BadRequest, TooLarge)):
            anyio.run(imported, tmp_path / "store", each)
    assert not left(tmp_path / "store")
    assert anyio.run(imported, tmp_path / "store", data)


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"kind":"test","about":{},"trees":[]}',
        b'{"kind":"test","about":{},"trees":[{"digest":"sha256:../../etc","size":1}]}',
        b'{"kind":"test","about":{},"trees":[{"digest":"sha256:%s","size":-1}]}' % (b"0" * 64),
        b'{"kind":"test","about":{},"trees":[{"digest":"sha256:%s","size":1e400}]}' % (b"0" * 64),
        b'{"kind":"test","about":{},"trees":[7]}',
        b'{"kind":7,"about":{},"trees":[]}',
    ],
)
def test_a_manifest_that_is_none(tmp_path: Path, manifest: bytes) -> None:
    whole = MAGIC + len(manifest).to_bytes(8, "big") + manifest
    with pytest.raises(BadRequest):
        anyio.run(imported, tmp_path / "store", whole + hashlib.sha256(whole).digest())
    assert not left(tmp_path / "store")


def test_an_endless_or_broken_stream_leaves_nothing(tmp_path: Path) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield MAGIC
        raise StorageFull("the other side")

    async def work() -> None:
        carrier = Carrier(tmp_path / "store")
        with pytest.raises(StorageFull, match="the other side"):
            async with carrier.arrived("test", breaks()):
                pass

        taken = anyio.Event()

        async def waits() -> AsyncIterator[bytes]:
            yield MAGIC
            taken.set()
            await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            group.start_soon(enter, carrier, waits())
            await taken.wait()
            assert list((tmp_path / "store/building").glob("*/bundle"))
            group.cancel_scope.cancel()

    async def enter(carrier: Carrier, source: AsyncIterator[bytes]) -> None:
        async with carrier.arrived("test", source):
            pass

    anyio.run(work)
    assert not list((tmp_path / "store/building").iterdir())


def test_two_import_the_same_at_once(tmp_path: Path) -> None:
    data = anyio.run(exported, tmp_path / "from", filled(tmp_path / "tree"))
    found: list[Image] = []

    async def work() -> None:
        async def one() -> None:
            found.extend(await imported(tmp_path / "store", data))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(one)

    anyio.run(work)
    assert len({image.digest for image in found}) == 1
    assert not list((tmp_path / "store/building").iterdir())


def test_another_kind_is_told(tmp_path: Path) -> None:
    whole = head("snapshot", {}, [(f"sha256:{'0' * 64}", 1)]) + b"x"
    with pytest.raises(DsecError, match="snapshot"):
        anyio.run(imported, tmp_path / "store", whole + hashlib.sha256(whole).digest())
    assert json.loads(whole[len(MAGIC) + 8 : -1])["kind"] == "snapshot"


def bundle_of_two(first: tuple[str, bytes], second: tuple[str, bytes]) -> bytes:
    parts = [(digest, gzip.compress(archive, mtime=0)) for digest, archive in (first, second)]
    whole = head("test", ABOUT, [(digest, len(body)) for digest, body in parts])
    whole += b"".join(body for _, body in parts)
    return whole + hashlib.sha256(whole).digest()


def digest_of(archive: bytes, store: Path) -> str:
    """Of the tree in it."""
    with pytest.raises(BadRequest, match="what is said to be") as caught:
        anyio.run(imported, store, bundle_of(f"sha256:{'0' * 64}", archive))
    return str(caught.value.facts["found"])


def test_no_tree_is_kept_unless_all_are_what_they_should_be(tmp_path: Path) -> None:
    good, other = layer(ROOT, file("a", b"x")), layer(ROOT, file("b", b"y"))
    digests = [digest_of(archive, tmp_path / "store") for archive in (good, other)]
    lie = bundle_of_two((digests[0], good), (f"sha256:{'0' * 64}", other))
    with pytest.raises(BadRequest, match="what is said to be"):
        anyio.run(imported, tmp_path / "store", lie)
    assert not left(tmp_path / "store")
    honest = bundle_of_two((digests[0], good), (digests[1], other))  # positive control
    assert [image.digest for image in anyio.run(imported, tmp_path / "store", honest)] == digests
    assert not list((tmp_path / "store/names").iterdir()), "nothing but who needs it keeps what came in"


@pytest.mark.parametrize("path", ["lost+found", "d/lost+found", "d/lost+found.txt"])
def test_what_no_image_can_hold_is_refused_by_its_path(tmp_path: Path, path: str) -> None:
    """mkfs.erofs passes over such names: the image would lack what its digest covers."""
    archive = layer(ROOT, directory("d"), file(path))
    with pytest.raises(Unsupported, match=path.replace("+", "[+]")):
        anyio.run(imported, tmp_path / "store", bundle_of(digest_of(archive, tmp_path / "store"), archive))
    assert not left(tmp_path / "store")


def test_the_latest_date_that_is_kept_goes_along(tmp_path: Path) -> None:
    source, tree = tmp_path / "source", tmp_path / "tree"
    for path in (source, tree):
        path.mkdir()
    (source / "late").write_bytes(b"")
    os.utime(source / "late", ns=(0, LATEST + 10**12))
    copy_layer(source, tree)
    assert (tree / "late").stat().st_mtime_ns == LATEST
    data = anyio.run(exported, tmp_path / "one", tree)
    (image,) = anyio.run(imported, tmp_path / "two", data)
    assert image.digest == tree_digest(tree)
    beyond = layer(ROOT, file("a", pax={"mtime": f"{LATEST // 10**9 + 1}.000000000"}))
    with pytest.raises(BadRequest, match="date"):
        anyio.run(imported, tmp_path / "three", bundle_of(f"sha256:{'0' * 64}", beyond))


def test_a_bundle_never_means_what_shows_this_machine(tmp_path: Path) -> None:
    store = tmp_path / "store"
    host = anyio.run(ImageStore(store).get, "host")
    forged = bundle_of(host.digest, layer(ROOT, file("any")))
    with pytest.raises(BadRequest, match="programs of this machine"):
        anyio.run(imported, store, forged)
    skeleton = tmp_path / "skeleton"
    skeleton.mkdir()
    build_skeleton(skeleton)
    assert tree_digest(skeleton) != host.digest, (
        "a tree that comes from elsewhere is never taken for base host"
    )
