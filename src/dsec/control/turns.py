"""Turns: how many sandboxes are made at the same time, who is next, and who is told at once that there is no room.

A turn is had while a sandbox is made. Beyond so many at once more only make each other slow, and everybody's wait longer. One that
takes long does not wait for the processor but for an image, or a disk: it gives its place to the next, and keeps its turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dsec.control.accounts import Accounts
from dsec.control.pressure import Pressure
from dsec.core.fairshare import FairQueue
from dsec.core.quotas import NOTHING, held
from dsec.errors import Busy, OverQuota
from dsec.model.admission import AT_ONCE, QUEUE, AdmissionInfo
from dsec.model.sandbox import SandboxSpec, State
from dsec.ports.admission import Admission, QuotaSource

SLOW: Final = 1.0  # seconds after which a turn gives its place to the next
SLOW_AT_ONCE: Final = 32  # turns that may have done so
LEARN: Final = 0.1  # weight of the latest in the average of how long a turn takes
FIRST_TURN: Final = 0.01  # seconds, until one was had
COLD_A_TURN: Final = 100
SHORTEST_RETRY: Final = 0.05
LONGEST_RETRY: Final = 60.0


@dataclass(slots=True, eq=False)
class _Turn:
    """One that is being had, since then. ``slow``: it has given its place away."""

    begun: float
    slow: bool = False


class Turns(Admission):
    """The queue of what is to be made, and the places in which it is made.

    Args:
        at_once: places. queue: how many may wait.
        quotas: the weights of projects. accounts: what they hold. pressure: the machine's memory.
        clock: seconds, forward only. slow: seconds after which a turn gives its place away.
    """

    def __init__(
        self,
        quotas: QuotaSource,
        accounts: Accounts,
        pressure: Pressure,
        *,
        at_once: int = AT_ONCE,
        queue: int = QUEUE,
        clock: Callable[[], float] = time.monotonic,
        slow: float = SLOW,
    ) -> None:
        self._quotas = quotas
        self._accounts = accounts
        self._pressure = pressure
        self._at_once = at_once
        self._queue: FairQueue[asyncio.Future[_Turn]] = FairQueue(queue)
        self._clock = clock
        self._slow_after = slow
        self._timer: asyncio.TimerHandle | None = None
        self._turns: dict[_Turn, None] = {}  # oldest first
        self._around: ContextVar[_Turn | None] = ContextVar("dsec.turn", default=None)
        self._slow = 0
        self._seconds = FIRST_TURN
        self._admitted = self._abandoned = 0
        self._refused: Counter[str] = Counter()
        accounts.ended = pressure.ended

    @asynccontextmanager
    async def turn(
        self, spec: SandboxSpec, count: int = 1, *, seen: State | None = None
    ) -> AsyncIterator[None]:
        """See :class:`~dsec.ports.admission.Admission`."""
        before = NOTHING if seen is None else held(seen, spec)
        change = (held(State.RUNNING, spec) - before) * count
        async with AsyncExitStack() as stack:
            with self._counted():
                stack.enter_context(self._accounts.reserved(spec.project, change))
                await stack.enter_async_context(self._place(spec.project, float(count)))
                await self._memory(stack, spec, count)
            self._admitted += 1
            yield

    @asynccontextmanager
    async def nobodys(self, spec: SandboxSpec, count: int) -> AsyncIterator[None]:
        """A turn for what belongs to no project yet.  Raises: Busy."""
        async with AsyncExitStack() as stack:
            with self._counted():
                await stack.enter_async_context(self._place(spec.project, float(count)))
                await self._memory(stack, spec, count)
            yield

    @asynccontextmanager
    async def recording(self, project: str, count: int) -> AsyncIterator[None]:
        """A turn in which so many are only recorded: a hundred cost as much as one that is made.  Raises: Busy."""
        async with AsyncExitStack() as stack:
            with self._counted():
                await stack.enter_async_context(self._place(project, max(count, 0) / COLD_A_TURN))
            yield

    async def _memory(self, stack: AsyncExitStack, spec: SandboxSpec, count: int) -> None:
        await self._pressure.look()
        stack.enter_context(self._pressure.room(spec, count))

    def info(self) -> AdmissionInfo:
        """See :class:`~dsec.ports.admission.Admission`."""
        memory = self._pressure.memory
        return AdmissionInfo(
            most_waiting=self._queue.bound,
            at_once=self._at_once,
            waiting=len(self._queue),
            projects=MappingProxyType(self._queue.by_project()),
            in_progress=len(self._turns),
            slow=self._slow,
            admitted=self._admitted,
            abandoned=self._abandoned,
            refused=MappingProxyType(dict(self._refused)),
            turn_seconds=self._seconds,
            memory_bytes=-1 if memory is None else memory.total,
            available_bytes=-1 if memory is None else memory.available,
            reserve_bytes=self._pressure.reserve,
            promised_bytes=self._pressure.promised(),
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Refusals within, by reason."""
        try:
            yield
        except OverQuota as error:
            self._refused[str(error.facts["quota"])] += 1
            raise
        except Busy as error:
            self._refused[str(error.facts["reason"])] += 1
            raise

    # Places

    def _free(self) -> bool:
        return len(self._turns) - self._slow < self._at_once

    @asynccontextmanager
    async def _place(self, project: str, cost: float) -> AsyncIterator[None]:
        """Within a turn there is one already: what is forked may have to be woken first.  Raises: Busy."""
        around = self._around.get()
        if around is not None and around in self._turns:
            yield
            return
        turn = await self._enter(project, cost)
        token = self._around.set(turn)
        try:
            yield
        finally:
            self._around.reset(token)
            self._leave(turn)

    async def _enter(self, project: str, cost: float) -> _Turn:
        """Raises: Busy: no more may wait, or no more of that project."""
        weight = self._quotas.quota(project).share
        if self._free() and not self._queue:
            self._queue.serve(project, weight=weight, cost=cost)
            return self._begin()
        granted: asyncio.Future[_Turn] = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(project, granted, weight=weight, cost=cost)
        if ticket is None:
            raise self._full(project)
        self._watch()
        try:
            return await granted
        except asyncio.CancelledError:
            self._abandoned += 1
            self._queue.remove(ticket)
            if not granted.cancelled():
                self._leave(granted.result())
            raise

    def _full(self, project: str) -> Busy:
        own, all_ = self._queue.waiting(project), len(self._queue)
        wait = min(max(all_ * self._seconds / self._at_once, SHORTEST_RETRY), LONGEST_RETRY)
        return Busy(
            f"{all_} sandboxes wait to be made, {own} of them of project {project!r}, of {self._queue.bound} that may: "
            "no more of it may wait now",
            hint=f"try again in {wait:.2g} s",
            reason="queue",
            retry_after=round(wait, 3),
            waiting=all_,
            waiting_of_project=own,
            bound=self._queue.bound,
        )

    def _begin(self) -> _Turn:
        turn = _Turn(self._clock())
        self._turns[turn] = None
        return turn

    def _leave(self, turn: _Turn) -> None:
        del self._turns[turn]
        if turn.slow:
            self._slow -= 1
        else:
            self._seconds += LEARN * (self._clock() - turn.begun - self._seconds)
        self._next()

    def _next(self) -> None:
        """Let the next have their turns, as many as there are places."""
        while self._queue and self._free():
            ticket = self._queue.pop()
            if ticket is not None and not ticket.item.done():
                ticket.item.set_result(self._begin())
        if not self._turns:
            self._queue.idle()
        self._watch()

    # Turns that take long

    def _watch(self) -> None:
        """While somebody waits: look at the turn that has lasted longest when it may be slow."""
        if self._timer is not None or not self._queue or self._slow >= SLOW_AT_ONCE:
            return
        first = next((turn for turn in self._turns if not turn.slow), None)
        if first is not None:
            wait = max(first.begun + self._slow_after - self._clock(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        self._timer = None
        due = self._clock() - self._slow_after
        for turn in self._turns:
            if not turn.slow and turn.begun <= due and self._slow < SLOW_AT_ONCE:
                turn.slow = True
                self._slow += 1
        self._next()
        self._watch()

    def close(self) -> None:
        """Nothing is watched any more."""
        if self._timer is not None:
            self._timer.cancel()
