"""An engine whose sandboxes are made in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsec.control.turns import Turns
from dsec.model.ids import SandboxId, SnapshotId
from dsec.model.paging import PAGE, Page
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import SandboxInfo, SandboxSpec, State
from dsec.model.snapshots import Fork, SnapshotInfo, SnapshotKind
from dsec.ports.engine import PoolService, SandboxService, Services, SnapshotService


def admitted(services: Services, turns: Turns) -> Services:
    """The same services; what makes sandboxes waits for its turn first. What wakes or forks one does so within the engine."""
    return replace(
        services,
        sandboxes=AdmittedSandboxes(services.sandboxes, turns),
        snapshots=AdmittedSnapshots(services.snapshots, turns),
        pool=AdmittedPool(services.pool, turns),
        admission=turns,
    )


class AdmittedSandboxes(SandboxService):
    """Sandboxes that are made in turns."""

    def __init__(self, inner: SandboxService, turns: Turns) -> None:
        self._inner = inner
        self._turns = turns

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        """See :class:`SandboxService`.  Raises: Busy, OverQuota: as :meth:`~dsec.ports.admission.Admission.turn`."""
        async with self._turns.turn(spec):
            return await self._inner.create(spec)

    async def create_cold(self, spec: SandboxSpec, count: int) -> tuple[SandboxId, ...]:
        async with self._turns.recording(spec.project, count):
            return await self._inner.create_cold(spec, count)

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._inner.get(sandbox)

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        return await self._inner.list(states)

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        return await self._inner.page(states=states, project=project, after=after, limit=limit)

    async def destroy(self, sandbox: SandboxId, *, reason: str = "asked") -> None:
        await self._inner.destroy(sandbox, reason=reason)

    async def pause(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._inner.pause(sandbox)

    async def resume(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._inner.resume(sandbox)

    async def hibernate(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._inner.hibernate(sandbox)

    async def extend(self, sandbox: SandboxId, ttl: float) -> SandboxInfo:
        return await self._inner.extend(sandbox, ttl)


class AdmittedSnapshots(SnapshotService):
    """Snapshots of which sandboxes are made in turns."""

    def __init__(self, inner: SnapshotService, turns: Turns) -> None:
        self._inner = inner
        self._turns = turns

    async def create(self, snapshot: SnapshotId, spec: SandboxSpec) -> SandboxInfo:
        async with self._turns.turn(spec):
            return await self._inner.create(snapshot, spec)

    async def fork(self, sandbox: SandboxId, count: int) -> Fork:
        """See :class:`SnapshotService`. The engine itself has a turn for all of them, when what is forked is awake."""
        return await self._inner.fork(sandbox, count)

    async def take(self, sandbox: SandboxId, kind: SnapshotKind) -> SnapshotInfo:
        return await self._inner.take(sandbox, kind)

    async def rollback(self, sandbox: SandboxId, snapshot: SnapshotId) -> SandboxInfo:
        return await self._inner.rollback(sandbox, snapshot)

    async def get(self, snapshot: SnapshotId) -> SnapshotInfo:
        return await self._inner.get(snapshot)

    async def list(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        return await self._inner.list(sandbox, project=project)

    async def remove(self, snapshot: SnapshotId) -> None:
        await self._inner.remove(snapshot)


class AdmittedPool(PoolService):
    """A pool for which sandboxes are made in turns. They are nobody's, so no quota counts them."""

    def __init__(self, inner: PoolService, turns: Turns) -> None:
        self._inner = inner
        self._turns = turns

    async def info(self) -> PoolInfo:
        return await self._inner.info()

    async def warm(self, spec: SandboxSpec, count: int) -> int:
        async with self._turns.nobodys(spec, max(count, 0)):
            return await self._inner.warm(spec, count)
