"""The worker of a pool: a thread that empties slots, keeps empty ones ready, and lets the kernel free what was destroyed."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from dsec.errors import StorageFull
from dsec.stores.slots import Slot, Slots

KEPT: Final = 1024
"""Empty slots at most; each holds 16 KiB."""
BACKLOG: Final = 2048
"""Slots waiting to be emptied, before discarding waits."""

_BREATH: Final = (
    0.002  # seconds for which the worker lets whoever gave it a job go on: both need the interpreter
)
_COMMIT_AFTER: Final = 0.2
_SWEEP_AFTER: Final = 2.0


class SlotWorker:
    """See the module. Its methods may be called by any thread, and none but :meth:`help` and :meth:`stop` waits for the disk.

    Args:
        slots: of the pool. shelf: empty slots kept ready. limit: bytes, the quota of the first of them.
        need_room: raises StorageFull when no slot of so many bytes is to be made.
    """

    def __init__(self, slots: Slots, *, shelf: int, limit: int, need_room: Callable[[int], None]) -> None:
        self._slots = slots
        self._target = shelf
        self._need_room = need_room
        self.limit = limit
        """What the next slots are made for: what was asked for last."""
        self.shelf: deque[Slot] = deque()
        self._jobs: SimpleQueue[Slot | None] = SimpleQueue()
        self._stuck: deque[Slot] = deque()
        self._groups: deque[int] = deque(maxlen=BACKLOG)  # of subvolumes that were destroyed
        # On the monotonic clock: when to commit what was destroyed, and when to look at what is left of it.
        self._commit_at = math.inf
        self._sweep_at = math.inf
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="dsec-layers", daemon=True)

    def start(self) -> None:
        """Fill the shelf, unless there is something to be emptied first, and begin."""
        if self._jobs.empty():
            self._fill()
        self._thread.start()

    def stop(self) -> None:
        """Wait until it does nothing more."""
        self._closing = True
        self._jobs.put(None)
        self._thread.join()

    def empty(self, slot: Slot) -> None:
        """Have a slot emptied that is nobody's any more."""
        self._jobs.put(slot)

    def wake(self) -> None:
        """The shelf runs low, or there is something to be looked at."""
        self._jobs.put(None)

    def retire(self, subvolume: int) -> None:
        """A subvolume of the pool was destroyed."""
        self._destroyed(subvolume)
        self.wake()  # it looks at its times anew

    def shelve(self, slot: Slot) -> None:
        """Keep one that is as good as new; have it taken away when there are enough."""
        if len(self.shelf) < KEPT:
            self.shelf.append(slot)
        else:
            self.empty(slot)

    def take(self) -> Slot | None:
        """One from the shelf, whatever its quota; wakes the worker when the shelf runs low."""
        if len(self.shelf) * 2 <= self._target:
            self.wake()
        with suppress(IndexError):
            return self.shelf.popleft()
        return None

    @property
    def behind(self) -> bool:
        """More slots wait than should."""
        return self._jobs.qsize() > BACKLOG

    @property
    def stuck(self) -> int:
        """Slots that could not be emptied or destroyed so far."""
        return len(self._stuck)

    def help(self) -> None:
        """Empty one slot for the worker, which is behind."""
        with suppress(Empty):
            slot = self._jobs.get_nowait()
            if slot is not None:
                self._put_back(slot)

    def _work(self) -> None:
        while not self._closing:
            with suppress(Empty):
                job = self._jobs.get(timeout=self._patience())
                if self._jobs.empty():
                    time.sleep(_BREATH)
                if job is not None:
                    self._put_back(job)
            now = time.monotonic()
            if now >= self._commit_at:
                self._commit(now)
            if now >= self._sweep_at:
                self._sweep(now)
            if self._jobs.empty() and not self._closing:
                self._fill()

    def _patience(self) -> float | None:
        """Seconds that the worker waits for a job before it has something else to do."""
        due = min(self._commit_at, self._sweep_at)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _fill(self) -> None:
        """Make slots until the shelf is full. A full disk is told to who asks for a layer, not here."""
        with suppress(OSError, StorageFull):
            self._need_room(self.limit)
            while len(self.shelf) < self._target and not self._closing:
                self.shelf.append(self._slots.make(self.limit))

    def _put_back(self, slot: Slot) -> None:
        """Back on the shelf when it is as good as new, else destroyed."""
        try:
            if len(self.shelf) >= KEPT or not self._slots.emptied(slot):
                self._slots.destroy(slot)
                self._destroyed(slot.subvolume)
                return
        except OSError:
            self._stuck.append(slot)
            self._sweep_at = min(self._sweep_at, time.monotonic() + _SWEEP_AFTER)
            return
        self.shelf.append(slot)

    def _destroyed(self, subvolume: int) -> None:
        self._groups.append(subvolume)
        # Many within this time are one commit.
        self._commit_at = min(self._commit_at, time.monotonic() + _COMMIT_AFTER)

    def _commit(self, now: float) -> None:
        """Let the kernel begin to free what was destroyed."""
        self._commit_at = math.inf
        self._sweep_at = min(self._sweep_at, now + _SWEEP_AFTER)
        with suppress(OSError):
            self._slots.start_commit()

    def _sweep(self, now: float) -> None:
        """Make freed blocks usable, remove qgroups that the kernel left (before 6.11: all), try again what failed."""
        self._sweep_at = math.inf
        with suppress(OSError):
            self._slots.start_commit()
        for _ in range(len(self._stuck)):
            self._put_back(self._stuck.popleft())
        for _ in range(len(self._groups)):
            subvolume = self._groups.popleft()
            try:
                self._slots.remove_group(subvolume)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    self._groups.append(subvolume)
        if self._groups:
            self._sweep_at = min(self._sweep_at, now + _SWEEP_AFTER)
