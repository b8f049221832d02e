"""From a lock to a tree: the layer that lies over the image's own files."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from configparser import Error as EntryPointError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, Literal

import installer
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import Hash, InvalidRecordEntry, RecordEntry
from installer.scripts import Script
from installer.sources import WheelContentElement, WheelFile
from installer.utils import Scheme

from dsec.errors import Conflict, StorageFull, StoreDamaged, TooLarge
from dsec.images.dependencies.bounds import Bounds, Index
from dsec.images.dependencies.cache import WheelCache
from dsec.images.dependencies.lock import Lock, Locked
from dsec.images.dependencies.resolve import fetch
from dsec.images.dependencies.target import PythonTarget
from dsec.images.dependencies.wheel import UNREADABLE, broken, opened
from dsec.images.entries import copy_content, reached
from dsec.images.tools import Check, unstoppable

RECIPE: Final = "1"
"""Goes up when this module would make a different tree from the same lock."""
WHEN: Final = 315_532_800
"""Every file's time, seconds since the epoch: the beginning of 1980, the oldest that a zip can name."""
_PIECE: Final = 2**20
_CACHE: Final = "__pycache__"
_FILE: Final = 0o644
_PROGRAM: Final = 0o755
_METADATA: Final = {"INSTALLER": b"dsec\n"}
_BROKEN: Final = (
    *UNREADABLE,
    InstallerError,
    InvalidRecordEntry,
    EntryPointError,
    AssertionError,
    TypeError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What was made. ``clashes``: paths that several packages bring with different content, and the packages; the last one's is there."""

    files: int
    bytes: int
    clashes: tuple[tuple[str, str, str], ...] = ()


def install(
    lock: Lock,
    tree: Path,
    *,
    cache: WheelCache,
    index: Index | None = None,
    bounds: Bounds | None = None,
    check: Check = unstoppable,
) -> Installed:
    """The lock's packages as files of its target below ``tree``; wheels that the cache lacks are fetched. Blocking.

    The same lock gives the same tree on every machine: paths, bytes, modes and times, and root as owner (when run by root;
    somebody else owns what he makes). There is no byte code: see :func:`bytecode_command`.

    Args:
        tree: an empty directory, or one that is not there yet. Empty again after an error.
        check: called again and again; what it raises ends the work.

    Raises:
        Conflict: the tree is not empty. StoreDamaged: a wheel is not the one of the lock.
        Unsupported: a wheel is broken, or would write outside its places. TooLarge: over the bounds.
        As :func:`~dsec.images.dependencies.resolve.fetch`. OSError.
    """
    bounds = bounds or Bounds()
    fetch(lock, cache=cache, index=index, bounds=bounds, check=check)
    tree.mkdir(parents=True, exist_ok=True)
    if any(tree.iterdir()):
        raise Conflict(f"{tree} is not empty", hint="dependencies are installed into a tree of their own")
    destination = _Destination(tree, lock.target, bounds, check)
    try:
        for locked in lock.packages:
            requested = not set(lock.requirements).isdisjoint(locked.required_by)
            _install_one(locked, destination, cache, bounds, requested=requested)
        settle(tree)
    except OSError as exc:
        _clear(tree)
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no space for {len(lock.packages)} packages in {tree}", hint="free some"
            ) from exc
        raise
    except BaseException:
        _clear(tree)
        raise
    return Installed(files=destination.files, bytes=destination.bytes, clashes=tuple(destination.clashes))


def bytecode_command(target: PythonTarget) -> tuple[str, ...]:
    """What makes byte code of a layer, when it is run inside a sandbox of the image with the layer writable; :func:`settle` it then.

    Only the image's own Python makes what that Python takes, so it is no part of :func:`install`. It is always valid, whatever the
    time of its source. No code of the packages runs, not that of ``.pth`` files either. One Python makes the same bytes of the same source each time. What cannot be compiled has none (status 1).
    """
    compile_all = ("-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash")
    return (target.interpreter, "-I", "-S", "-B", *compile_all, target.packages)


def take_bytecode(made: Path, tree: Path, target: PythonTarget, *, check: Check = unstoppable) -> int:
    """Copy byte code of ``target``'s packages from one tree to another, for directories that are there; how many files.

    What lies beside it, and byte code without a source, stays behind. ``made`` is what a stranger's program left: no link in either tree is followed, and of a file
    nothing but its bytes is taken. Neither tree may be changed meanwhile.

    Raises: OSError.
    """
    way = target.packages.strip("/").split("/")
    taken = 0
    with ExitStack() as stack:
        source, goal = (_below(stack, each, way) for each in (made, tree))
        if source is None or goal is None:
            return 0
        for path, _, names, folder in os.fwalk(".", dir_fd=source):
            *parents, last = PurePosixPath(path).parts or (".",)
            if last == _CACHE:
                taken += _take(names, folder, goal, parents, check)
    return taken


def _below(stack: ExitStack, tree: Path, way: list[str]) -> int | None:
    """A descriptor of the directory at that place of a tree, None when there is none."""
    root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = reached(root, way)
    finally:
        os.close(root)
    if found is not None:
        stack.callback(os.close, found)
    return found


def _take(names: Iterable[str], source: int, packages: int, parents: list[str], check: Check) -> int:
    """The byte code of one directory, to where its sources are."""
    place = reached(packages, parents)
    if place is None:
        return 0
    cache = None
    try:
        with suppress(FileExistsError):
            os.mkdir(_CACHE, _PROGRAM, dir_fd=place)
        cache = reached(place, [_CACHE])
        if cache is None:
            return 0
        sources = set(os.listdir(place))
        wanted = (name for name in names if name.endswith(".pyc") and f"{name.split('.')[0]}.py" in sources)
        return sum(copy_content(name, source, cache, check) for name in wanted)
    finally:
        os.close(place)
        if cache is not None:
            os.close(cache)


def settle(tree: Path) -> None:
    """Owner, modes, and one time for every entry below ``tree`` and itself. Symbolic links are not followed.  Raises: OSError."""
    root = os.geteuid() == 0
    for directory, _, files in os.walk(tree, topdown=False):
        for path in (*(Path(directory, name) for name in files), Path(directory)):
            mode = path.lstat().st_mode
            if root:
                os.chown(path, 0, 0, follow_symlinks=False)
            if not stat.S_ISLNK(mode):
                path.chmod(_PROGRAM if stat.S_ISDIR(mode) or mode & 0o111 else _FILE)
            os.utime(path, (WHEN, WHEN), follow_symlinks=False)


def _install_one(
    locked: Locked, destination: _Destination, cache: WheelCache, bounds: Bounds, *, requested: bool
) -> None:
    file = cache.open(locked)
    if file is None:
        raise StoreDamaged(
            f"{locked.file} changed in the cache while it was used", hint="try again", package=locked.name
        )
    with file, opened(file, locked.file, bounds) as archive:
        try:
            source = _Source(archive)
            destination.begin(locked, source)
            source.validate_record(validate_contents=True)
            extra = _METADATA | ({"REQUESTED": b""} if requested else {})
            installer.install(source, destination, extra)
        except OSError:
            raise
        except _BROKEN as exc:
            raise broken(locked.file, f"cannot be installed: {str(exc)[:500] or type(exc).__name__}") from exc


class _Source(WheelFile):
    """A wheel without the byte code that it may bring: what it was made from, nobody can tell."""

    def get_contents(self) -> Iterator[WheelContentElement]:
        for element in super().get_contents():
            path = element[0][0]
            if "__pycache__" not in path.split("/")[:-1]:
                yield element


class _Destination(WheelDestination):
    """Writes the files of wheels, one wheel after another, into their places of one target. Nothing is followed, nothing leaves them."""

    def __init__(self, tree: Path, target: PythonTarget, bounds: Bounds, check: Check) -> None:
        self.files = 0
        self.bytes = 0
        self.clashes: list[tuple[str, str, str]] = []
        self._tree = tree
        self._target = target
        self._bounds = bounds
        self._check = check
        self._owners: dict[str, tuple[str, str]] = {}
        self._wheel = ""
        self._package = ""
        self._places: dict[str, str] = {}

    def begin(self, locked: Locked, source: WheelFile) -> None:
        """The files that follow are of this wheel."""
        self._wheel, self._package = locked.file, locked.name
        target = self._target
        self._places = {
            "purelib": target.packages,
            "platlib": target.packages,
            "scripts": target.scripts,
            "data": target.data,
            "headers": f"{target.headers}/{source.distribution}",
        }

    def write_script(
        self, name: str, module: str, attr: str, section: Literal["console", "gui"]
    ) -> RecordEntry:
        """A program that calls an entry point."""
        _, text = Script(name, module, attr, section).generate(self._target.interpreter, "posix")
        return self._write("scripts", name, [text], _PROGRAM)

    def write_file(
        self, scheme: Scheme, path: str | os.PathLike[str], stream: BinaryIO, is_executable: bool
    ) -> RecordEntry:
        """One file of the wheel; of a script its interpreter is replaced."""
        name = os.fspath(path)
        if scheme == "scripts":
            return self._write(scheme, name, _script(stream, self._target.interpreter), _PROGRAM)
        return self._write(scheme, name, _pieces(stream), _PROGRAM if is_executable else _FILE)

    def finalize_installation(
        self, scheme: Scheme, record_file_path: str, records: Iterable[tuple[Scheme, RecordEntry]]
    ) -> None:
        """RECORD, with every path as seen from where packages lie."""
        root = self._places[scheme]
        rows = sorted(
            ",".join(
                map(
                    _quoted,
                    RecordEntry(self._seen_from(root, each, entry.path), entry.hash_, entry.size).to_row(),
                )
            )
            for each, entry in records
        )
        self._write(scheme, record_file_path, ["".join(f"{row}\n" for row in rows).encode()], _FILE)

    def _seen_from(self, root: str, scheme: str, path: str) -> str:
        return os.path.relpath(f"{self._places[scheme]}/{path}", root)

    def _write(self, scheme: str, name: str, content: Iterable[bytes], mode: int) -> RecordEntry:
        """Raises: Unsupported: it would leave its place, or a file stands where a directory is needed. TooLarge. OSError."""
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or {"..", "."} & set(name.split("/")) or not name.isprintable():
            raise broken(self._wheel, f"would write {name[:200]!r}, which leaves its place")
        inside = f"{self._places[scheme]}/{name}"
        self.files += 1
        if self.files > self._bounds.entries:
            raise TooLarge(
                f"more than {self._bounds.entries} files", hint="raise the bounds, or require less"
            )
        try:
            digest, size = self._store(self._tree / inside[1:], content, mode)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as exc:
            raise broken(self._wheel, f"has a file where another package has a directory: {inside}") from exc
        previous = self._owners.get(inside)
        if previous is not None:
            self.files -= 1
            if previous[1] != digest:
                self.clashes.append((inside, previous[0], self._package))
        self._owners[inside] = self._package, digest
        return RecordEntry(name, Hash("sha256", digest), size)

    def _store(self, path: Path, content: Iterable[bytes], mode: int) -> tuple[str, int]:
        """Digest as RECORD writes it, and size."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self.bytes -= path.stat().st_size
            path.unlink()
        hasher = hashlib.sha256()
        size = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for piece in content:
                self._check()
                size += len(piece)
                self.bytes += len(piece)
                if self.bytes > self._bounds.unpacked_bytes:
                    raise TooLarge(
                        f"more than {self._bounds.unpacked_bytes} bytes of files",
                        hint="raise the bounds, or require less",
                    )
                hasher.update(piece)
                _write_all(file.fileno(), piece)
            os.fchmod(file.fileno(), mode)
        return base64.urlsafe_b64encode(hasher.digest()).decode().rstrip("="), size


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    while piece := stream.read(_PIECE):
        yield piece


def _script(stream: BinaryIO, interpreter: str) -> Iterator[bytes]:
    """A script with ``#!python`` names the image's interpreter instead."""
    head = stream.read(8)
    if head == b"#!python":
        while (rest := stream.readline(4096)) and not rest.endswith(b"\n"):
            pass
        head = f"#!{interpreter}\n".encode()
    yield head
    yield from _pieces(stream)


def _quoted(text: str) -> str:
    """A field of a RECORD, which is CSV."""
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"') else text


def _clear(tree: Path) -> None:
    for path in tree.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
