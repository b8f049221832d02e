"""Writable layers: btrfs subvolumes, each with a quota that the kernel holds.

A new subvolume costs 0.2 ms, but the end of one costs the kernel 1 ms (it commits a transaction to remove its qgroup). So
slots are used again: a discarded one that was never written to as it is; another is emptied, and only when that would take
long, or left anything behind, is it destroyed. Claiming from the shelf of empty slots is free; all work on the disk is done in threads.

Names in the pool: ``slot-N`` a subvolume with ``upper`` and ``work``; ``sn-…`` a snapshot of one; ``vo-…`` a volume; ``sb-…`` (durable pools only) a link to the slot of
that sandbox. A slot without a link is nobody's, and is emptied when the pool is opened.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from anyio import to_thread

from dsec.errors import BadRequest, CleanupFailed, Conflict, NotFound, StorageFull, StoreDamaged
from dsec.handover import handed
from dsec.model.ids import SandboxId, SnapshotId, parse_sandbox_id
from dsec.model.sandbox import MIB
from dsec.ports.storage import Layers
from dsec.stores.pool import Pool, open_pool
from dsec.stores.room import Room
from dsec.stores.slot_worker import BACKLOG, KEPT, SlotWorker
from dsec.stores.slots import PREFIX as SLOT
from dsec.stores.slots import Slot, Slots
from dsec.stores.snapshots import PREFIX as SNAPSHOT
from dsec.stores.snapshots import BtrfsSnapshots
from dsec.stores.volumes import PREFIX as VOLUME
from dsec.stores.volumes import BtrfsVolumes

_T = TypeVar("_T")

_CLOSED: Final = "the store of layers is closed"

_DEFAULT_MIB: Final = 1024
_SMALL_MIB: Final = 16  # a quota so small that a residue would matter gets a slot that was never used
_THREADS: Final = 4


@dataclass(eq=False, slots=True)
class _Claim:
    """Whose slot. The slot is put in by a thread and taken out by who ends the claim: exactly one gets it."""

    slots: deque[Slot] = field(default_factory=deque)
    ended: bool = False

    def take(self) -> Slot | None:
        try:
            return self.slots.pop()
        except IndexError:
            return None


class BtrfsLayers(Layers):
    """Layers in a pool. Make one with :meth:`open`."""

    def __init__(self, pool: Pool, *, shelf: int, durable: bool) -> None:
        self._pool = pool
        self._durable = durable
        self._claims: dict[SandboxId, _Claim] = {}
        self._left: deque[SandboxId] = deque(maxlen=BACKLOG)  # whose layers were discarded last
        self._room = Room(pool.directory, pool.unwritten)
        self._slots = Slots(pool.directory, pool.file_system)
        self._worker = SlotWorker(
            self._slots,
            shelf=shelf,
            limit=_DEFAULT_MIB * MIB,
            need_room=self._room.need,
        )
        self._shelf = self._worker.shelf
        self._closing = False
        self._closed = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dsec-pool")
        self._gate = threading.Semaphore(_THREADS)
        self.snapshots = BtrfsSnapshots(
            pool.directory,
            run=self._run,
            origin=self._origin,
            retire=self._worker.retire,
            need_room=partial(self._room.need, 0),
            need_all=self._room.need_all,
            closing=lambda: self._closed,
        )
        self.volumes = BtrfsVolumes(
            pool.directory,
            pool.file_system,
            mount=pool.mount_subvolume,
            run=self._run,
            retire=self._worker.retire,
            need_room=partial(self._room.need, 0),
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
        if not 0 <= shelf <= KEPT:
            raise BadRequest(f"shelf: {shelf} is not a number from 0 to {KEPT}")
        pool = await handed(partial(open_pool, state_dir, size_bytes, durable=durable), Pool.close)
        layers = cls(pool, shelf=shelf, durable=durable)
        await handed(layers._begin, lambda _: layers._stop())
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
        self._worker.limit = limit = disk_mib * MIB
        claim = self._claims[sandbox] = _Claim()
        try:
            self._room.need(limit)
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
                self._room.need(disk_mib * MIB)
            return await self._run(partial(self._copy, origin, sandbox, claim, disk_mib * MIB))
        except BaseException:
            self._end(self._claims.pop(sandbox, claim))
            raise

    def find(self, sandbox: SandboxId) -> Path:
        """See :class:`~dsec.ports.storage.Layers`."""
        return Path(self._origin(sandbox))

    def rehearse(self, source: SandboxId | SnapshotId) -> None:
        """See :class:`~dsec.ports.storage.Layers`."""
        if source.startswith(SNAPSHOT):
            self.snapshots.name(SnapshotId(source))
        else:
            self._origin(SandboxId(source))
        self._room.need_least()

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
        if self._worker.behind:
            await self._run(self._worker.help)

    async def used(self, sandbox: SandboxId) -> int:
        """See :class:`~dsec.ports.storage.Layers`. Metadata counts: an empty file takes some hundred bytes."""
        claim = self._claims.get(sandbox)
        slot = claim.slots[0] if claim is not None and claim.slots else None
        if slot is None:
            raise NotFound(f"{sandbox} has no layer")
        return await self._run(partial(self._slots.bytes, slot))

    async def list(self) -> tuple[SandboxId, ...]:
        """See :class:`~dsec.ports.storage.Layers`."""
        return tuple(self._claims)

    def root_fd(self) -> int:
        """Root of the detached mount, an ``O_PATH`` descriptor; it is closed by :meth:`close`."""
        return self._pool.mount

    def stuck(self) -> int:
        """Slots that could not be emptied or destroyed so far; each is tried again after the next discard."""
        return self._worker.stuck

    async def close(self) -> None:
        """See :class:`~dsec.ports.storage.Layers`. Twice is no error."""
        if not self._closed:
            self._closed = True
            await to_thread.run_sync(self._stop)
            self._threads.shutdown(wait=False)

    # Claims.

    @property
    def _next(self) -> int:
        """The highest number that a slot was called by so far."""
        return self._slots.last

    async def _run(self, work: Callable[[], _T]) -> _T:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._guarded, work)

    def _guarded(self, work: Callable[[], _T]) -> _T:
        """Runs in a thread. Whoever waits for it may be cancelled, but the descriptors stay open until it is done."""
        with self._gate:
            if self._closing:
                raise Conflict(_CLOSED)
            return work()

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict(_CLOSED)

    def _from_shelf(self, limit: int, *, exactly: bool = False) -> Slot | None:
        """An empty slot (``exactly``: of that quota already), or None; wakes the worker when the shelf runs low."""
        slot = self._worker.take()
        if slot is not None:
            residue_matters = slot.used and limit < _SMALL_MIB * MIB
            if not residue_matters and (slot.limit == limit or not exactly):
                return slot
            self._shelf.append(slot)
        return None

    def _give(self, claim: _Claim, slot: Slot) -> None:
        """Give a slot to a claim, which may have ended while the slot was made."""
        slot.give()
        claim.slots.append(slot)
        if claim.ended:
            self._end(claim)

    def _end(self, claim: _Claim) -> None:
        claim.ended = True
        slot = claim.take()
        if slot is None:
            return
        if self._slots.untouched(slot):
            self._worker.shelve(slot)
        else:
            self._worker.empty(slot)

    # In threads from here on.

    def _prepare(self, sandbox: SandboxId, claim: _Claim, limit: int) -> Path:
        """Make what the claim lacks: a slot, its quota, its link."""
        slot = self._from_shelf(limit)
        try:
            if slot is None:
                slot = self._slots.make(limit)
            elif slot.limit != limit:
                self._slots.resize(slot, limit)
            if self._durable:
                os.symlink(slot.name, sandbox, dir_fd=self._pool.directory)
        except OSError as error:
            self._return(slot)
            raise _translated(error, sandbox) from error
        except BaseException:
            self._return(slot)
            raise
        return self._given(sandbox, claim, slot)

    def _copy(self, origin: str, sandbox: SandboxId, claim: _Claim, limit: int) -> Path:
        """A slot that begins with what another holds."""
        slot: Slot | None = None
        try:
            slot = self._slots.copy(origin, limit, retire=self._worker.retire)
            if self._durable:
                os.symlink(slot.name, sandbox, dir_fd=self._pool.directory)
        except OSError as error:
            self._return(slot)
            raise _translated(error, sandbox) from error
        return self._given(sandbox, claim, slot)

    def _given(self, sandbox: SandboxId, claim: _Claim, slot: Slot) -> Path:
        """Give it, with its link. Where the claim has ended meanwhile, the link goes: the slot will be another's."""
        self._give(claim, slot)
        if claim.ended and self._durable:
            self._forget(sandbox)
        return Path(slot.name)

    def _return(self, slot: Slot | None) -> None:
        if slot is not None:
            self._worker.empty(slot)

    def _forget(self, sandbox: SandboxId) -> None:
        try:
            os.unlink(sandbox, dir_fd=self._pool.directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CleanupFailed(
                f"the layer of {sandbox} cannot be removed: {error.strerror}", errno=error.errno
            ) from error

    def _begin(self) -> None:
        try:
            self._start()
        except BaseException:
            self._closed = True
            self._pool.close()
            raise

    def _start(self) -> None:
        """Take over what is there, fill the shelf, start the worker.  Raises: StoreDamaged."""
        names = os.listdir(self._pool.directory)
        owners = self._owners([name for name in names if not name.startswith((SLOT, SNAPSHOT, VOLUME))])
        for name in names:
            if name.startswith(SLOT):
                self._take_over(name, owners.pop(name, None))
            elif name.startswith(SNAPSHOT):
                self._found(name, self.snapshots.found)
            elif name.startswith(VOLUME):
                self._found(name, self.volumes.found)
        for sandbox in owners.values():  # of slots that are no more
            self._forget(sandbox)
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
            slot = self._slots.found(name)
        except (ValueError, OSError) as error:
            raise StoreDamaged(f"the pool of layers holds a strange slot: {error}") from error
        if owner is None:
            self._worker.empty(slot)
        else:
            self._claims[owner] = _Claim(deque([slot]))

    def _found(self, name: str, take: Callable[[str], None]) -> None:
        try:
            take(name)
        except (BadRequest, OSError) as error:
            raise StoreDamaged(f"the pool of layers holds something strange: {name}: {error}") from error

    def _stop(self) -> None:
        self._closing = True
        self._worker.stop()
        for _ in range(_THREADS):
            self._gate.acquire()
        self._pool.close()
        if not self._durable:
            self._pool.wait_gone()


def _translated(error: OSError, sandbox: SandboxId) -> Exception:
    """What an error of the pool means to who asks for a layer."""
    if error.errno == errno.EEXIST:
        return Conflict(f"{sandbox} has a layer already")
    if error.errno == errno.ENOENT:
        return NotFound(f"what {sandbox} was to begin with is not there any more")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull("the pool of writable layers is full", hint="destroy sandboxes, or make it larger")
    return error
