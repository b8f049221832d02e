"""One open engine: its services, and the work that goes on in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from dsec.core.residence import ALL_STAY, Residence
from dsec.errors import DsecError, RuntimeUnavailable
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Level
from dsec.node.claims import Claims
from dsec.node.clock import Clock, SystemClock
from dsec.node.execs import Execs
from dsec.node.files import Doing, Files, WholeTrees
from dsec.node.guests import Guests
from dsec.node.handles import Handle, Table
from dsec.node.janitor import FIRST_WAIT, Janitor
from dsec.node.kit import Kit
from dsec.node.lifecycle import Lifecycle
from dsec.node.memory import available
from dsec.node.observe import Observe
from dsec.node.pool import Pool
from dsec.node.pooling import Pooling
from dsec.node.ports import Ports
from dsec.node.reaper import Reaper
from dsec.node.reconciler import Reconciler
from dsec.node.resting import Resting
from dsec.node.runs import Runner
from dsec.node.scratch import ScratchExecs
from dsec.node.snapshots import Snapshotting
from dsec.node.volumes import VolumeKeeping
from dsec.node.work import Work
from dsec.ports.admission import Admission, Always
from dsec.ports.engine import ImageService, Services, SharingService, TemplateService, Workplace
from dsec.ports.journal import Journal, Sandboxes, SnapshotRecords, VolumeRecords
from dsec.ports.runtime import Ended, Runtime
from dsec.ports.storage import Layers, Snapshots, Volumes
from dsec.ports.trees import Trees

log: Final = logging.getLogger("dsec.engine")
CLOSE_PATIENCE: Final = 30.0  # seconds
_NAMED: Final = 5


class Engine:
    """The composition. Stores, runtimes and layers are its owner's: it closes none of them.

    Args:
        runtimes: by level; what is missing is refused with `isolation_unavailable`. Their ``on_ended`` is :meth:`ended`.
        templates, sharing: made over what they are built with.
        layers, kept, stored: writable layers, snapshots of them, and volumes, where a level has any.
        pool: of the ready sandboxes of these runtimes, where any are kept.
        durable: sandboxes outlive this engine, and :meth:`open` adopts those of an earlier one.
        retry: seconds before a failed clean-up is tried again, doubling.
        residence: when sandboxes that nobody uses are frozen and hibernated. memory_left: the share of the machine's memory that is available; it may block.
        admission: when sandboxes may be woken; None = at once.
    """

    def __init__(
        self,
        *,
        runtimes: Mapping[Level, Runtime],
        journal: Journal,
        sandboxes: Sandboxes,
        snapshots: SnapshotRecords,
        volumes: VolumeRecords,
        templates: Callable[[Workplace], TemplateService],
        sharing: Callable[[Workplace], SharingService],
        images: ImageService,
        trees: Trees,
        layers: Layers | None = None,
        kept: Snapshots | None = None,
        stored: Volumes | None = None,
        pool: Pool | None = None,
        durable: bool = False,
        clock: Clock | None = None,
        retry: float = FIRST_WAIT,
        admission: Admission | None = None,
        residence: Residence = ALL_STAY,
        memory_left: Callable[[], float] = available,
    ) -> None:
        self._durable = durable
        clock = clock or SystemClock()
        self.kit = kit = _kit(journal, sandboxes, clock, admission or Always())
        work, guests = kit.work, kit.guests
        self.janitor = Janitor(journal, work, clock, first_wait=retry)
        self.reaper = Reaper(kit, self._reap, self.janitor)
        self.claims = Claims(volumes)
        self.lifecycle = Lifecycle(runtimes, kit, self.janitor, self._look_after, self.claims)
        self.resting = Resting(residence, kit, self.lifecycle, memory_left)
        self.lifecycle.residence = self.resting.told
        self.execs = Execs(kit.table, journal, Runner(journal, guests, work, clock))
        self.reconciler = Reconciler(
            runtimes, layers, kit, self.lifecycle, self.execs, self.janitor, self.reaper.watch
        )
        self.snapshots = Snapshotting(kept, snapshots, self.lifecycle, kit)
        self.volumes = VolumeKeeping(stored, volumes, self.claims, kit)
        doing = Doing(kit)
        execs = ScratchExecs(self.execs, self.lifecycle, kit)
        place = self.place = Workplace(self.lifecycle, execs, self.snapshots, self.snapshots, self.snapshots)
        self._services = Services(
            sandboxes=self.lifecycle,
            snapshots=self.snapshots,
            volumes=self.volumes,
            templates=templates(place),
            sharing=sharing(place),
            images=images,
            execs=execs,
            files=Files(doing),
            trees=WholeTrees(doing, trees),
            observe=Observe(kit, self.janitor),
            ports=Ports(kit),
            pool=Pooling(pool, self.lifecycle),
            close=self.close,
        )

    @property
    def services(self) -> Services:
        """What clients use."""
        return self._services

    async def open(self) -> Services:
        """Adopt what is recorded and runs, repair the rest, and begin to watch deadlines."""
        await asyncio.to_thread(self.kit.clock.now)
        if self._durable:
            await self.claims.load(self.kit.sandboxes)
            await self.reconciler.compare()
            await self.reconciler.dormant()
            await self.snapshots.compare()
            await self.volumes.compare()
        self.kit.work.spawn(self.reaper.run())
        self.kit.work.spawn(self.reconciler.run())
        self.kit.work.spawn(self.resting.run())
        return self._services

    def ended(self, ended: Ended) -> None:
        """News from a runtime: a sandbox ended without being asked to. Called on the engine's loop."""
        self.lifecycle.ended(ended)

    async def close(self) -> None:
        """Let go. A private engine destroys all its sandboxes first; a durable one leaves them running, commands included."""
        if self.lifecycle.closing:
            return
        self.lifecycle.closing = True
        handles = tuple(self.kit.table)
        if self._durable:
            await self._let_go(handles)
        else:
            await self._end_all(handles)
        await self.kit.work.close()
        for handle in handles:
            await self.kit.guests.drop(handle)

    async def _let_go(self, handles: tuple[Handle, ...]) -> None:
        leaving = RuntimeUnavailable("the engine is closing; the command goes on", hint="attach to it later")
        runs = [run for handle in handles for run in tuple(handle.runs.values())]
        for run in runs:
            run.abandon(leaving, record=False)
        if runs:
            await asyncio.wait([run.settled for run in runs], timeout=CLOSE_PATIENCE)

    async def _end_all(self, handles: tuple[Handle, ...]) -> None:
        """However many they are: patience begins anew with each that is done."""
        left = {handle.id for handle in handles}
        try:
            async with asyncio.timeout(CLOSE_PATIENCE) as patience, asyncio.TaskGroup() as group:
                for handle in handles:
                    group.create_task(self._end(handle, left, patience))
        except TimeoutError:
            log.warning(
                "%d sandboxes were not destroyed, and none within the last %g s: %s%s",
                len(left),
                CLOSE_PATIENCE,
                ", ".join(sorted(left)[:_NAMED]),
                ", ..." if len(left) > _NAMED else "",
            )

    async def _end(self, handle: Handle, left: set[SandboxId], patience: asyncio.Timeout) -> None:
        try:
            await self.lifecycle.destroy(handle.id, reason="the engine closed")
        except (DsecError, OSError, TimeoutError) as exc:
            log.warning("%s could not be destroyed: %s", handle.id, str(exc) or type(exc).__name__)
        left.discard(handle.id)
        if not patience.expired():
            patience.reschedule(asyncio.get_running_loop().time() + CLOSE_PATIENCE)

    async def _reap(self, sandbox: SandboxId, reason: str) -> None:
        await self.lifecycle.destroy(sandbox, reason=reason)

    def _look_after(self, handle: Handle) -> None:
        """After create, resume and extend."""
        self.reaper.watch(handle)
        if handle.unsettled:
            handle.settling = self.kit.work.spawn(self.reconciler.settle(handle))


def _kit(journal: Journal, sandboxes: Sandboxes, clock: Clock, admission: Admission) -> Kit:
    return Kit(
        journal=journal,
        sandboxes=sandboxes,
        table=Table(sandboxes, clock),
        guests=Guests(),
        work=Work(_report),
        clock=clock,
        admission=admission,
    )


def _report(error: BaseException) -> None:
    log.error(
        "background work failed: %s", error, exc_info=error if not isinstance(error, DsecError) else None
    )
