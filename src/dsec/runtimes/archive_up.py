"""Tar archives and local directories up into a sandbox, in batches of small entries and one by one where they are large.

Init resolves every name beneath the root without following symlinks. File I/O runs in threads, in pieces.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import stat
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from dsec.errors import DsecError
from dsec.model.files import Batch, BatchKind, BatchOp, Identity, SetAttr, WriteOptions
from dsec.ports.guest import GuestFiles
from dsec.runtimes.archives import (
    BATCH_OPS,
    MODE_BITS,
    PIECE,
    UNREADABLE,
    ArchiveBounds,
    ArchiveRefused,
    Transfer,
    check_link,
    local_problem,
    safe_name,
)

_SMALL: Final = 64 * 1024
_BATCH_BYTES: Final = 256 * 1024 - 8192
_PER_OP: Final = 21
KEEP_TIME: Final = -(2**63)
_KNOWN_PARENTS: Final = 100_000
_MAX_HEADER: Final = 2**20
_HEADER_TYPES: Final = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE),
    tarfile.SOLARIS_XHDTYPE,
)
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One entry on the way up. ``file`` is read for a regular file, then closed by whoever took the item."""

    op: BatchOp
    name: str
    size: int = 0
    file: IO[bytes] | None = None


def _op(kind: BatchKind, name: str, mode: int, mtime_ns: int, data: bytes = b"") -> BatchOp:
    return BatchOp(kind, os.fsencode(name), mode & MODE_BITS, mtime_ns, data)


# --- sources -----------------------------------------------------------------------------------------------------


def _clamp(mtime: float) -> int:
    """Nanoseconds within what a kernel stores."""
    return max(0, min(int(mtime * 1_000_000_000), 2**62)) if mtime == mtime else 0


def _tar_item(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Item:
    """Raises: ArchiveRefused: a name that leads out, a device, or a kind that is not known."""
    name = safe_name(member.name)
    mtime = _clamp(float(member.mtime))
    if member.isdir():
        return Item(op=_op(BatchKind.DIRECTORY, name, member.mode, mtime), name=name)
    if not name:
        raise ArchiveRefused("the root of the archive is not a directory", entry=member.name)
    if member.issym():
        check_link(name, member.linkname)
        target = os.fsencode(member.linkname)
        return Item(op=_op(BatchKind.SYMLINK, name, MODE_BITS, mtime, target), name=name)
    if member.islnk():
        target = os.fsencode(safe_name(member.linkname))
        return Item(op=_op(BatchKind.HARD_LINK, name, member.mode, mtime, target), name=name)
    if not member.isreg():
        raise ArchiveRefused(f"entry {name!r} is a device, FIFO or other special file", entry=name)
    op = _op(BatchKind.FILE, name, member.mode, mtime)
    return Item(op=op, name=name, size=member.size, file=tar.extractfile(member))


class _Member(tarfile.TarInfo):
    """A member whose headers cannot be made to fill the memory. (The two hooks are those that ``tarfile`` itself
    calls for each kind of header; a test notices when a Python no longer calls them.)"""

    def _proc_member(self, tar: CheckedTar) -> tarfile.TarInfo:
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise ArchiveRefused(f"entry {self.name[:200]!r} is sparse", entry=self.name)
        if self.type in _HEADER_TYPES:
            tar.global_bytes += self.size if self.type == tarfile.XGLTYPE else 0
            if not 0 <= self.size <= _MAX_HEADER or tar.global_bytes > _MAX_HEADER:
                raise ArchiveRefused(f"a header of {self.size} bytes in the archive", entry=self.name)
        return super()._proc_member(tar)  # type: ignore[misc, no-any-return]

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise ArchiveRefused(f"entry {self.name[:200]!r} is sparse", entry=self.name)


class CheckedTar(tarfile.TarFile):
    """A tar archive of checked members."""

    tarinfo = _Member
    global_bytes = 0


def _tar_items(stream: IO[bytes]) -> Iterator[Item]:
    """Raises: ArchiveRefused: also for what is not a tar archive."""
    try:
        with CheckedTar.open(fileobj=stream, mode="r|*", errorlevel=2, errors="surrogateescape") as tar:
            known: set[str] = set()
            for member in tar:
                item = _tar_item(tar, member)
                yield from _parents(item.name, known)
                if item.op.kind is BatchKind.DIRECTORY and len(known) < _KNOWN_PARENTS:
                    known.add(item.name)
                yield item
                tar.members = []  # type: ignore[attr-defined]  # a long archive must not be remembered
    except DsecError:
        raise
    except (*UNREADABLE, ArithmeticError, ValueError, OSError, RecursionError) as wrong:
        raise ArchiveRefused(f"the archive cannot be read: {wrong}") from wrong


def _parents(name: str, known: set[str]) -> Iterator[Item]:
    """Directories that an archive does not name, made where there are none; those that exist stay as they are."""
    parts = name.split("/")[:-1]
    for depth in range(1, len(parts) + 1):
        path = "/".join(parts[:depth])
        if path not in known:
            if len(known) < _KNOWN_PARENTS:
                known.add(path)
            op = BatchOp(BatchKind.DIRECTORY, os.fsencode(path), 0o755, KEEP_TIME)
            yield Item(op=op, name=path)


def local_items(root: Path, report: Transfer) -> Iterator[Item]:
    """What is below ``root``, parents first, never through a symlink; special files are reported and left out."""
    top = str(root)
    for folder, folders, files, fd in os.fwalk(top, onerror=_raise, follow_symlinks=False):
        below = folder[len(top) :].strip("/")
        folders.sort()
        for name in folders + sorted(files):
            item = _local_item(fd, name, f"{below}/{name}" if below else name, report)
            if item is not None:
                yield item


def _raise(wrong: OSError) -> None:
    raise wrong


def _local_item(fd: int, name: str, path: str, report: Transfer) -> Item | None:
    info = os.lstat(name, dir_fd=fd)
    if stat.S_ISDIR(info.st_mode):
        return Item(op=_op(BatchKind.DIRECTORY, path, info.st_mode, info.st_mtime_ns), name=path)
    if stat.S_ISLNK(info.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=fd))
        return Item(op=_op(BatchKind.SYMLINK, path, MODE_BITS, info.st_mtime_ns, target), name=path)
    if not stat.S_ISREG(info.st_mode):
        report.skip(path, "special file")
        return None
    file = os.fdopen(os.open(name, _FILE_FLAGS, dir_fd=fd), "rb", buffering=0)
    opened = os.fstat(file.fileno())
    if not stat.S_ISREG(opened.st_mode):
        file.close()
        report.skip(path, "special file")
        return None
    op = _op(BatchKind.FILE, path, opened.st_mode, opened.st_mtime_ns)
    return Item(op=op, name=path, size=opened.st_size, file=file)


# --- up ----------------------------------------------------------------------------------------------------------


class _Groups:
    """Cuts a source into batches and large files; every method blocks and runs in a thread."""

    def __init__(self, items: Iterator[Item], bounds: ArchiveBounds, report: Transfer) -> None:
        self._items = items
        self._bounds = bounds
        self._report = report
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self.folders: list[BatchOp] = []

    def next(self) -> tuple[tuple[BatchOp, ...], Item | None, bool]:
        """Steps for one batch, then perhaps a large file, and whether that was all.

        Raises:
            ArchiveRefused, TooLarge: an entry may not be taken. Local failures as :func:`local_problem` says.
        """
        with self._lock, local_problem("source"):
            ops: list[BatchOp] = []
            used = 0
            for item in self._items:
                self._report.count(item.name, item.size, self._bounds)
                if item.size > _SMALL:
                    self._file = item.file
                    return tuple(ops), item, False
                op = self._whole(item)
                if op is not None:
                    ops.append(op)
                    used += _PER_OP + len(op.path) + len(op.data)
                if used > _BATCH_BYTES - 2 * _SMALL or len(ops) >= BATCH_OPS:
                    return tuple(ops), None, False
            return tuple(ops), None, True

    def _whole(self, item: Item) -> BatchOp | None:
        """The step with its content; None for the root, whose mode is not the archive's to say."""
        op = item.op
        if op.kind is BatchKind.DIRECTORY:
            if not item.name:
                return None
            if op.mtime_ns == KEEP_TIME:
                return op
            self.folders.append(op)
            return replace(op, mode=op.mode | stat.S_IRWXU)  # so that its content can be made
        if item.file is None:
            return op
        with item.file as file:
            return replace(op, data=file.read(item.size) if item.size else b"")

    def piece(self) -> bytes:
        """More of the large file; b"" at its end."""
        with self._lock, local_problem("source"):
            data = self._file.read(PIECE) if self._file is not None else b""
            if not data and self._file is not None:
                self._file.close()
                self._file = None
            return data

    def close(self) -> None:
        """Let go of everything that is open."""
        with self._lock, suppress(Exception):
            if self._file is not None:
                self._file.close()
            self._items.close()  # type: ignore[attr-defined]


async def upload_tar(
    files: GuestFiles, stream: IO[bytes], root: str, *, who: Identity, bounds: ArchiveBounds | None = None
) -> Transfer:
    """Unpack a tar archive (plain, gzip, bzip2 or xz; ``stream`` is read once, in a thread) into ``root``, which exists.

    Raises:
        ArchiveRefused: an entry is absolute, has ``..``, links out, is a device or sparse. Entries before it were made.
        TooLarge: a bound. FileProblem and the like: as init says.
    """
    report = Transfer()
    await _upload(files, _tar_items(stream), root, who, bounds or ArchiveBounds(), report)
    return report


async def upload_directory(
    files: GuestFiles, source: Path, root: str, *, who: Identity, bounds: ArchiveBounds | None = None
) -> Transfer:
    """Copy what is below a local directory into ``root``, which exists. Special files are left out and reported.

    Raises:
        BadRequest, Denied: the source cannot be read. TooLarge. FileProblem and the like: as init says.
    """
    report = Transfer()
    await _upload(files, local_items(source, report), root, who, bounds or ArchiveBounds(), report)
    return report


async def _upload(
    files: GuestFiles,
    items: Iterator[Item],
    root: str,
    who: Identity,
    bounds: ArchiveBounds,
    report: Transfer,
) -> None:
    groups = _Groups(items, bounds, report)
    try:
        done = False
        while not done:
            ops, large, done = await asyncio.to_thread(groups.next)
            if ops:
                await files.apply(Batch(root, ops), who=who)
            if large is not None:
                await _upload_large(files, groups, large, root, who)
        for op in reversed(groups.folders):
            path = posixpath.join(root, os.fsdecode(op.path))
            await files.apply(SetAttr(path=path, mode=op.mode, mtime_ns=op.mtime_ns, follow=False), who=who)
    finally:
        asyncio.get_running_loop().run_in_executor(None, groups.close)


async def _upload_large(files: GuestFiles, groups: _Groups, item: Item, root: str, who: Identity) -> None:
    async def content() -> AsyncIterator[bytes]:
        left = item.size  # a file that grows meanwhile is cut at the size that was counted
        while left > 0 and (data := await asyncio.to_thread(groups.piece)):
            yield data[:left]
            left -= len(data)

    options = WriteOptions(mode=item.op.mode, parents=True, atomic=True, root=root)
    await files.write(item.name, content(), who=who, options=options)
    path = posixpath.join(root, item.name)
    await files.apply(SetAttr(path=path, mtime_ns=item.op.mtime_ns, follow=False), who=who)
