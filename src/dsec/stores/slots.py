"""Slots: the subvolumes that writable layers are, and what is done to one of them on the disk. Nothing here decides whose one is.

A slot called ``slot-N`` holds the directories ``upper`` and ``work``, and has a quota. All of this blocks, but for what says otherwise.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

from dsec.stores import btrfs

PREFIX: Final = "slot-"

_ENTRIES: Final = 64  # more than this in a layer: destroying it is cheaper than emptying it
_RESIDUE: Final = 256 * 1024  # bytes that a used slot may still be charged with (freed by the next commit)
_WORK_ENTRIES: Final = 100_000  # what an overlay can have under way, at most
_SEASON: Final = 100_000_000  # ns; older kernels tell change times in steps of up to 10 ms
_IN_MEMORY: Final = (
    60.0  # seconds for which what was read of a layer is certainly not read from the disk again
)


@dataclass(eq=False, slots=True)
class Slot:
    """A subvolume. ``limit``: its quota in bytes. ``used``: it has been somebody's.

    ``blank_since``: when its upper directory was made (``ctime`` in ns), 0 unknown; ``seasoned``: it was given out long after that;
    ``given``: when, on the monotonic clock.
    """

    name: str
    subvolume: int
    limit: int
    used: bool = False
    blank_since: int = 0
    seasoned: bool = False
    given: float = 0.0

    def give(self) -> None:
        """It is somebody's from now on."""
        self.used = True
        self.given = time.monotonic()
        self.seasoned = 0 < self.blank_since < time.time_ns() - _SEASON


class Slots:
    """The slots of one pool.

    Args:
        directory: a descriptor of the pool's directory. file_system: its id.
    """

    def __init__(self, directory: int, file_system: str) -> None:
        self._directory = directory
        self._file_system = file_system
        self._names = threading.Lock()
        self.last = 0
        """The highest number that a slot was called by."""

    def make(self, limit: int) -> Slot:
        """A new, empty slot.  Raises: OSError."""
        name = self._new_name()
        btrfs.create_subvolume(self._directory, name)
        try:
            return self._fitted(name, limit)
        except BaseException:
            with suppress(OSError):
                btrfs.destroy_subvolume(self._directory, name)
            raise

    def copy(self, origin: str, limit: int, *, retire: Callable[[int], None]) -> Slot:
        """A slot that begins with what another, or a snapshot, holds.

        Args:
            retire: told the number of one that was destroyed because it could not be finished.

        Raises:
            OSError.
        """
        name = self._new_name()
        source = self._open(origin)
        try:
            btrfs.snapshot(source, self._directory, name)
        finally:
            os.close(source)
        inside = self._open(name)
        try:
            slot = Slot(name, btrfs.subvolume_id(inside), limit, used=True)
            btrfs.limit_qgroup(self._directory, slot.subvolume, limit)
            # What the overlay of the other had under way is not ours, and marks the layer as one in use.
            _remove_tree(inside, "work", _Budget(_WORK_ENTRIES))
            os.mkdir("work", dir_fd=inside)
            os.chmod("work", 0o755, dir_fd=inside)  # noqa: S103 - a root directory, whatever the umask
        except OSError:
            with suppress(
                OSError
            ):  # the first error is told; the next start of this pool empties what is left
                number = btrfs.subvolume_id(inside)
                btrfs.destroy_subvolume(self._directory, name)
                retire(number)
            raise
        finally:
            os.close(inside)
        return slot

    def found(self, name: str) -> Slot:
        """One of an earlier run.  Raises: ValueError, OSError: it is strange."""
        self.last = max(self.last, int(name.removeprefix(PREFIX)))
        inside = self._open(name)
        try:
            return Slot(name, btrfs.subvolume_id(inside), 0, used=True)
        finally:
            os.close(inside)

    def resize(self, slot: Slot, limit: int) -> None:
        """Give it another quota.  Raises: OSError."""
        btrfs.limit_qgroup(self._directory, slot.subvolume, limit)
        slot.limit = limit

    def bytes(self, slot: Slot) -> int:
        """What it is charged with, metadata included. Reads one file of sysfs.  Raises: OSError."""
        return btrfs.qgroup_bytes(self._file_system, slot.subvolume)

    def emptied(self, slot: Slot) -> bool:
        """Make it empty, if that is quick. False: it is not, and must be destroyed.  Raises: OSError."""
        inside = self._open(slot.name)
        try:
            budget = _Budget(_ENTRIES)
            for part in ("upper", "work"):
                _remove_tree(inside, part, budget)
            slot.blank_since = _make_parts(inside)
        except OSError:
            return False
        finally:
            os.close(inside)
        return self._is_light(slot)

    def destroy(self, slot: Slot) -> None:
        """Raises: OSError."""
        btrfs.destroy_subvolume(self._directory, slot.name)

    def start_commit(self) -> None:
        """Let the kernel begin to free what was destroyed; does not wait for it.  Raises: OSError."""
        btrfs.start_commit(self._directory)

    def remove_group(self, subvolume: int) -> None:
        """The qgroup of one that is no more.  Raises: OSError: EBUSY: it is not freed yet."""
        btrfs.remove_qgroup(self._directory, subvolume)

    def untouched(self, slot: Slot) -> bool:
        """Whether nothing was ever written to it: whatever is written below ``upper``, or set on it, changes its change time, which
        nobody inside can set. A file without a name (O_TMPFILE) changes no directory, but leaves what it took. What the
        overlay made in ``work`` is taken away by the next one's mount.

        A few looks at what the kernel has in memory, as the layer was in use a moment ago: this is done on the event loop.
        """
        if not slot.seasoned or time.monotonic() - slot.given > _IN_MEMORY:
            return False
        with suppress(OSError):
            upper = os.stat(f"{slot.name}/upper", dir_fd=self._directory, follow_symlinks=False)
            return upper.st_ctime_ns == slot.blank_since and self._is_light(slot)
        return False

    def _is_light(self, slot: Slot) -> bool:
        """Raises: OSError."""
        return self.bytes(slot) <= _RESIDUE

    def _new_name(self) -> str:
        with self._names:
            self.last += 1
            return f"{PREFIX}{self.last}"

    def _fitted(self, name: str, limit: int) -> Slot:
        """A new subvolume with its quota and its parts.  Raises: OSError."""
        inside = self._open(name)
        try:
            slot = Slot(name, btrfs.subvolume_id(inside), limit)
            btrfs.limit_qgroup(self._directory, slot.subvolume, limit)
            slot.blank_since = _make_parts(inside)
        finally:
            os.close(inside)
        return slot

    def _open(self, name: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._directory)


@dataclass(slots=True)
class _Budget:
    """Entries that may still be removed."""

    left: int

    def spend(self) -> None:
        """Raises: OSError: E2BIG: used up."""
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.E2BIG, "too many entries to remove one by one")


def _make_parts(slot: int) -> int:
    """The two directories of an empty slot, without anything that an earlier user could have set on them; the change time of ``upper``."""
    for part in ("upper", "work"):
        os.mkdir(part, dir_fd=slot)
        os.chmod(part, 0o755, dir_fd=slot)  # noqa: S103 - a root directory, whatever the umask
    os.utime("upper", ns=(0, 0), dir_fd=slot)  # the root of a sandbox does not tell when its layer was made
    return os.stat("upper", dir_fd=slot).st_ctime_ns


def _remove_tree(parent: int, name: str, budget: _Budget) -> None:
    """Remove a tree, within a budget.  Raises: OSError."""
    budget.spend()
    try:
        os.rmdir(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with os.scandir(inside) as entries:
            some = islice(entries, budget.left + 1)
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in some]
        for child, is_directory in found:
            if is_directory:
                _remove_tree(inside, child, budget)
            else:
                budget.spend()
                os.unlink(child, dir_fd=inside)
    finally:
        os.close(inside)
    os.rmdir(name, dir_fd=parent)
