"""Trees down from a sandbox: as a tar archive, or below a local directory.

Each directory is opened from its parent without following symlinks, and each file is made new. File I/O runs in threads.
"""

from __future__ import annotations

import asyncio
import os
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from dsec.errors import ProtocolError, TooLarge
from dsec.model.files import Entry, FileType, TreePiece, TreeTag
from dsec.runtimes.archives import (
    BATCH_OPS,
    MODE_BITS,
    PIECE,
    ArchiveBounds,
    ArchiveRefused,
    Transfer,
    check_link,
    local_problem,
    safe_name,
)

_DIR_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Filter:
    """Checks the pieces of a tree and leaves out what may not be taken; what passes is safe to make, in order."""

    def __init__(self, bounds: ArchiveBounds, report: Transfer) -> None:
        self._bounds = bounds
        self._report = report
        self._left = 0
        self._skipping = False

    def passes(self, piece: TreePiece) -> bool:
        """Raises: ProtocolError, ArchiveRefused, TooLarge."""
        if piece.tag is TreeTag.TREE_END:
            if piece.status:
                bound = self._bounds.max_bytes if piece.status == 1 else self._bounds.max_entries
                what = "bytes" if piece.status == 1 else "entries"
                raise TooLarge(
                    f"the tree has more than {bound} {what}", hint="raise the bound or take a part"
                )
            return False
        if piece.entry is not None:
            self._skipping = not self._takes(piece.entry)
            self._left = piece.entry.size
        elif piece.tag is TreeTag.CONTENT:
            self._left -= len(piece.content)
            if self._left < 0:
                raise ProtocolError("a file of a tree has more content than its entry says")
        return not self._skipping

    def _takes(self, entry: Entry) -> bool:
        name = "" if entry.name == "." else safe_name(entry.name)
        self._report.count(entry.name, entry.size if entry.type is FileType.FILE else 0, self._bounds)
        if entry.type is FileType.SYMLINK:
            try:
                check_link(name, entry.target)
            except ArchiveRefused as wrong:
                self._report.skip(entry.name, wrong.message)
                return False
        elif entry.type not in (FileType.FILE, FileType.DIRECTORY):
            self._report.skip(entry.name, f"special file ({entry.type})")
            return False
        return True


class _TarMaker:
    """Pieces of a tree as bytes of a tar archive. A header waits until its file has proved readable."""

    _KINDS: ClassVar[dict[FileType, bytes]] = {
        FileType.FILE: tarfile.REGTYPE,
        FileType.DIRECTORY: tarfile.DIRTYPE,
        FileType.SYMLINK: tarfile.SYMTYPE,
    }

    def __init__(self, report: Transfer) -> None:
        self._report = report
        self._waiting: Entry | None = None
        self._name = ""
        self._left = self._padding = 0

    def feed(self, piece: TreePiece) -> bytes:
        """The bytes that this piece adds."""
        if piece.entry is not None:
            if piece.entry.type is not FileType.FILE:
                return self._header(piece.entry)
            self._waiting, self._name, self._left = piece.entry, piece.entry.name, piece.entry.size
            self._padding = -piece.entry.size % tarfile.BLOCKSIZE
            return b""
        head = b""
        if self._waiting is not None:
            if piece.tag is TreeTag.FILE_END and piece.status == 2:
                self._report.skip(self._name, "could not be read")
                self._waiting = None
                return b""
            head, self._waiting = self._header(self._waiting), None
        self._left -= len(piece.content)
        return head + piece.content

    def tail(self, piece: TreePiece) -> Iterator[bytes]:
        """At the end of a file: zeros for what it lacks, in pieces, and padding."""
        if piece.tag is not TreeTag.FILE_END:
            return
        if self._left:
            self._report.skip(self._name, f"became shorter: its last {self._left} bytes are zeros")
        while self._left > 0:
            yield bytes(min(self._left, PIECE))
            self._left -= min(self._left, PIECE)
        yield bytes(self._padding)

    def _header(self, entry: Entry) -> bytes:
        info = tarfile.TarInfo(entry.name)
        info.type = self._KINDS[entry.type]
        info.size = entry.size if entry.type is FileType.FILE else 0
        info.mode, info.uid, info.gid = entry.mode & MODE_BITS, entry.uid, entry.gid
        info.mtime = entry.mtime_ns // 1_000_000_000
        info.linkname = entry.target
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


async def download_tar(
    pieces: AsyncIterator[TreePiece], report: Transfer, *, bounds: ArchiveBounds | None = None
) -> AsyncIterator[bytes]:
    """A tree as an uncompressed tar archive. ``report`` tells afterwards what was left out.

    Raises:
        TooLarge: the tree passes a bound (the archive has no end then). Whatever ``pieces`` raises.
    """
    chosen = Filter(bounds or ArchiveBounds(), report)
    maker = _TarMaker(report)
    async for piece in pieces:
        if not chosen.passes(piece):
            continue
        skipped = report.skipped_count
        data = maker.feed(piece)
        if data:
            yield data
        if report.skipped_count == skipped:
            for filler in maker.tail(piece):
                yield filler
    yield bytes(2 * tarfile.BLOCKSIZE)


class Maker:
    """Makes a tree below one local directory; blocking, for threads.

    Each directory is opened from the one above it without following symlinks, and every file is made new: nothing that
    is there already, and nothing that this tree has made, can lead a name elsewhere.
    """

    def __init__(self, root: Path, report: Transfer) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._root = os.open(root, _DIR_FLAGS)
        self._parent, self._parent_fd = "", os.dup(self._root)
        self._file = -1
        self._entry: Entry | None = None
        self._folders: list[Entry] = []

    def make(self, pieces: list[TreePiece]) -> None:
        """Raises: as :func:`local_problem`."""
        with self._lock, local_problem("destination"):
            for piece in pieces:
                if piece.entry is not None:
                    self._make(piece.entry)
                elif piece.tag is TreeTag.CONTENT:
                    self._write(piece.content)
                else:
                    self._end_file(piece.status)

    def _make(self, entry: Entry) -> None:
        if entry.name == ".":
            if entry.type is not FileType.DIRECTORY:
                raise ArchiveRefused("this is one file, not a directory", hint="read it", entry=".")
            return
        parent, _, name = entry.name.rpartition("/")
        self._enter(parent)
        if entry.type is FileType.DIRECTORY:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._parent_fd)
            os.close(os.open(name, _DIR_FLAGS, dir_fd=self._parent_fd))
            self._folders.append(entry)
        elif entry.type is FileType.SYMLINK:
            os.symlink(entry.target, name, dir_fd=self._parent_fd)
        else:
            self._file = os.open(name, _NEW_FLAGS, 0o600, dir_fd=self._parent_fd)
            self._entry = entry

    def _enter(self, parent: str) -> None:
        """Make ``_parent_fd`` the directory ``parent``, opened part by part from the root."""
        if parent == self._parent:
            return
        fd = os.dup(self._root)
        try:
            for part in filter(None, parent.split("/")):
                below = os.open(part, _DIR_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        os.close(self._parent_fd)
        self._parent, self._parent_fd = parent, fd

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def _end_file(self, status: int) -> None:
        entry, fd = self._entry, self._file
        self._entry, self._file = None, -1
        if entry is None:
            return
        try:
            os.fchmod(fd, entry.mode & MODE_BITS)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)
        if status:
            self._report.skip(entry.name, "became shorter" if status == 1 else "could not be read")
        if status == 2:
            os.unlink(entry.name.rpartition("/")[2], dir_fd=self._parent_fd)

    def finish(self) -> None:
        """Modes and times of directories, deepest first."""
        with self._lock, local_problem("destination"):
            for entry in reversed(self._folders):
                self._enter(entry.name)
                os.fchmod(self._parent_fd, entry.mode & MODE_BITS)
                os.utime(self._parent_fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            for fd in (self._file, self._parent_fd, self._root):
                if fd >= 0:
                    os.close(fd)
            self._file = self._parent_fd = self._root = -1


async def download_directory(
    pieces: AsyncIterator[TreePiece], target: Path, *, bounds: ArchiveBounds | None = None
) -> Transfer:
    """Make a tree below ``target``, an existing directory; what is there already is never replaced or followed.

    Files belong to this process; set-user-id bits, special files and symlinks out of the tree are left out.

    Raises:
        Conflict: something is in the way. TooLarge. StorageFull, Denied, BadRequest: the destination.
    """
    report = Transfer()
    chosen = Filter(bounds or ArchiveBounds(), report)
    with local_problem("destination"):
        maker = await asyncio.to_thread(Maker, target, report)
    held: list[TreePiece] = []
    size = 0
    try:
        async for piece in pieces:
            if not chosen.passes(piece):
                continue
            held.append(piece)
            size += len(piece.content)
            if size >= 4 * PIECE or len(held) >= BATCH_OPS:
                await asyncio.to_thread(maker.make, held)
                held, size = [], 0
        await asyncio.to_thread(maker.make, held)
        await asyncio.to_thread(maker.finish)
    finally:
        asyncio.get_running_loop().run_in_executor(None, maker.close)
    return report
