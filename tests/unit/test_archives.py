"""Archives: hostile ones are refused before anything is made, trees come down without leaving their directory."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import pytest

from dsec.errors import Conflict, DsecError, FileMissing, ProtocolError, TooLarge
from dsec.model.files import (
    Batch,
    BatchKind,
    BatchOp,
    Change,
    Entry,
    FileEvent,
    FileType,
    Identity,
    Listing,
    SetAttr,
    TreePiece,
    TreeTag,
    WriteOptions,
)
from dsec.ports.guest import GuestFiles
from dsec.runtimes import archive_down, archive_up
from dsec.runtimes.archives import ArchiveBounds, ArchiveRefused, Transfer

ME = Identity(1000, 1000)


class Recorded(GuestFiles):
    """Remembers what was asked for."""

    def __init__(self) -> None:
        self.ops: list[BatchOp] = []
        self.written: dict[str, bytes] = {}
        self.attributes: list[SetAttr] = []

    async def apply(self, change: Change, *, who: Identity) -> None:
        if isinstance(change, Batch):
            self.ops += change.ops
        elif isinstance(change, SetAttr):
            self.attributes.append(change)

    async def write(
        self, path: str, content: AsyncIterator[bytes], *, who: Identity, options: WriteOptions
    ) -> Entry:
        assert options.root == "/r"
        self.written[path] = b"".join([piece async for piece in content])
        return node(path)

    async def stat(self, path: str, *, who: Identity, follow: bool = True) -> Entry:
        raise FileMissing(path)

    async def list(self, path: str, *, who: Identity, limit: int = 1) -> Listing:
        raise FileMissing(path)

    def read(self, path: str, *, who: Identity, offset: int = 0, length: int = 0) -> AsyncIterator[bytes]:
        raise FileMissing(path)

    async def watch(
        self, path: str, *, who: Identity, recursive: bool = False
    ) -> AsyncGenerator[FileEvent, None]:
        raise FileMissing(path)

    def tree(
        self, path: str, *, who: Identity, max_bytes: int = 0, max_entries: int = 0
    ) -> AsyncIterator[TreePiece]:
        raise FileMissing(path)


def node(name: str, kind: FileType = FileType.FILE, size: int = 0, target: str = "") -> Entry:
    mode = 0o4755 if kind is FileType.FILE else 0o755
    return Entry(name=name, type=kind, mode=mode, size=size, uid=5, gid=6, mtime_ns=10**9, target=target)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mtime = kind, link, len(data), 7
    padding = bytes(-len(data) % 512)
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + data + padding


def up(*members: bytes, bounds: ArchiveBounds | None = None) -> tuple[Recorded, Transfer]:
    files = Recorded()
    stream = io.BytesIO(b"".join(members) + bytes(1024))
    return files, asyncio.run(archive_up.upload_tar(files, stream, "/r", who=ME, bounds=bounds))


def test_a_tar_archive_goes_up() -> None:
    big = os.urandom(300_000)
    files, report = up(
        member("./", tarfile.DIRTYPE),
        member("./d/", tarfile.DIRTYPE),
        member("d/small", data=b"hello"),
        member("d/l", tarfile.SYMTYPE, "../big"),
        member("big", data=big),
        member("h", tarfile.LNKTYPE, "d/small"),
    )
    assert [(op.kind, op.path, op.data) for op in files.ops] == [
        (BatchKind.DIRECTORY, b"d", b""),
        (BatchKind.FILE, b"d/small", b"hello"),
        (BatchKind.SYMLINK, b"d/l", b"../big"),
        (BatchKind.HARD_LINK, b"h", b"d/small"),
    ]
    assert files.written == {"big": big}
    assert {change.path for change in files.attributes} == {"/r/big", "/r/d"}
    assert (report.entries, report.bytes) == (6, 300_005)


def test_parents_that_an_archive_does_not_name_are_made() -> None:
    files, _ = up(member("a/b/c", data=b"1"), member("a/b/d", data=b"2"))
    kept = archive_up.KEEP_TIME
    assert [(op.path, op.mtime_ns == kept) for op in files.ops] == [
        (b"a", True),
        (b"a/b", True),
        (b"a/b/c", False),
        (b"a/b/d", False),
    ]
    assert not files.attributes


@pytest.mark.parametrize(
    "hostile",
    [
        member("/etc/passwd", data=b"x"),
        member("../x", data=b"x"),
        member("a/../../x", data=b"x"),
        member("l", tarfile.SYMTYPE, "/etc"),
        member("l", tarfile.SYMTYPE, ".."),
        member("a/l", tarfile.SYMTYPE, "../../x"),
        member("l", tarfile.SYMTYPE, "d/.."),
        member("h", tarfile.LNKTYPE, "/etc/passwd"),
        member("h", tarfile.LNKTYPE, "../x"),
        member("dev", tarfile.CHRTYPE),
        member("dev", tarfile.BLKTYPE),
        member("fifo", tarfile.FIFOTYPE),
        member("n" * 256, data=b"x"),
        member("sparse", tarfile.GNUTYPE_SPARSE),
        member("x", tarfile.XHDTYPE, data=bytes(2**20 + 1)),
        member("x", tarfile.XGLTYPE, data=bytes(2**20 + 1)),
        member("x", tarfile.GNUTYPE_LONGNAME, data=b"n" * (2**20 + 1)),
    ],
)
def test_hostile_entries_are_refused(hostile: bytes) -> None:
    with pytest.raises(ArchiveRefused) as refused:
        up(member("before", data=b"x"), hostile)
    assert refused.value.facts["entry"]


@pytest.mark.parametrize(
    "junk", [b"junk" * 500, b"\x1f\x8b" + b"junk" * 500, member("a", data=b"x" * 5000)[:2000]]
)
def test_what_is_no_archive(junk: bytes) -> None:
    files = Recorded()
    with pytest.raises(ArchiveRefused):
        asyncio.run(archive_up.upload_tar(files, io.BytesIO(junk), "/r", who=ME))


def test_bombs_meet_the_bounds() -> None:
    with pytest.raises(TooLarge) as large:
        up(member("a", data=bytes(600)), member("b", data=bytes(600)), bounds=ArchiveBounds(max_bytes=1000))
    assert large.value.facts["entry"] == "b"
    with pytest.raises(TooLarge):
        up(*[member(f"f{n}") for n in range(5)], bounds=ArchiveBounds(max_entries=4))


def test_a_local_directory_goes_up(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_bytes(b"hello")
    (tmp_path / "out").symlink_to("/etc")
    os.mkfifo(tmp_path / "fifo")
    files = Recorded()
    report = asyncio.run(archive_up.upload_directory(files, tmp_path, "/r", who=ME))
    assert {(op.path, op.data) for op in files.ops} == {
        (b"d", b""),
        (b"d/e", b""),
        (b"d/e/f", b"hello"),
        (b"out", b"/etc"),
    }
    assert report.skipped == [("fifo", "special file")]


# --- down --------------------------------------------------------------------------------------------------------


def tree(*entries: Entry | tuple[Entry, bytes, int], end: int = 0) -> list[TreePiece]:
    pieces = [TreePiece(TreeTag.ENTRY, entry=node(".", FileType.DIRECTORY))]
    for item in entries:
        entry, data, status = item if isinstance(item, tuple) else (item, b"", 0)
        pieces.append(TreePiece(TreeTag.ENTRY, entry=entry))
        if data:
            pieces.append(TreePiece(TreeTag.CONTENT, content=data))
        if entry.type is FileType.FILE:
            pieces.append(TreePiece(TreeTag.FILE_END, status=status))
    return [*pieces, TreePiece(TreeTag.TREE_END, status=end)]


async def stream(pieces: list[TreePiece]) -> AsyncIterator[TreePiece]:
    for piece in pieces:
        yield piece


def down(target: Path, pieces: list[TreePiece]) -> Transfer:
    return asyncio.run(archive_down.download_directory(stream(pieces), target))


SAMPLE = tree(
    node("d", FileType.DIRECTORY),
    (node("d/f", size=5), b"hello", 0),
    node("d/l", FileType.SYMLINK, target="../g"),
    node("out", FileType.SYMLINK, target="/etc/passwd"),
    node("fifo", FileType.FIFO),
    (node("g", size=9), b"short", 1),
    (node("locked", size=9), b"", 2),
)


def test_a_tree_comes_down(tmp_path: Path) -> None:
    report = down(tmp_path, SAMPLE)
    assert (tmp_path / "d" / "f").read_bytes() == b"hello"
    assert (tmp_path / "d" / "f").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "d" / "f").stat().st_mtime_ns == 10**9
    assert os.readlink(tmp_path / "d" / "l") == "../g"
    assert sorted(os.listdir(tmp_path)) == ["d", "g"]
    assert [name for name, _ in report.skipped] == ["out", "fifo", "g", "locked"]


def test_a_tree_becomes_a_tar_archive() -> None:
    async def main() -> bytes:
        return b"".join([data async for data in archive_down.download_tar(stream(SAMPLE), report)])

    report = Transfer()
    with tarfile.open(fileobj=io.BytesIO(asyncio.run(main()))) as tar:
        assert tar.getnames() == [".", "d", "d/f", "d/l", "g"]
        content = tar.extractfile("d/f")
        short = tar.extractfile("g")
        assert content is not None
        assert short is not None
        assert content.read() == b"hello"
        assert short.read() == b"short\0\0\0\0"
    assert [name for name, _ in report.skipped] == ["out", "fifo", "g", "locked"]


def put_link(target: Path, outside: Path) -> None:
    (target / "d").symlink_to(outside)


def put_file_link(target: Path, outside: Path) -> None:
    (target / "d").mkdir()
    (target / "d" / "f").symlink_to(outside / "f")


@pytest.mark.parametrize("prepare", [put_link, put_file_link])
def test_links_at_the_destination_are_not_followed(
    tmp_path: Path, prepare: Callable[[Path, Path], None]
) -> None:
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir()
    prepare(target, outside)
    with pytest.raises(Conflict):
        down(target, SAMPLE)
    assert os.listdir(outside) == []


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        (tree(node("l", FileType.SYMLINK, target="x"), (node("l/f"), b"", 0)), DsecError),
        (tree((node("../f"), b"", 0)), ArchiveRefused),
        (tree((node("/f"), b"", 0)), ArchiveRefused),
        (tree((node("f", size=2), b"123", 0)), ProtocolError),
        (tree((node("f"), b"", 0), (node("f"), b"", 0)), Conflict),
        (tree(end=1), TooLarge),
    ],
)
def test_hostile_trees(tmp_path: Path, pieces: list[TreePiece], kind: type[DsecError]) -> None:
    target = tmp_path / "t"
    target.mkdir()
    with pytest.raises(kind):
        down(target, pieces)
    assert os.listdir(tmp_path) == ["t"]
