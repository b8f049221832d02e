"""The pool of ready sandboxes: whole sandboxes that nobody has used, so that creating one is claiming one.

Each is claimed once, by whoever asks for exactly its kind. They are not recorded (they are nobody's yet), so whatever ends the
engine, the next one ends them. How many of which kind are ready is decided by :mod:`dsec.core.warmth`; claiming waits for nothing, and
computes next to nothing: making, checking and ending is the work of one task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dsec.core.warmth import PRESSED, pause
from dsec.errors import BadRequest
from dsec.model.ids import SandboxId
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import MIB, SandboxSpec
from dsec.node.kinds import RETRY_FIRST, Kind, Kinds, Ready, can_be_ahead
from dsec.node.memory import available
from dsec.node.stock import Stock
from dsec.node.tending import OLD, Tending
from dsec.ports.runtime import Ended, Plan, Runtime

log: Final = logging.getLogger("dsec.pool")
MOST: Final = 1000  # places
MEMORY: Final = 64 * MIB


class Pool:
    """Ready sandboxes of several kinds.

    Args:
        places: ready ones at most. memory: bytes that they may take together.
        clock: seconds, forward only. memory_left: the share of the machine's memory that is available; it may block.
    """

    def __init__(
        self,
        places: int,
        memory: int = MEMORY,
        *,
        clock: Callable[[], float] = time.monotonic,
        memory_left: Callable[[], float] = available,
    ) -> None:
        if not 0 <= places <= MOST:
            raise BadRequest(f"pool: {places} is not a number from 0 to {MOST}")
        self.kinds = Kinds(places, memory)
        self.stock = Stock(self.kinds, clock)
        self.tending = Tending(self.stock, clock, memory_left)
        self.hits = self.misses = 0
        self._clock = clock
        self._woken = asyncio.Event()
        self._moved = asyncio.Event()  # another one takes its place after each pass
        self._task: asyncio.Task[None] | None = None
        self._waking: asyncio.TimerHandle | None = None

    # Claiming: nothing here waits

    def claim(self, plan: Plan, runtime: Runtime, spec: SandboxSpec) -> SandboxId | None:
        """The id of a ready sandbox of that kind (a plan without id and deadline), from now on the caller's; or None."""
        if self.tending.closed or not can_be_ahead(plan):
            return None
        kind = self._follow(plan, runtime, spec)
        self.tending.last = now = self._clock()
        self.kinds.meet(kind, now)
        self._poke(pause(len(kind.ready) - 1, kind.target))
        while kind.ready:
            one = self.stock.take(kind)
            if one.guest.lost:
                self.stock.bad(one)
                continue
            if now - one.made > OLD:
                self.stock.waste(one)
                continue
            kind.failures = 0
            kind.hits += 1
            self.hits += 1
            one.claimed = now
            self.stock.claimed[one.id] = one
            return one.id
        kind.misses += 1
        self.misses += 1
        return None

    def _follow(self, plan: Plan, runtime: Runtime, spec: SandboxSpec) -> Kind:
        kind = self.kinds.ask(plan, runtime, spec)
        kind.spec = spec
        forgotten = self.kinds.excess()
        if forgotten is not None:
            forgotten.warm = forgotten.target = 0  # nobody waits for more of it
            self.stock.empty(forgotten)
            self._wake()
        return kind

    def claimed(self, sandbox: SandboxId) -> Ready | None:
        """The one that was claimed under that id, until :meth:`release`."""
        return self.stock.claimed.get(sandbox)

    def release(self, sandbox: SandboxId) -> Ready | None:
        """The one that was claimed under that id, which is the caller's alone from now on."""
        return self.stock.claimed.pop(sandbox, None)

    async def bury(self, one: Ready) -> None:
        """End one that died after it was claimed, before anybody was told of it: another can be made under its id then."""
        self.release(one.id)
        self.stock.count_waste(one)
        await self.stock.end(one)

    def ended(self, ended: Ended) -> bool:
        """News of a runtime: True when it was of one that nobody has yet, and nobody else needs to know."""
        ours = self.stock.ended(ended)
        if ours:
            self._poke(PRESSED)
        return ours

    def info(self) -> PoolInfo:
        """What is told of it."""
        now = self._clock()
        return PoolInfo(
            most=self.kinds.places,
            memory_most=self.kinds.memory,
            ready=self.kinds.ready(),
            target=sum(kind.target for kind in self.kinds),
            memory_bytes=self.kinds.taken(),
            hits=self.hits,
            misses=self.misses,
            wasted=self.stock.wasted,
            short=self.tending.short,
            kinds=tuple(kind.info(now) for kind in self.kinds),
        )

    # Asking for some, or for none

    async def warm(self, plan: Plan, runtime: Runtime, spec: SandboxSpec, count: int) -> int:
        """Have ``count`` of that kind ready, as far as there is room, and keep so many until nobody asks for it any more.

        Returns how many are ready.  Raises: DsecError: what making one raised.
        """
        kind = self._follow(plan, runtime, spec)
        kind.warm, kind.warmed = count, self._clock()
        kind.failures, kind.retry, kind.error = 0, 0.0, None
        self.tending.assess()
        self._wake()
        while len(kind.ready) < min(count, kind.target) and not self.tending.closed:
            await self._moved.wait()
            if kind.error is not None:
                raise kind.error
        return len(kind.ready)

    async def give_way(self) -> bool:
        """End all that are ready, for somebody who is here now meets a bound. False: there were none."""
        if not (self.kinds.ready() or self.stock.busy):
            return False
        for kind in self.kinds:
            kind.retry = max(kind.retry, self._clock() + RETRY_FIRST)
            self.stock.empty(kind)
        await self.stock.settle()
        return True

    # The task

    def _poke(self, seconds: float) -> None:
        """Let the task look so much later: first comes whoever has just asked."""
        loop = asyncio.get_running_loop()
        if self._waking is not None:
            if self._waking.when() <= loop.time() + seconds:
                return
            self._waking.cancel()
        self._waking = loop.call_later(seconds, self._wake)

    def _wake(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._woken.set()
        if not self.tending.closed and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(_report)

    async def _run(self) -> None:
        while not self.tending.closed:
            self._woken.clear()
            wait = await self.tending.tend()
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()
            if wait != 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._woken.wait()

    # The end

    async def close(self) -> None:
        """End those that nobody claimed. Afterwards nothing is made ahead. Twice is no error."""
        self.tending.closed = True
        if self._waking is not None:
            self._waking.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for kind in self.kinds:
            self.stock.empty(kind)
        self._moved.set()
        await self.stock.settle()


def _report(task: asyncio.Task[None]) -> None:
    """It ends when it is cancelled, and otherwise by a mistake of ours; the next claim starts another."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("looking after ready sandboxes failed: %s", error, exc_info=error)
