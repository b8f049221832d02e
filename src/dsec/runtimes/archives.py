"""Trees and tar archives up into a sandbox and down from it.

Both ends are hostile: an archive may name anything, and so may a sandbox. Every name is checked before it is used; on
the way up init resolves it beneath the root without following symlinks, on the way down each directory is opened from
its parent without following symlinks and each file is made new. File I/O runs in threads, in pieces.
"""

from __future__ import annotations

import asyncio
import errno
import lzma
import os
import posixpath
import stat
import tarfile
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, ClassVar, Final

from dsec.errors import BadRequest, Conflict, Denied, DsecError, ProtocolError, StorageFull, TooLarge
from dsec.model.files import (
    Batch,
    BatchKind,
    BatchOp,
    Entry,
    FileType,
    Identity,
    SetAttr,
    TreePiece,
    TreeTag,
    WriteOptions,
)
from dsec.ports.guest import GuestFiles

_PIECE: Final = 256 * 1024
_SMALL: Final = 64 * 1024
_BATCH_BYTES: Final = 256 * 1024 - 8192
_BATCH_OPS: Final = 512
_PER_OP: Final = 21
_MODE: Final = 0o777
KEEP_TIME: Final = -(2**63)
_KNOWN_PARENTS: Final = 100_000
_MAX_NAME: Final = 255
_MAX_PATH: Final = 4095
_MAX_HEADER: Final = 2**20
_HEADER_TYPES: Final = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE),
    tarfile.SOLARIS_XHDTYPE,
)
_UNREADABLE: Final = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)
_LOCAL: Final[dict[int, type[DsecError]]] = {
    errno.EEXIST: Conflict,
    errno.ELOOP: Conflict,
    errno.ENOTDIR: Conflict,
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
    errno.EACCES: Denied,
    errno.EPERM: Denied,
}
_DIR_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ArchiveRefused(BadRequest):
    """An entry of an archive or tree may not be taken; ``facts["entry"]`` names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveBounds:
    """What one transfer may be.  ``max_bytes``: of all file contents together."""

    max_bytes: int = 16 * 2**30
    max_entries: int = 1_000_000


@dataclass(slots=True)
class Transfer:
    """What was moved, and which entries were left out, with why (at most 1,000 are named)."""

    entries: int = 0
    bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    skipped_count: int = 0

    def skip(self, name: str, why: str) -> None:
        """Leave an entry out."""
        self.skipped_count += 1
        if len(self.skipped) < 1000:
            self.skipped.append((name, why))

    def count(self, name: str, size: int, bounds: ArchiveBounds) -> None:
        """Raises: TooLarge: with this entry a bound is passed."""
        self.entries += 1
        self.bytes += size
        if self.entries > bounds.max_entries:
            raise TooLarge(f"more than {bounds.max_entries} entries, at {name!r}", entry=name)
        if self.bytes > bounds.max_bytes:
            raise TooLarge(f"more than {bounds.max_bytes} bytes, at {name!r}", entry=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One entry on the way up. ``file`` is read for a regular file, then closed by whoever took the item."""

    op: BatchOp
    name: str
    size: int = 0
    file: IO[bytes] | None = None


# --- names -------------------------------------------------------------------------------------------------------


def safe_name(name: str) -> str:
    """The name without leading ``./`` and trailing ``/``; "" for the root itself.

    Raises:
        ArchiveRefused: absolute, ``..`` in it, a NUL, or too long.
    """
    if name.startswith("/"):
        raise ArchiveRefused(f"entry {name[:200]!r} is absolute", entry=name)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ArchiveRefused(f"entry {name[:200]!r} has '..' in it", entry=name)
    clean = "/".join(parts)
    try:
        raw = os.fsencode(clean)
    except UnicodeEncodeError:
        raise ArchiveRefused(f"entry {name[:200]!r} cannot be encoded", entry=name) from None
    if "\0" in clean or len(raw) > _MAX_PATH or any(len(os.fsencode(part)) > _MAX_NAME for part in parts):
        raise ArchiveRefused(f"entry {name[:200]!r} has a NUL or is too long", entry=name)
    return clean


def check_link(name: str, target: str) -> None:
    """A symlink may only point to inside the tree that it comes with.

    Raises:
        ArchiveRefused: the target is absolute or climbs out.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    # '..' after a name could climb out through another symlink; at the front it climbs real directories only.
    if (
        not target
        or "\0" in target
        or target.startswith("/")
        or climbs > name.count("/")
        or ".." in parts[climbs:]
    ):
        raise ArchiveRefused(f"symlink {name[:200]!r} points out of the tree: {target[:200]!r}", entry=name)
    if len(os.fsencode(target)) > _MAX_PATH:
        raise ArchiveRefused(f"symlink {name[:200]!r} has a target that is too long", entry=name)


def _op(kind: BatchKind, name: str, mode: int, mtime_ns: int, data: bytes = b"") -> BatchOp:
    return BatchOp(kind, os.fsencode(name), mode & _MODE, mtime_ns, data)


# --- sources -----------------------------------------------------------------------------------------------------


def _clamp(mtime: float) -> int:
    """Nanoseconds within what a kernel stores."""
    return max(0, min(int(mtime * 1_000_000_000), 2**62)) if mtime == mtime else 0


def _tar_item(tar: tarfile.TarFile, member: tarfile.TarInfo) -> _Item:
    """Raises: ArchiveRefused: a name that leads out, a device, or a kind that is not known."""
    name = safe_name(member.name)
    mtime = _clamp(float(member.mtime))
    if member.isdir():
        return _Item(op=_op(BatchKind.DIRECTORY, name, member.mode, mtime), name=name)
    if not name:
        raise ArchiveRefused("the root of the archive is not a directory", entry=member.name)
    if member.issym():
        check_link(name, member.linkname)
        target = os.fsencode(member.linkname)
        return _Item(op=_op(BatchKind.SYMLINK, name, _MODE, mtime, target), name=name)
    if member.islnk():
        target = os.fsencode(safe_name(member.linkname))
        return _Item(op=_op(BatchKind.HARD_LINK, name, member.mode, mtime, target), name=name)
    if not member.isreg():
        raise ArchiveRefused(f"entry {name!r} is a device, FIFO or other special file", entry=name)
    op = _op(BatchKind.FILE, name, member.mode, mtime)
    return _Item(op=op, name=name, size=member.size, file=tar.extractfile(member))


class _Member(tarfile.TarInfo):
    """A member whose headers cannot be made to fill the memory. (The two hooks are those that ``tarfile`` itself
    calls for each kind of header; a test notices when a Python no longer calls them.)"""

    def _proc_member(self, tar: _Tar) -> tarfile.TarInfo:
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise ArchiveRefused(f"entry {self.name[:200]!r} is sparse", entry=self.name)
        if self.type in _HEADER_TYPES:
            tar.global_bytes += self.size if self.type == tarfile.XGLTYPE else 0
            if not 0 <= self.size <= _MAX_HEADER or tar.global_bytes > _MAX_HEADER:
                raise ArchiveRefused(f"a header of {self.size} bytes in the archive", entry=self.name)
        return super()._proc_member(tar)  # type: ignore[misc, no-any-return]

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise ArchiveRefused(f"entry {self.name[:200]!r} is sparse", entry=self.name)


class _Tar(tarfile.TarFile):
    """A tar archive of checked members."""

    tarinfo = _Member
    global_bytes = 0


def _tar_items(stream: IO[bytes]) -> Iterator[_Item]:
    """Raises: ArchiveRefused: also for what is not a tar archive."""
    try:
        with _Tar.open(fileobj=stream, mode="r|*", errorlevel=2, errors="surrogateescape") as tar:
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
    except (*_UNREADABLE, ArithmeticError, ValueError, OSError, RecursionError) as wrong:
        raise ArchiveRefused(f"the archive cannot be read: {wrong}") from wrong


def _parents(name: str, known: set[str]) -> Iterator[_Item]:
    """Directories that an archive does not name, made where there are none; those that exist stay as they are."""
    parts = name.split("/")[:-1]
    for depth in range(1, len(parts) + 1):
        path = "/".join(parts[:depth])
        if path not in known:
            if len(known) < _KNOWN_PARENTS:
                known.add(path)
            op = BatchOp(BatchKind.DIRECTORY, os.fsencode(path), 0o755, KEEP_TIME)
            yield _Item(op=op, name=path)


def _local_items(root: Path, report: Transfer) -> Iterator[_Item]:
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


def _local_item(fd: int, name: str, path: str, report: Transfer) -> _Item | None:
    info = os.lstat(name, dir_fd=fd)
    if stat.S_ISDIR(info.st_mode):
        return _Item(op=_op(BatchKind.DIRECTORY, path, info.st_mode, info.st_mtime_ns), name=path)
    if stat.S_ISLNK(info.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=fd))
        return _Item(op=_op(BatchKind.SYMLINK, path, _MODE, info.st_mtime_ns, target), name=path)
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
    return _Item(op=op, name=path, size=opened.st_size, file=file)


# --- up ----------------------------------------------------------------------------------------------------------


class _Groups:
    """Cuts a source into batches and large files; every method blocks and runs in a thread."""

    def __init__(self, items: Iterator[_Item], bounds: ArchiveBounds, report: Transfer) -> None:
        self._items = items
        self._bounds = bounds
        self._report = report
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self.folders: list[BatchOp] = []

    def next(self) -> tuple[tuple[BatchOp, ...], _Item | None, bool]:
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
                if used > _BATCH_BYTES - 2 * _SMALL or len(ops) >= _BATCH_OPS:
                    return tuple(ops), None, False
            return tuple(ops), None, True

    def _whole(self, item: _Item) -> BatchOp | None:
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
            data = self._file.read(_PIECE) if self._file is not None else b""
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
    await _upload(files, _local_items(source, report), root, who, bounds or ArchiveBounds(), report)
    return report


async def _upload(
    files: GuestFiles,
    items: Iterator[_Item],
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


async def _upload_large(files: GuestFiles, groups: _Groups, item: _Item, root: str, who: Identity) -> None:
    async def content() -> AsyncIterator[bytes]:
        left = item.size  # a file that grows meanwhile is cut at the size that was counted
        while left > 0 and (data := await asyncio.to_thread(groups.piece)):
            yield data[:left]
            left -= len(data)

    options = WriteOptions(mode=item.op.mode, parents=True, atomic=True, root=root)
    await files.write(item.name, content(), who=who, options=options)
    path = posixpath.join(root, item.name)
    await files.apply(SetAttr(path=path, mtime_ns=item.op.mtime_ns, follow=False), who=who)


# --- down --------------------------------------------------------------------------------------------------------


class _Filter:
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
            yield bytes(min(self._left, _PIECE))
            self._left -= min(self._left, _PIECE)
        yield bytes(self._padding)

    def _header(self, entry: Entry) -> bytes:
        info = tarfile.TarInfo(entry.name)
        info.type = self._KINDS[entry.type]
        info.size = entry.size if entry.type is FileType.FILE else 0
        info.mode, info.uid, info.gid = entry.mode & _MODE, entry.uid, entry.gid
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
    chosen = _Filter(bounds or ArchiveBounds(), report)
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


class _Maker:
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
            os.fchmod(fd, entry.mode & _MODE)
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
                os.fchmod(self._parent_fd, entry.mode & _MODE)
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
    chosen = _Filter(bounds or ArchiveBounds(), report)
    with local_problem("destination"):
        maker = await asyncio.to_thread(_Maker, target, report)
    held: list[TreePiece] = []
    size = 0
    try:
        async for piece in pieces:
            if not chosen.passes(piece):
                continue
            held.append(piece)
            size += len(piece.content)
            if size >= 4 * _PIECE or len(held) >= _BATCH_OPS:
                await asyncio.to_thread(maker.make, held)
                held, size = [], 0
        await asyncio.to_thread(maker.make, held)
        await asyncio.to_thread(maker.finish)
    finally:
        asyncio.get_running_loop().run_in_executor(None, maker.close)
    return report


@contextmanager
def local_problem(what: str) -> Iterator[None]:
    """Failures of the local file system as ours.

    Raises:
        Conflict: something exists or a symlink is in the way. StorageFull. Denied. BadRequest: anything else.
    """
    try:
        yield
    except DsecError:
        raise
    except _UNREADABLE as wrong:
        raise ArchiveRefused(f"the archive cannot be read: {wrong}") from wrong
    except OSError as wrong:
        kind = _LOCAL.get(wrong.errno or 0, BadRequest)
        named = os.fsdecode(wrong.filename) if isinstance(wrong.filename, str | bytes) else ""
        raise kind(f"{what}: {named}: {wrong.strerror}", errno=wrong.errno) from wrong
