"""Writable layers: btrfs subvolumes, each with a quota that the kernel holds.

A new subvolume costs 0.2 ms, but the end of one costs the kernel 1 ms (it commits a transaction to remove its qgroup). So
slots are used again: a discarded one that was never written to as it is; another is emptied, and only when that would take
long, or left anything behind, is it destroyed. Claiming from the shelf of empty slots is free; all work on the disk is done in threads.

Names in the pool: ``slot-N`` a subvolume with ``upper`` and ``work``; ``sn-…`` a snapshot of one; ``sb-…`` (durable pools only) a link to the slot of
that sandbox. A slot without a link is nobody's, and is emptied when the pool is opened.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from anyio import CapacityLimiter, to_thread

from dsec.errors import BadRequest, CleanupFailed, Conflict, NotFound, StorageFull, StoreDamaged
from dsec.model.ids import SandboxId, SnapshotId, parse_sandbox_id
from dsec.model.sandbox import MIB
from dsec.ports.storage import Layers
from dsec.stores import btrfs
from dsec.stores.pool import Pool, open_pool
from dsec.stores.snapshots import PREFIX as SNAPSHOT
from dsec.stores.snapshots import BtrfsSnapshots

_T = TypeVar("_T")

_CLOSED: Final = "the store of layers is closed"

_SLOT: Final = "slot-"
_DEFAULT_MIB: Final = 1024
_KEPT: Final = 1024  # empty slots at most; each holds 16 KiB
_BACKLOG: Final = 2048  # slots waiting to be emptied, before discarding waits
_ENTRIES: Final = 64  # more than this in a layer: destroying it is cheaper than emptying it
_RESIDUE: Final = 256 * 1024  # bytes that a used slot may still be charged with (freed by the next commit)
_WORK_ENTRIES: Final = 100_000  # what an overlay can have under way, at most
_SEASON: Final = 100_000_000  # ns; older kernels tell change times in steps of up to 10 ms
_IN_MEMORY: Final = (
    60.0  # seconds for which what was read of a layer is certainly not read from the disk again
)
_SMALL_MIB: Final = 16  # a quota so small that a residue would matter gets a slot that was never used
_THREADS: Final = 4
_BREATH: Final = (
    0.002  # seconds for which the worker lets whoever gave it a job go on: both need the interpreter
)
_COMMIT_AFTER: Final = 0.2
_SWEEP_AFTER: Final = 2.0
# With less free in the pool no layer is given out: what is left is for the sandboxes that run.
_RESERVE_SHARE: Final = 8  # an eighth of the pool
_RESERVE_LEAST: Final = 64 * MIB


@dataclass(eq=False, slots=True)
class _Slot:
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


@dataclass(eq=False, slots=True)
class _Claim:
    """Whose slot. The slot is put in by a thread and taken out by who ends the claim: exactly one gets it."""

    slots: deque[_Slot] = field(default_factory=deque)
    ended: bool = False

    def take(self) -> _Slot | None:
        try:
            return self.slots.pop()
        except IndexError:
            return None


class BtrfsLayers(Layers):
    """Layers in a pool. Make one with :meth:`open`."""

    def __init__(self, pool: Pool, *, shelf: int, durable: bool) -> None:
        self._pool = pool
        self._durable = durable
        self._target = shelf
        self._limit = _DEFAULT_MIB * MIB  # what the next slots are made for: what was asked for last
        self._claims: dict[SandboxId, _Claim] = {}
        self._left: deque[SandboxId] = deque(maxlen=_BACKLOG)  # whose layers were discarded last
        self._shelf: deque[_Slot] = deque()
        self._jobs: SimpleQueue[_Slot | None] = SimpleQueue()
        self._stuck: deque[_Slot] = deque()
        self._groups: deque[int] = deque(maxlen=_BACKLOG)  # of subvolumes that were destroyed
        # On the monotonic clock: when to commit what was destroyed, and when to look at what is left of it.
        self._commit_at = math.inf
        self._sweep_at = math.inf
        self._next = 0
        self._names = threading.Lock()
        self._closing = False
        self._closed = False
        self._limiter = CapacityLimiter(_THREADS)
        self._gate = threading.Semaphore(_THREADS)
        self._worker = threading.Thread(target=self._work, name="dsec-layers", daemon=True)
        self.snapshots = BtrfsSnapshots(
            pool.directory,
            run=self._run,
            origin=self._origin,
            retire=self._retire,
            need_room=lambda: self._check_space(0),
        )

    @classmethod
    async def open(
        cls, state_dir: Path, *, size_bytes: int | None = None, shelf: int = 8, durable: bool
    ) -> BtrfsLayers:
        """Open (or make) the pool of a state directory and fill the shelf.

        Args:
            size_bytes: of a pool that is made; None: see :func:`~dsec.stores.pool.open_pool`.
            shelf: empty slots kept ready.
            durable: keep the layers; otherwise everything ends with this process, however it ends.

        Raises:
            StorageFull, Conflict, Unsupported, StoreDamaged: as :func:`~dsec.stores.pool.open_pool`.
        """
        if not 0 <= shelf <= _KEPT:
            raise BadRequest(f"shelf: {shelf} is not a number from 0 to {_KEPT}")
        pool = await to_thread.run_sync(partial(open_pool, state_dir, size_bytes, durable=durable))
        layers = cls(pool, shelf=shelf, durable=durable)
        try:
            await to_thread.run_sync(layers._start)
        except BaseException:
            layers._closed = True
            pool.close()
            raise
        return layers

    # What the port asks for. Nothing here touches the disk on the event loop.

    async def create(self, sandbox: SandboxId, disk_mib: int) -> Path:
        """See :class:`~dsec.ports.storage.Layers`.

        In a private pool a claim from the shelf is a look at the free space and a pop from a deque. Neither waits for
        anything, so it needs no thread.
        """
        if sandbox in self._claims:
            raise Conflict(f"{sandbox} has a layer already")
        self._check_open()
        self._limit = limit = disk_mib * MIB
        claim = self._claims[sandbox] = _Claim()
        try:
            self._check_space(limit)
            slot = None if self._durable else self._from_shelf(limit, exactly=True)
            if slot is not None:
                self._give(claim, slot)
                return Path(slot.name)
            # The thread takes a slot itself: one that was taken here would be lost if this were cancelled before it runs.
            return await self._run(partial(self._prepare, sandbox, claim, limit))
        except BaseException:
            self._end(self._claims.pop(sandbox, claim))
            raise

    async def clone(self, source: SandboxId | SnapshotId, sandbox: SandboxId, disk_mib: int) -> Path:
        """See :class:`~dsec.ports.storage.Layers`."""
        if sandbox in self._claims:
            raise Conflict(f"{sandbox} has a layer already")
        origin = (
            self.snapshots.name(SnapshotId(source))
            if source.startswith(SNAPSHOT)
            else self._origin(SandboxId(source))
        )
        claim = self._claims[sandbox] = _Claim()
        returns = (
            sandbox in self._left
        )  # it is rolled back: it had a layer a moment ago, whose room is not free yet
        try:
            if not returns:
                self._check_space(disk_mib * MIB)
            return await self._run(partial(self._copy, origin, sandbox, claim, disk_mib * MIB))
        except BaseException:
            self._end(self._claims.pop(sandbox, claim))
            raise

    def rehearse(self, source: SandboxId | SnapshotId) -> None:
        """See :class:`~dsec.ports.storage.Layers`."""
        if source.startswith(SNAPSHOT):
            self.snapshots.name(SnapshotId(source))
        else:
            self._origin(SandboxId(source))
        free, size, _ = self._space()
        if free < _RESERVE_LEAST:  # what the old layer holds is free only when the new one is there
            raise StorageFull(
                f"the pool of writable layers is full: {free:,} of {size:,} bytes are free, and {_RESERVE_LEAST:,} are needed",
                hint="remove files, sandboxes or snapshots, or make the pool larger (pool_bytes)",
                free=free,
                size=size,
            )

    def _origin(self, sandbox: SandboxId) -> str:
        """The subvolume of a sandbox.  Raises: NotFound."""
        claim = self._claims.get(sandbox)
        if claim is None or not claim.slots:
            raise NotFound(f"{sandbox} has no layer")
        return claim.slots[0].name

    async def discard(self, sandbox: SandboxId) -> None:
        """See :class:`~dsec.ports.storage.Layers`."""
        claim = self._claims.get(sandbox)
        if claim is None:
            return
        if self._durable:
            await self._run(partial(self._forget, sandbox))
        self._claims.pop(sandbox, None)
        self._left.append(sandbox)
        self._end(claim)
        if self._jobs.qsize() > _BACKLOG:
            await self._run(self._help)

    async def used(self, sandbox: SandboxId) -> int:
        """See :class:`~dsec.ports.storage.Layers`. Metadata counts: an empty file takes some hundred bytes."""
        claim = self._claims.get(sandbox)
        slot = claim.slots[0] if claim is not None and claim.slots else None
        if slot is None:
            raise NotFound(f"{sandbox} has no layer")
        return await self._run(partial(btrfs.qgroup_bytes, self._pool.file_system, slot.subvolume))

    async def list(self) -> tuple[SandboxId, ...]:
        """See :class:`~dsec.ports.storage.Layers`."""
        return tuple(self._claims)

    def root_fd(self) -> int:
        """Root of the detached mount, an ``O_PATH`` descriptor; it is closed by :meth:`close`."""
        return self._pool.mount

    def stuck(self) -> int:
        """Slots that could not be emptied or destroyed so far; each is tried again after the next discard."""
        return len(self._stuck)

    async def close(self) -> None:
        """See :class:`~dsec.ports.storage.Layers`. Twice is no error."""
        if not self._closed:
            self._closed = True
            await to_thread.run_sync(self._stop)

    # Claims.

    async def _run(self, work: Callable[[], _T]) -> _T:
        self._check_open()
        return await to_thread.run_sync(partial(self._guarded, work), limiter=self._limiter)

    def _guarded(self, work: Callable[[], _T]) -> _T:
        """Runs in a thread. Whoever waits for it may be cancelled, but the descriptors stay open until it is done."""
        with self._gate:
            if self._closing:
                raise Conflict(_CLOSED)
            return work()

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict(_CLOSED)

    def _from_shelf(self, limit: int, *, exactly: bool = False) -> _Slot | None:
        """An empty slot (``exactly``: of that quota already), or None; wakes the worker when the shelf runs low."""
        if len(self._shelf) * 2 <= self._target:
            self._jobs.put(None)
        with suppress(IndexError):
            slot = self._shelf.popleft()
            residue_matters = slot.used and limit < _SMALL_MIB * MIB
            if not residue_matters and (slot.limit == limit or not exactly):
                return slot
            self._shelf.append(slot)
        return None

    def _give(self, claim: _Claim, slot: _Slot) -> None:
        """Give a slot to a claim, which may have ended while the slot was made."""
        slot.used = True
        slot.given = time.monotonic()
        slot.seasoned = 0 < slot.blank_since < time.time_ns() - _SEASON
        claim.slots.append(slot)
        if claim.ended:
            self._end(claim)

    def _end(self, claim: _Claim) -> None:
        claim.ended = True
        slot = claim.take()
        if slot is None:
            return
        if len(self._shelf) < _KEPT and self._untouched(slot):
            self._shelf.append(slot)
        else:
            self._jobs.put(slot)

    def _untouched(self, slot: _Slot) -> bool:
        """Whether nothing was ever written to it: whatever is written below ``upper``, or set on it, changes its change time, which
        nobody inside can set. A file without a name (O_TMPFILE) changes no directory, but leaves what it took. What the
        overlay made in ``work`` is taken away by the next one's mount.

        A few looks at what the kernel has in memory, as the layer was in use a moment ago: this is done on the event loop.
        """
        if not slot.seasoned or time.monotonic() - slot.given > _IN_MEMORY:
            return False
        with suppress(OSError):
            upper = os.stat(f"{slot.name}/upper", dir_fd=self._pool.directory, follow_symlinks=False)
            return upper.st_ctime_ns == slot.blank_since and self._is_light(slot)
        return False

    def _is_light(self, slot: _Slot) -> bool:
        """Raises: OSError."""
        return btrfs.qgroup_bytes(self._pool.file_system, slot.subvolume) <= _RESIDUE

    # In threads from here on.

    def _prepare(self, sandbox: SandboxId, claim: _Claim, limit: int) -> Path:
        """Make what the claim lacks: a slot, its quota, its link."""
        slot = self._from_shelf(limit)
        try:
            if slot is None:
                slot = self._make(limit)
            elif slot.limit != limit:
                btrfs.limit_qgroup(self._pool.directory, slot.subvolume, limit)
                slot.limit = limit
            if self._durable:
                os.symlink(slot.name, sandbox, dir_fd=self._pool.directory)
        except OSError as error:
            self._return(slot)
            raise _translated(error, sandbox) from error
        except BaseException:
            self._return(slot)
            raise
        self._give(claim, slot)
        return Path(slot.name)

    def _copy(self, origin: str, sandbox: SandboxId, claim: _Claim, limit: int) -> Path:
        """A slot that begins with what another holds."""
        slot: _Slot | None = None
        try:
            slot = self._snapshot(origin, limit)
            if self._durable:
                os.symlink(slot.name, sandbox, dir_fd=self._pool.directory)
        except OSError as error:
            self._return(slot)
            raise _translated(error, sandbox) from error
        self._give(claim, slot)
        return Path(slot.name)

    def _snapshot(self, origin: str, limit: int) -> _Slot:
        """Raises: OSError."""
        with self._names:
            self._next += 1
            name = f"{_SLOT}{self._next}"
        source = self._open(origin)
        try:
            btrfs.snapshot(source, self._pool.directory, name)
        finally:
            os.close(source)
        inside = self._open(name)
        try:
            slot = _Slot(name, btrfs.subvolume_id(inside), limit, used=True)
            btrfs.limit_qgroup(self._pool.directory, slot.subvolume, limit)
            # What the overlay of the other had under way is not ours, and marks the layer as one in use.
            _remove_tree(inside, "work", _Budget(_WORK_ENTRIES))
            os.mkdir("work", dir_fd=inside)
            os.chmod("work", 0o755, dir_fd=inside)  # noqa: S103 - a root directory, whatever the umask
        except OSError:
            with suppress(
                OSError
            ):  # the first error is told; the next start of this pool empties what is left
                number = btrfs.subvolume_id(inside)
                btrfs.destroy_subvolume(self._pool.directory, name)
                self._retire(number)
            raise
        finally:
            os.close(inside)
        return slot

    def _return(self, slot: _Slot | None) -> None:
        if slot is not None:
            self._jobs.put(slot)

    def _check_space(self, asked: int) -> None:
        """Quotas may add up to more than the pool: who comes last must not take the room of those who run.

        Raises: StorageFull: the reserve is touched.
        """
        free, size, reserve = self._space()
        if free < reserve:
            raise StorageFull(
                f"the pool of writable layers is nearly full: {free:,} of {size:,} bytes are free, and the last "
                f"{reserve:,} are kept for sandboxes that run",
                hint="destroy sandboxes, or make the pool larger (pool_bytes)",
                free=free,
                size=size,
                reserve=reserve,
                asked=asked,
            )

    def _space(self) -> tuple[int, int, int]:
        """Bytes free, bytes in all, and how many of them must be free for one more layer."""
        free, size = btrfs.free_bytes(self._pool.directory, self._pool.unwritten)
        return free, size, max(_RESERVE_LEAST, size // _RESERVE_SHARE)

    def _forget(self, sandbox: SandboxId) -> None:
        try:
            os.unlink(sandbox, dir_fd=self._pool.directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CleanupFailed(
                f"the layer of {sandbox} cannot be removed: {error.strerror}", errno=error.errno
            ) from error

    def _make(self, limit: int) -> _Slot:
        """A new, empty slot.  Raises: OSError."""
        with self._names:
            self._next += 1
            name = f"{_SLOT}{self._next}"
        btrfs.create_subvolume(self._pool.directory, name)
        try:
            return self._fitted(name, limit)
        except BaseException:
            with suppress(OSError):
                btrfs.destroy_subvolume(self._pool.directory, name)
            raise

    def _fitted(self, name: str, limit: int) -> _Slot:
        """A new subvolume with its quota and its parts.  Raises: OSError."""
        inside = self._open(name)
        try:
            slot = _Slot(name, btrfs.subvolume_id(inside), limit)
            btrfs.limit_qgroup(self._pool.directory, slot.subvolume, limit)
            slot.blank_since = _make_parts(inside)
        finally:
            os.close(inside)
        return slot

    def _open(self, name: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._pool.directory)

    def _start(self) -> None:
        """Take over what is there, fill the shelf, start the worker.  Raises: StoreDamaged."""
        names = os.listdir(self._pool.directory)
        owners = self._owners([name for name in names if not name.startswith((_SLOT, SNAPSHOT))])
        for name in names:
            if name.startswith(_SLOT):
                self._take_over(name, owners.pop(name, None))
            elif name.startswith(SNAPSHOT):
                self._found_snapshot(name)
        for sandbox in owners.values():  # of slots that are no more
            self._forget(sandbox)
        if self._jobs.empty():
            self._fill()
        self._worker.start()

    def _owners(self, links: Iterable[str]) -> dict[str, SandboxId]:
        """Whose each linked slot is."""
        try:
            return {os.readlink(name, dir_fd=self._pool.directory): parse_sandbox_id(name) for name in links}
        except (BadRequest, OSError) as error:
            raise StoreDamaged(f"the pool of layers holds something strange: {error}") from error

    def _take_over(self, name: str, owner: SandboxId | None) -> None:
        """A slot of an earlier run: its owner's still, or to be emptied."""
        try:
            self._next = max(self._next, int(name.removeprefix(_SLOT)))
            inside = self._open(name)
        except (ValueError, OSError) as error:
            raise StoreDamaged(f"the pool of layers holds a strange slot: {error}") from error
        slot = _Slot(name, btrfs.subvolume_id(inside), 0, used=True)
        os.close(inside)
        if owner is None:
            self._jobs.put(slot)
        else:
            self._claims[owner] = _Claim(deque([slot]))

    def _found_snapshot(self, name: str) -> None:
        try:
            self.snapshots.found(name)
        except BadRequest as error:
            raise StoreDamaged(f"the pool of layers holds a strange snapshot: {error.message}") from error

    def _stop(self) -> None:
        self._closing = True
        self._jobs.put(None)
        self._worker.join()
        for _ in range(_THREADS):
            self._gate.acquire()
        self._pool.close()
        if not self._durable:
            self._pool.wait_gone()

    def _help(self) -> None:
        """Empty one slot for the worker, which is behind."""
        with suppress(Empty):
            slot = self._jobs.get_nowait()
            if slot is not None:
                self._put_back(slot)

    def _work(self) -> None:
        """The worker: empties slots, keeps the shelf filled, lets the kernel free what was destroyed."""
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
            self._check_space(self._limit)
            while len(self._shelf) < self._target and not self._closing:
                self._shelf.append(self._make(self._limit))

    def _put_back(self, slot: _Slot) -> None:
        """Back on the shelf when it is as good as new, else destroyed."""
        try:
            if len(self._shelf) >= _KEPT or not self._emptied(slot):
                btrfs.destroy_subvolume(self._pool.directory, slot.name)
                self._destroyed(slot.subvolume)
                return
        except OSError:
            self._stuck.append(slot)
            self._sweep_at = min(self._sweep_at, time.monotonic() + _SWEEP_AFTER)
            return
        self._shelf.append(slot)

    def _destroyed(self, subvolume: int) -> None:
        self._groups.append(subvolume)
        # Many within this time are one commit.
        self._commit_at = min(self._commit_at, time.monotonic() + _COMMIT_AFTER)

    def _retire(self, subvolume: int) -> None:
        """Another subvolume of the pool was destroyed."""
        self._destroyed(subvolume)
        self._jobs.put(None)  # the worker looks at its times anew

    def _emptied(self, slot: _Slot) -> bool:
        """Make it empty, if that is quick. False: it is not, and must be destroyed."""
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

    def _commit(self, now: float) -> None:
        """Let the kernel begin to free what was destroyed."""
        self._commit_at = math.inf
        self._sweep_at = min(self._sweep_at, now + _SWEEP_AFTER)
        with suppress(OSError):
            btrfs.start_commit(self._pool.directory)

    def _sweep(self, now: float) -> None:
        """Make freed blocks usable, remove qgroups that the kernel left (before 6.11: all), try again what failed."""
        self._sweep_at = math.inf
        with suppress(OSError):
            btrfs.start_commit(self._pool.directory)
        for _ in range(len(self._stuck)):
            self._put_back(self._stuck.popleft())
        for _ in range(len(self._groups)):
            subvolume = self._groups.popleft()
            try:
                btrfs.remove_qgroup(self._pool.directory, subvolume)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    self._groups.append(subvolume)
        if self._groups:
            self._sweep_at = min(self._sweep_at, now + _SWEEP_AFTER)


def _translated(error: OSError, sandbox: SandboxId) -> Exception:
    """What an error of the pool means to who asks for a layer."""
    if error.errno == errno.EEXIST:
        return Conflict(f"{sandbox} has a layer already")
    if error.errno == errno.ENOENT:
        return NotFound(f"what {sandbox} was to begin with is not there any more")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull("the pool of writable layers is full", hint="destroy sandboxes, or make it larger")
    return error


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
