"""A few sandboxes made ahead, so that creating one is claiming one.

They are whole sandboxes of the runtime underneath that nobody has used: each is claimed once, by an engine that asked for
exactly that kind. They are not recorded (they are nobody's yet), so whatever ends the engine, the next one ends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final

from dsec.errors import BadRequest
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.model.sandbox import Metrics, Place, SandboxSpec
from dsec.ports.guest import Guest
from dsec.ports.runtime import Ended, Plan, Running, Runtime

log: Final = logging.getLogger("dsec.ready")
MAX_SIZE: Final = 1000
# Seconds after the last claim before the next is made: whoever claimed one is about to use it, and making one takes the
# processor from that. With less than half of them left it is made sooner.
QUIET: Final = 0.025
PRESSED: Final = 0.002


@dataclass(slots=True, eq=False)
class _One:
    running: Running
    guest: Guest


def _kind(plan: Plan) -> Plan:
    """What two plans must share for a sandbox made for one to serve the other."""
    return replace(plan, id=SandboxId(""), deadline=0.0)


class ReadyRuntime(Runtime):
    """A runtime that keeps ``size`` ready sandboxes of the kind that was asked for last. Volumes are never made ahead.

    Attributes:
        hits, misses: creates that found one ready, and that did not. wasted: made and never used.
    """

    def __init__(self, inner: Runtime, plan_of: Callable[[SandboxId, SandboxSpec], Plan], size: int) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise BadRequest(f"pool: {size} is not a number from 0 to {MAX_SIZE}")
        self.level = inner.level
        self.flags = inner.flags
        self.hits = self.misses = self.wasted = 0
        self._inner = inner
        self._plan_of = plan_of
        self._size = size
        self._kind: Plan | None = None
        self._ready: deque[_One] = deque()
        self._claimed: dict[SandboxId, _One] = {}
        self._making: set[SandboxId] = set()
        self._refill: asyncio.Task[None] | None = None
        self._last = 0.0  # claim, on the loop's clock
        self._jobs: set[asyncio.Task[None]] = set()
        self._closed = False

    # Claiming

    def reserve(self, spec: SandboxSpec) -> SandboxId:
        """The id of a ready sandbox of that kind, or a new one. See :class:`Runtime`."""
        kind = _kind(self._plan_of(SandboxId(""), spec))
        if kind != self._kind:
            self._change(kind)
        while self._ready:
            one = self._ready.popleft()
            if one.guest.lost:
                self._waste(one)
                continue
            self.hits += 1
            self._last = asyncio.get_running_loop().time()
            self._claimed[one.running.id] = one
            self._fill()
            return one.running.id
        self.misses += 1
        self._fill()
        return self._inner.reserve(spec)

    def _change(self, kind: Plan) -> None:
        self._kind = kind
        while self._ready:
            self._waste(self._ready.popleft())

    def _waste(self, one: _One) -> None:
        self.wasted += 1
        self._making.add(one.running.id)
        self._later(self._drop(one))

    async def _drop(self, one: _One) -> None:
        try:
            await one.guest.close()
            await self._inner.destroy(one.running.id)
        finally:
            self._making.discard(one.running.id)

    def _later(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("a ready sandbox could not be made or ended: %s", task.exception())

    # Making ahead

    def _fill(self) -> None:
        kind = self._kind
        if kind is None or kind.volumes or self._closed or (self._refill and not self._refill.done()):
            return
        self._refill = asyncio.get_running_loop().create_task(self._make_all(kind))
        self._jobs.add(self._refill)
        self._refill.add_done_callback(self._finished)

    async def _make_all(self, kind: Plan) -> None:
        while kind is self._kind and not self._closed and len(self._ready) < self._size:
            if await self._busy():
                continue
            one = await self._make(replace(kind, id=new_sandbox_id()))
            if kind is self._kind and not self._closed:
                self._ready.append(one)
            else:
                self._waste(one)

    async def _busy(self) -> bool:
        """Wait until it is time to make one. True: a claim came meanwhile, and it is too early again."""
        pause = QUIET if len(self._ready) * 2 >= self._size else PRESSED
        left = self._last + pause - asyncio.get_running_loop().time()
        await asyncio.sleep(min(max(left, PRESSED), pause))
        return left > PRESSED

    async def _make(self, plan: Plan) -> _One:
        self._making.add(plan.id)
        try:
            running = await self._inner.create(plan)
            try:
                return _One(running, await self._inner.connect(plan.id))
            except BaseException:
                self._later(self._inner.destroy(plan.id))
                raise
        finally:
            self._making.discard(plan.id)

    def ended(self, ended: Ended) -> bool:
        """News of the runtime underneath: True when it was a ready one, and nobody else needs to know."""
        for one in self._ready:
            if one.running.id == ended.id:
                self._ready.remove(one)
                self._waste(one)
                return True
        return ended.id in self._making

    async def close(self) -> None:
        """End those that nobody claimed. Afterwards nothing is made ahead."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
        while self._ready:
            self._waste(self._ready.popleft())
        while self._jobs:
            await asyncio.wait(set(self._jobs))

    # The runtime underneath

    def place(self, sandbox: SandboxId) -> Place:
        return self._inner.place(sandbox)

    async def create(self, plan: Plan) -> Running:
        one = self._claimed.get(plan.id)
        if one is None:
            return await self._inner.create(plan)
        if plan.deadline:
            await self._inner.deadline(plan.id, plan.deadline)
        return one.running

    async def rehearse(self, plan: Plan) -> None:
        """See :class:`Runtime`."""
        await self._inner.rehearse(plan)

    async def destroy(self, sandbox: SandboxId) -> None:
        one = self._claimed.pop(sandbox, None)
        if one is not None:
            await one.guest.close()
        await self._inner.destroy(sandbox)

    async def list(self) -> tuple[Running, ...]:
        hidden = self._making | {one.running.id for one in self._ready}
        return tuple(one for one in await self._inner.list() if one.id not in hidden)

    async def freeze(self, sandbox: SandboxId, frozen: bool) -> None:
        await self._inner.freeze(sandbox, frozen)

    async def deadline(self, sandbox: SandboxId, at: float) -> None:
        await self._inner.deadline(sandbox, at)

    async def connect(self, sandbox: SandboxId) -> Guest:
        one = self._claimed.pop(sandbox, None)
        if one is not None and not one.guest.lost:
            return one.guest
        return await self._inner.connect(sandbox)

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        return await self._inner.metrics(sandbox)
