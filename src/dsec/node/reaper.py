"""Ends what has lived, or been idle, as long as it may."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

from dsec.core.deadlines import Moment, deadline_boot, next_end
from dsec.errors import DsecError, NotFound
from dsec.model.ids import SandboxId
from dsec.model.sandbox import State
from dsec.node.handles import Handle
from dsec.node.janitor import Janitor
from dsec.node.kit import Kit

SWEEP: Final = (
    30.0  # seconds between two looks at everything: what the heap missed (a suspended machine) is found here
)

DORMANT_SWEEP: Final = 5.0  # seconds between two looks at those that are only recorded
BATCH: Final = 1000
FAILURES: Final = 64  # after which a sweep gives up: the next one goes on
MOST: Final = 64_000  # rows looked at in one sweep, however a clock was set
Destroy = Callable[[SandboxId, str], Awaitable[None]]


class Reaper:
    """A heap of moments at which to look at a sandbox. What it says then counts, not what was expected when it was put there."""

    def __init__(self, kit: Kit, destroy: Destroy, janitor: Janitor) -> None:
        self._kit = kit
        self._janitor = janitor
        self._first: Moment | None = None
        self._destroy = destroy
        self._heap: list[tuple[float, SandboxId]] = []
        self._wake = asyncio.Event()

    def watch(self, handle: Handle) -> None:
        """Look at it when it may be due next."""
        at = end_of(handle)
        if at:
            first = self._heap[0][0] if self._heap else at + 1
            heapq.heappush(self._heap, (at, handle.id))
            if at < first:
                self._wake.set()

    async def run(self) -> None:
        """For ever."""
        swept = self._kit.clock.boot()
        self._kit.work.spawn(self._sweep_dormant())
        while True:
            self._wake.clear()
            now = self._kit.clock.boot()
            if now - swept >= SWEEP:
                swept = now
                self._rebuild()
            self._look(now)
            await self._sleep(now)

    async def _sleep(self, now: float) -> None:
        wait = min(self._heap[0][0] - now, SWEEP) if self._heap else SWEEP
        try:
            async with asyncio.timeout(max(wait, 0.001)):
                await self._wake.wait()
        except TimeoutError:
            return

    def _rebuild(self) -> None:
        """The heap anew from what there is: entries of ended sandboxes go."""
        self._heap = [(at, handle.id) for handle in self._kit.table if (at := end_of(handle))]
        heapq.heapify(self._heap)

    def _look(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            _, sandbox = heapq.heappop(self._heap)
            handle = self._kit.table.find(sandbox)
            if handle is None or handle.info.state not in (State.RUNNING, State.PAUSED):
                continue
            at = end_of(handle)
            if at and at <= now:
                reason = "ttl" if handle.deadline and handle.deadline <= now else "idle"
                self._kit.work.spawn(self._end(sandbox, reason))
            elif handle.info.spec.idle or at:
                # Used since, or in use: idleness cannot end it before a whole idle time from now.
                later = at or now + handle.info.spec.idle
                heapq.heappush(self._heap, (later, sandbox))

    async def _end(self, sandbox: SandboxId, reason: str) -> None:
        await self._ended(sandbox, reason)

    async def _ended(self, sandbox: SandboxId, reason: str) -> bool:
        """End it. False: that failed, and is tried again by the janitor."""
        try:
            await self._destroy(sandbox, reason)
        except NotFound:
            return True
        except (DsecError, OSError) as exc:
            await self._janitor.take(sandbox, partial(self._destroy, sandbox, reason), exc, "expire")
            return False
        return True

    # Those that are only recorded

    async def _sweep_dormant(self) -> None:
        while True:
            with suppress(DsecError, OSError):  # a full disk, say: the next sweep finds them again
                await self.sweep()
            await asyncio.sleep(DORMANT_SWEEP)

    async def sweep(self) -> int:
        """End every dormant one whose time is up; how many there were. None of them is in memory."""
        now = self._kit.clock.now()
        first = self._first = self._first or now
        # Rows are ordered by wall time as it was when each was recorded. Whichever way the clock was set since, none is missed by this bound, and
        # whether one is due is then decided by the clock that nobody sets.
        bound = max(now.wall, first.wall + now.boot - first.boot)
        total, failed, limit = 0, 0, BATCH
        while True:
            rows = await self._kit.sandboxes.expiring(bound, limit)
            ended = 0
            for row in rows:
                if deadline_boot(row, now) <= now.boot:
                    done = await self._ended(row.id, "ttl")
                    ended, failed = ended + done, failed + (not done)
            total += ended
            if len(rows) < limit or failed > FAILURES or (limit >= MOST and not ended):
                return total
            if not ended:
                limit = min(
                    limit * 4, MOST
                )  # the first ones are not due, because the clock was set forward, or do not end


def end_of(handle: Handle) -> float:
    """When it may end by itself (boot seconds), 0 = never."""
    return next_end(handle.deadline, handle.info.spec.idle, handle.used, busy=handle.busy > 0)
