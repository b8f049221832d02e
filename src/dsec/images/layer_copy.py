"""Layers made of what overlays wrote: a copy of one upper directory, or the union of several, that can lie over the same layers.

What is merged of the result and the layers below it is what was merged before, to the last attribute: whiteouts (devices 0:0)
and directories that hide what is below them (``trusted.overlay.opaque``) are kept where there may be something to hide. FIFOs and
sockets are kept too, since each hides what has its name below. Hard links of one layer stay hard links. Not kept: access times, attributes in
``security.*`` (see :mod:`dsec.images.attributes`), dates before 1970 and after 2242.

What is read was written by somebody hostile, but does not change meanwhile: a read-only snapshot, or images.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from dsec.errors import TooLarge
from dsec.images import attributes
from dsec.images.attributes import is_whiteout
from dsec.images.entries import NEVER, Dates, copy_entry, dress, make_whiteout, open_folder
from dsec.images.limits import DEPTH, LATEST, PATH_BYTES
from dsec.images.tools import Check, unstoppable
from dsec.images.unpack import MAX_BYTES, MAX_ENTRIES

Layers = Sequence[tuple[int, int]]
"""Of each layer a descriptor of its root, and one of the same directory in it."""


def copy_layer(
    source: Path,
    tree: Path,
    *,
    latest: int | None = None,
    since: int | None = None,
    max_bytes: int = MAX_BYTES,
    max_entries: int = MAX_ENTRIES,
    check: Check = unstoppable,
) -> None:
    """Fill the empty directory ``tree`` with what an overlay wrote to ``source``, its upper directory. Blocking; needs root.

    Args:
        source: changed by nobody meanwhile.
        latest: ns since the epoch; what is dated later gets this date. None: dates are kept.
        since: ns since the epoch; what is dated then or later gets the date ``latest`` too, should that lie in the future.
        max_bytes: of all files, holes counted: an image has none.
        check: called for each entry, and every few megabytes; what it raises ends the work.

    Raises:
        TooLarge: more bytes, entries, attributes or directories in one another than are allowed.
        Unsupported: something that cannot be kept: a device, an owner that no sandbox has, markers of another kind of overlay;
            or the file system of ``tree`` cannot keep whiteouts.
        OSError.
    """
    dates = Dates(LATEST if latest is None else latest, NEVER if since is None else since)
    _copy((source,), tree, _Union(dates, max_bytes, max_entries, check))


def merge_layers(
    layers: Sequence[Path],
    tree: Path,
    *,
    below: Sequence[Path],
    max_bytes: int = MAX_BYTES,
    max_entries: int = MAX_ENTRIES,
    check: Check = unstoppable,
) -> None:
    """Fill the empty directory ``tree`` with one layer that does what several do over one another. Blocking; needs root.

    Args:
        layers: lowest first, at least one; as :func:`copy_layer` makes them, or images without whiteouts.
        below: all that lies below them, lowest first. A whiteout is kept only where it hides something there: one in a
            directory that is in no other layer would be listed as a name that nothing has.

    Raises: as :func:`copy_layer`.
    """
    _copy(_downward(layers), tree, _Union(Dates(), max_bytes, max_entries, check), _downward(below))


def _downward(layers: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(reversed(layers))


def _copy(sources: Sequence[Path], tree: Path, union: _Union, below: Sequence[Path] | None = None) -> None:
    """Topmost first."""
    with ExitStack() as stack:
        opened = [_opened(stack, path) for path in sources]
        under = None if below is None else [_opened(stack, path) for path in below]
        union.fill(opened, _opened(stack, tree), under)


def _opened(stack: ExitStack, path: Path) -> int:
    # Not O_NOFOLLOW: the caller's own path, which may be one of /proc/self/fd.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory that is written. ``way``: the names that lead to it.

    ``sources``: roots of the layers that it is the union of, topmost first. ``below``: roots of the lower layers that have a directory
    in its place which none of the sources hides, topmost first; None = not known. ``opaque``: it hides what lies below.
    """

    way: tuple[str, ...]
    sources: Sequence[int]
    below: Sequence[int] | None
    opaque: bool = False


class _Open:
    """A place with its directories open. Only one is at a time, however deep they lie in one another."""

    def __init__(self, stack: ExitStack, place: _Place, root: int) -> None:
        self.way = place.way
        self.sources = [(each, _enter(stack, each, place.way)) for each in place.sources]
        below = place.below
        self.below = None if below is None else [(each, _enter(stack, each, place.way)) for each in below]
        self.target = _enter(stack, root, place.way)

    def hides(self, name: str) -> bool:
        """Whether something below may have that name."""
        return self.below is None or _shows(name, self.below)


class _Union:
    """Writes what several directories are together."""

    def __init__(self, dates: Dates, max_bytes: int, max_entries: int, check: Check) -> None:
        self._dates = dates
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._check = check
        self._bytes = self._entries = 0
        self._links: dict[tuple[int, int], str] = {}  # files with several names: the first that was made
        self._root = -1

    def fill(self, sources: Sequence[int], root: int, below: Sequence[int] | None) -> None:
        """Topmost first.  Raises: as :func:`copy_layer`."""
        self._root = root
        self._directory(_Place((), sources, below))

    def _directory(self, place: _Place) -> None:
        """All that is in it, then what it looks like: as in the topmost layer."""
        with ExitStack() as stack:
            opened = _Open(stack, place, self._root)
            inner = [
                folder
                for name, holders in self._names(opened.sources)
                if (folder := self._entry(opened, name, holders)) is not None
            ]
        for folder in inner:
            self._directory(folder)
        with ExitStack() as stack:
            top = _enter(stack, place.sources[0], place.way)
            found = replace(attributes.read(top), opaque=place.opaque)
            dress(_enter(stack, self._root, place.way), os.fstat(top), found, self._dates)

    def _names(self, sources: Layers) -> list[tuple[str, Layers]]:
        """Every name with the layers that have it, in byte order."""
        names: dict[str, list[tuple[int, int]]] = {}
        for source in sources:
            with os.scandir(source[1]) as found:
                for entry in found:
                    self._entries += 1
                    if self._entries > self._max_entries:
                        raise TooLarge(
                            f"a layer of more than {self._max_entries:,} entries",
                            hint="remove what is not needed",
                            limit=self._max_entries,
                        )
                    names.setdefault(entry.name, []).append(source)
        return sorted(names.items(), key=lambda item: os.fsencode(item[0]))

    def _entry(self, opened: _Open, name: str, holders: Layers) -> _Place | None:
        """Make it; a directory is yet to be filled."""
        self._check()
        top = holders[0][1]
        info = os.stat(name, dir_fd=top, follow_symlinks=False)
        if is_whiteout(info):
            if opened.hides(name):
                make_whiteout(name, opened.target)
            return None
        way = (*opened.way, name)
        _check_place(way)
        if not stat.S_ISDIR(info.st_mode):
            self._file(name, top, info, opened.target, way)
            return None
        os.mkdir(name, 0o700, dir_fd=opened.target)
        parts, hides = _parts(name, holders)
        if hides:
            return _Place(way, parts, (), opened.hides(name))
        return _Place(way, parts, None if opened.below is None else _parts(name, opened.below)[0])

    def _file(self, name: str, source: int, info: os.stat_result, target: int, way: tuple[str, ...]) -> None:
        identity = (info.st_dev, info.st_ino)
        first = self._links.get(identity) if info.st_nlink > 1 else None
        if first is not None and self._linked(first, name, target):
            return
        self._bytes += info.st_size
        if self._bytes > self._max_bytes:
            raise TooLarge(
                f"a layer of more than {self._max_bytes:,} bytes (holes in files count)",
                hint="remove what is not needed",
                limit=self._max_bytes,
            )
        copy_entry(name, source, target, self._dates, self._check)
        if info.st_nlink > 1:
            self._links[identity] = "/".join(way)

    def _linked(self, first: str, name: str, target: int) -> bool:
        """Whether it could be one more name of a file: file systems differ in how many one may have."""
        try:
            os.link(first, name, src_dir_fd=self._root, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            return False
        return True


def _enter(stack: ExitStack, root: int, way: Sequence[str]) -> int:
    """A descriptor of the directory there, open as long as ``stack`` is. No link on the way is followed.  Raises: OSError."""
    descriptor = os.dup(root)
    for name in way:
        above = descriptor
        try:
            descriptor = open_folder(name, above)
        finally:
            os.close(above)
    stack.callback(os.close, descriptor)
    return descriptor


def _parts(name: str, layers: Layers) -> tuple[list[int], bool]:
    """Which layers (topmost first) are merged at that name, and whether they hide what lies below all of them."""
    parts: list[int] = []
    for root, folder in layers:
        info = _look(name, folder)
        if info is None:
            continue
        if not stat.S_ISDIR(info.st_mode):  # a whiteout, or a file that the directory took the place of
            return parts, True
        parts.append(root)
        if _is_opaque(name, folder):
            return parts, True
    return parts, False


def _is_opaque(name: str, folder: int) -> bool:
    descriptor = open_folder(name, folder)
    try:
        return attributes.read(descriptor).opaque
    finally:
        os.close(descriptor)


def _shows(name: str, layers: Layers) -> bool:
    """Whether directories that are merged, topmost first, have something of that name."""
    for _, folder in layers:
        info = _look(name, folder)
        if info is not None:
            return not is_whiteout(info)
    return False


def _look(name: str, folder: int) -> os.stat_result | None:
    """None: it has no such entry."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _check_place(way: Sequence[str]) -> None:
    """Raises: TooLarge: no program that names it by its path could reach it."""
    if len(way) > DEPTH or sum(len(os.fsencode(part)) + 1 for part in way) > PATH_BYTES:
        raise TooLarge(
            f"an entry lies {len(way)} directories deep, or its path is too long",
            hint=f"{DEPTH} directories and {PATH_BYTES} bytes at most",
            depth=len(way),
        )
