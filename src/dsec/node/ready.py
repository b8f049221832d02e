"""One level of which some sandboxes are ready: creating one is claiming it, where the pool has it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from dsec.errors import Busy, DsecError
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Metrics, Place, SandboxSpec
from dsec.node.kinds import Ready, kind_of
from dsec.node.pool import Pool
from dsec.ports.guest import Guest
from dsec.ports.runtime import Plan, Running, Runtime


class ReadyRuntime(Runtime):
    """The runtime underneath, with ready sandboxes of a pool that levels share. What cannot be made ahead is made when it is asked for.

    Args:
        plan_of: what that runtime would be asked to make.
    """

    def __init__(self, inner: Runtime, plan_of: Callable[[SandboxId, SandboxSpec], Plan], pool: Pool) -> None:
        self.level = inner.level
        self.flags = inner.flags
        self._inner = inner
        self._plan_of = plan_of
        self._pool = pool

    def kind_of(self, spec: SandboxSpec) -> Plan:
        """What sandboxes that can stand in for this one share."""
        return kind_of(self._plan_of(SandboxId(""), spec))

    async def warm(self, spec: SandboxSpec, count: int) -> int:
        """See :meth:`Pool.warm`."""
        return await self._pool.warm(self.kind_of(spec), self._inner, spec, count)

    # Claiming

    def reserve(self, spec: SandboxSpec) -> SandboxId:
        """The id of a ready sandbox of that kind, or a new one. See :class:`Runtime`."""
        plan = self._plan_of(SandboxId(""), spec)
        return self._pool.claim(plan, self._inner, spec) or self._inner.reserve(spec)

    async def create(self, plan: Plan) -> Running:
        """See :class:`Runtime`. A ready one that died since it was claimed is made anew; nobody was told of it yet."""
        one = self._pool.claimed(plan.id)
        if one is None:
            return await self._make(plan)
        if await self._lives(one, plan.deadline):
            one.taken = True
            return one.running
        await self._pool.bury(one)
        return await self._make(plan)

    async def _lives(self, one: Ready, deadline: float) -> bool:
        if deadline and not one.dead:
            try:
                await self._inner.deadline(one.id, deadline)
            except DsecError:
                return False
        return not one.dead and not one.guest.lost

    async def _make(self, plan: Plan) -> Running:
        """What is ready for somebody who may come takes nothing from somebody who is here."""
        try:
            return await self._inner.create(plan)
        except Busy:
            if not await self._pool.give_way():
                raise
        return await self._inner.create(plan)

    async def connect(self, sandbox: SandboxId) -> Guest:
        """See :class:`Runtime`."""
        one = self._pool.release(sandbox)
        if one is not None and not one.guest.lost:
            return one.guest
        return await self._inner.connect(sandbox)

    async def destroy(self, sandbox: SandboxId) -> None:
        """See :class:`Runtime`."""
        one = self._pool.release(sandbox)
        if one is not None:
            await one.guest.close()
        await self._inner.destroy(sandbox)

    def spare(self, sandbox: SandboxId) -> bool:
        """See :class:`Runtime`."""
        return self._pool.stock.spare(sandbox) or self._inner.spare(sandbox)

    async def list(self) -> tuple[Running, ...]:
        """See :class:`Runtime`; those that are nobody's yet are not told of."""
        return tuple(one for one in await self._inner.list() if not self._pool.stock.spare(one.id))

    # As the runtime underneath does it

    def place(self, sandbox: SandboxId) -> Place:
        """See :class:`Runtime`."""
        return self._inner.place(sandbox)

    async def pin(self, spec: SandboxSpec) -> SandboxSpec:
        """See :class:`Runtime`."""
        return await self._inner.pin(spec)

    async def rehearse(self, plan: Plan) -> None:
        """See :class:`Runtime`."""
        await self._inner.rehearse(plan)

    async def park(self, sandbox: SandboxId) -> None:
        """See :class:`Runtime`."""
        await self._inner.park(sandbox)

    def keeps(self, sandbox: SandboxId) -> bool:
        """See :class:`Runtime`."""
        return self._inner.keeps(sandbox)

    async def freeze(self, sandbox: SandboxId, frozen: bool) -> None:
        """See :class:`Runtime`."""
        await self._inner.freeze(sandbox, frozen)

    async def deadline(self, sandbox: SandboxId, at: float) -> None:
        """See :class:`Runtime`."""
        await self._inner.deadline(sandbox, at)

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        """See :class:`Runtime`."""
        return await self._inner.metrics(sandbox)

    def memory(self, sandbox: SandboxId) -> int:
        """See :class:`Runtime`."""
        return self._inner.memory(sandbox)

    async def dial(self, sandbox: SandboxId, port: int, timeout: float) -> socket.socket:
        """See :class:`Runtime`."""
        return await self._inner.dial(sandbox, port, timeout)
