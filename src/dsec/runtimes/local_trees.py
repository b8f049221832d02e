"""Trees of this machine as tar archives, for a server that is elsewhere; and its archives as trees of this machine.

The same readers and makers as for a guest of our own: what comes in may name anything.
"""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Final

from dsec.model.files import BatchKind, Entry, FileType, Transfer, TreePiece, TreeTag
from dsec.ports.trees import LocalTrees
from dsec.runtimes import archives, trees
from dsec.runtimes.archive_down import Filter, Maker
from dsec.runtimes.archive_up import CheckedTar, Item, local_items

_KINDS: Final = {
    BatchKind.DIRECTORY: tarfile.DIRTYPE,
    BatchKind.FILE: tarfile.REGTYPE,
    BatchKind.SYMLINK: tarfile.SYMTYPE,
}
_TYPES: Final = {
    tarfile.DIRTYPE: FileType.DIRECTORY,
    tarfile.SYMTYPE: FileType.SYMLINK,
    tarfile.FIFOTYPE: FileType.FIFO,
    tarfile.CHRTYPE: FileType.CHAR_DEVICE,
    tarfile.BLKTYPE: FileType.BLOCK_DEVICE,
}
_SECOND: Final = 1_000_000_000


class LocalArchives(LocalTrees):
    """See :class:`LocalTrees`. File I/O runs in threads, in pieces."""

    async def stat(self, local: Path) -> os.stat_result:
        with archives.local_problem("source"):
            return await asyncio.to_thread(local.stat)

    def content(self, local: Path) -> AsyncIterator[bytes]:
        return trees.content(local)

    async def packed(self, local: Path, left_out: list[tuple[str, str]]) -> AsyncIterator[bytes]:
        report = archives.Transfer()
        pieces = _gathered(_packed(local, report))
        try:
            while piece := await asyncio.to_thread(_next, pieces):
                yield piece
        finally:
            asyncio.get_running_loop().run_in_executor(None, pieces.close)
        left_out.extend(report.skipped)

    async def unpacked(self, archive: AsyncIterator[bytes], local: Path) -> Transfer:
        with archives.local_problem("destination"):
            await asyncio.to_thread(local.mkdir, parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        feeding = asyncio.ensure_future(trees.feed(archive, write_end))
        try:
            report = await asyncio.to_thread(_unpack, read_end, local)
            await feeding
        except archives.ArchiveRefused:
            if feeding.done():
                feeding.result()  # what cut the archive short says more than where it was cut
            raise
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        return trees.told(report)

    async def written(self, content: AsyncIterator[bytes], local: Path) -> int:
        async with aclosing(content):  # type: ignore[type-var]
            return await trees.written(content, local)


def _next(pieces: Iterator[bytes]) -> bytes:
    with archives.local_problem("source"):
        return next(pieces, b"")


def _gathered(pieces: Iterator[bytes]) -> Generator[bytes, None, None]:
    """The same bytes in pieces that are worth a thread."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= archives.PIECE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _packed(root: Path, report: archives.Transfer) -> Iterator[bytes]:
    for item in local_items(root, report):
        report.count(item.name, item.size, archives.ArchiveBounds())
        yield _header(item)
        yield from _content(item)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(item: Item) -> bytes:
    op = item.op
    info = tarfile.TarInfo(item.name)
    info.type = _KINDS[op.kind]
    info.size = item.size
    info.mode = op.mode
    info.mtime = op.mtime_ns / _SECOND if op.mtime_ns % _SECOND else op.mtime_ns // _SECOND
    info.linkname = os.fsdecode(op.data) if op.kind is BatchKind.SYMLINK else ""
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(item: Item) -> Iterator[bytes]:
    """As long as the header said: a file that grows meanwhile is cut, one that shrinks ends in zeros."""
    if item.file is None:
        return
    left = item.size
    with item.file as file:
        while left > 0:
            data = file.read(min(left, archives.PIECE)) or bytes(min(left, archives.PIECE))
            left -= len(data)
            yield data
    yield bytes(-item.size % tarfile.BLOCKSIZE)


def _unpack(read_end: int, local: Path) -> archives.Transfer:
    """In a thread: from a pipe to a directory."""
    report = archives.Transfer()
    chosen = Filter(archives.ArchiveBounds(), report)
    with os.fdopen(read_end, "rb") as stream, archives.local_problem("destination"):
        maker = Maker(local, report)
        try:
            with CheckedTar.open(fileobj=stream, mode="r|", errorlevel=2, errors="surrogateescape") as tar:
                for piece in _pieces(tar):
                    if chosen.passes(piece):
                        maker.make([piece])
            maker.finish()
        finally:
            maker.close()
        while stream.read(archives.PIECE):  # what follows an archive is nothing
            pass
    return report


def _pieces(tar: tarfile.TarFile) -> Iterator[TreePiece]:
    """Raises: ArchiveRefused: a name that leads out, or a kind that no tree has."""
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # a long archive must not be remembered
        kind = FileType.FILE if member.isreg() else _TYPES.get(member.type)
        if kind is None:
            raise archives.ArchiveRefused(f"entry {member.name[:200]!r} is of a kind that is not known")
        entry = Entry(
            name=archives.safe_name(member.name) or ".",
            type=kind,
            mode=member.mode,
            size=member.size if kind is FileType.FILE else 0,
            uid=0,
            gid=0,
            mtime_ns=max(0, min(int(member.mtime * _SECOND), 2**62)),
            target=member.linkname if kind is FileType.SYMLINK else "",
        )
        yield TreePiece(TreeTag.ENTRY, entry)
        if kind is FileType.FILE:
            yield from _file_pieces(tar, member)


def _file_pieces(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[TreePiece]:
    file = tar.extractfile(member)
    while file is not None and (data := file.read(archives.PIECE)):
        yield TreePiece(TreeTag.CONTENT, content=data)
    yield TreePiece(TreeTag.FILE_END)
