"""Making ready sandboxes ahead, looking after them, and ending those that are too many: one pass after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from dsec.core.warmth import IDLE, pause, short_of_memory
from dsec.errors import DsecError
from dsec.model.ids import new_sandbox_id
from dsec.node.kinds import Kind, Ready
from dsec.node.stock import Stock

log: Final = logging.getLogger("dsec.pool")
PING: Final = 2.0  # seconds for a ready one to answer
CHECK: Final = 30.0  # seconds between two looks at those that are ready; nothing is looked at while none is
LOOK: Final = 1.0  # ... at the machine's memory, while some are made
# Seconds until a ready one is replaced unused. A kind that is asked for uses its oldest first, so only what was made for
# arrivals that did not come grows so old; whatever goes wrong in it unseen goes with it.
OLD: Final = 3 * IDLE
UNTAKEN: Final = (
    120.0  # seconds after which a claimed one that was not created is ended: recording its claim failed
)
LEARN: Final = 0.2  # weight of the latest in the average of how long making one takes


class Tending:
    """What is done for a pool, by one task.

    Args:
        clock: seconds, forward only. memory_left: the share of the machine's memory that is available; it may block.
    """

    def __init__(self, stock: Stock, clock: Callable[[], float], memory_left: Callable[[], float]) -> None:
        self.short = False
        self.last = float("-inf")  # claim
        self.closed = False
        self._stock = stock
        self._kinds = stock.kinds
        self._clock = clock
        self._memory_left = memory_left
        self._looked = float("-inf")
        self._checked = clock()

    def assess(self) -> None:
        """Decide how many of each kind shall be ready."""
        self._kinds.assess(self._clock(), short=self.short)

    async def tend(self) -> float | None:
        """Do what is due; the seconds until something will be, None = not before somebody asks for a sandbox."""
        await self._look_at_memory()
        now = self._clock()
        self.assess()
        self._look_over(now)
        kind = self._kinds.next(now)
        if kind is not None:
            early = self._too_early(kind, now)
            if early > 0:
                return early
            if not self._make_room(kind):
                return LOOK
            await self._make(kind)
            return 0.0
        return self._due(now)

    def _due(self, now: float) -> float | None:
        due = [self._kinds.retry_at()]
        if self._kinds.ready() or self._stock.claimed:
            due.append(self._checked + CHECK)
        times = [at for at in due if at is not None]
        return max(min(times) - now, 0.0) if times else None

    def _too_early(self, kind: Kind, now: float) -> float:
        """Seconds to wait first: whoever claimed one is busy with it, or a create is being waited for."""
        quiet = pause(len(kind.ready), max(kind.target, 2 if kind.warm else 0))
        return self.last + quiet - now

    async def _look_at_memory(self) -> None:
        now = self._clock()
        if now - self._looked >= LOOK:
            self._looked = now
            left = await asyncio.to_thread(self._memory_left)
            self.short = short_of_memory(left, before=self.short)

    # Ending

    def _look_over(self, now: float) -> None:
        """End those of kinds that nobody asks for, at once; what else is too much or too old, and the dead, now and then."""
        for kind in self._kinds:
            if not kind.target and (self.short or now - max(kind.demand.last, kind.warmed) > IDLE):
                self._stock.empty(kind)
        if now - self._checked < CHECK:
            return
        self._checked = now
        for kind in self._kinds:
            while kind.ready and (kind.lacking < 0 or now - kind.ready[0].made > OLD):
                self._stock.waste(self._stock.take(kind))
        for one in tuple(self._stock.claimed.values()):
            if not one.taken and now - one.claimed > UNTAKEN:
                del self._stock.claimed[one.id]
                self._stock.waste(one)
        for one in self._stock.all():
            self._stock.later(self._check(one))

    async def _check(self, one: Ready) -> None:
        """One that is lost, or does not answer, is never handed out."""
        if one.guest.lost or not await self._answers(one):
            self._stock.lose(one)
            return
        one.kind.failures = 0
        if one.kind.ready and one.kind.ready[0] is one:
            await self._measure(one)

    async def _answers(self, one: Ready) -> bool:
        try:
            async with asyncio.timeout(PING):
                await one.guest.ping()
        except (DsecError, OSError, TimeoutError):
            return False
        return True

    async def _measure(self, one: Ready) -> None:
        """What one takes, as the kernel counts it; where nobody counts, the guess stays."""
        try:
            figures = await one.kind.runtime.metrics(one.id)
        except (DsecError, OSError):
            return
        if figures.memory_bytes > 0:
            one.kind.cost = figures.memory_bytes
            one.kind.measured = True

    def _make_room(self, kind: Kind) -> bool:
        """End others that are more than they shall be; False: there is no room even so."""
        while not self._kinds.room(kind):
            other = self._kinds.surplus()
            if other is None:
                return False
            self._stock.waste(self._stock.take(other))
        return True

    # Making

    async def _make(self, kind: Kind) -> None:
        begun = self._clock()
        try:
            one = await self._made(kind)
        except Exception as error:  # noqa: BLE001 - whatever it was, creates are not to be disturbed by it
            self._failed(kind, error)
            return
        kind.seconds += LEARN * (self._clock() - begun - kind.seconds)
        kind.error = None
        if not kind.measured:
            await self._measure(one)
        if one.guest.lost:
            self._stock.bad(one)
        elif self.closed or kind not in self._kinds:
            self._stock.waste(one)
        else:
            self._stock.hidden.discard(one.id)
            self._stock.add(one)

    async def _made(self, kind: Kind) -> Ready:
        """A new one, which has answered. Still hidden; or, when it fails, being ended."""
        plan = replace(kind.plan, id=new_sandbox_id())
        self._stock.hidden.add(plan.id)
        running = None
        try:
            running = await kind.runtime.create(plan)
            guest = await kind.runtime.connect(plan.id)
            async with asyncio.timeout(PING):
                await guest.ping()
            return Ready(running, guest, kind, self._clock())
        except BaseException:
            if running is not None:
                self._stock.later(self._stock.discard(plan.id, kind.runtime))
            else:
                self._stock.hidden.discard(plan.id)
            raise

    def _failed(self, kind: Kind, error: Exception) -> None:
        """Try again later and later: creates go on as they can, and are told their own errors."""
        kind.error = error
        kind.put_off(self._clock())
        level = logging.WARNING if kind.failures == 1 else logging.DEBUG
        log.log(level, "no sandbox could be made ahead (%s); trying again later", str(error) or "no answer")
