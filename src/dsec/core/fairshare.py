"""Whose turn is next when several projects wait, and who may join the queue. Without a clock or a task of its own.

Start-time fair queueing (Goyal, Vin, Cheng 1996): what waits carries the virtual time at which it would begin were every project served
in proportion to its weight; the smallest is served next, and virtual time is that of what was served last. Whoever comes anew begins at
the present virtual time, however long others have waited: nobody saves up turns, and nobody pays for having been served alone.

Places in the queue are shared by dynamic thresholds (Choudhury, Hahne 1998): a project may wait with as many as are free, times its
weight, so that one greedy project takes half of them; and the last tenth is for those who have nothing waiting yet.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from dsec.errors import BadRequest

T = TypeVar("T")

MOST_WEIGHT: Final = 1000
_KEPT: Final = 10  # a tenth of the places is only for projects that have nothing waiting
_LOOKED_AT: Final = 2
_SPARE: Final = 64  # entries that no longer count, before the heap is made anew


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """What waits: ``item``, of a project; ``cost`` in turns (2 takes twice the time)."""

    project: str
    item: T
    cost: float


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """One project that waits, or was served lately: ``finish`` is the virtual time at which its share is used up."""

    weight: float = 1.0
    finish: float = 0.0
    entry: int = 0  # of the heap that counts; earlier ones do not
    waiting: OrderedDict[int, Ticket[T]] = field(default_factory=OrderedDict)


class FairQueue(Generic[T]):
    """A bounded queue of several projects. Every act takes time logarithmic in their number, whatever waits.

    Args:
        bound: tickets that may wait at most, of all projects.
    """

    def __init__(self, bound: int) -> None:
        if bound < 0:
            raise BadRequest(f"queue: {bound} is less than 0")
        self.bound = bound
        self._kept = -(-bound // _KEPT)
        self._flows: OrderedDict[str, _Flow[T]] = OrderedDict()
        self._heap: list[tuple[float, int, str]] = []
        self._now = 0.0  # virtual
        self._count = 0
        self._entries = 0

    def __len__(self) -> int:
        return self._count

    def waiting(self, project: str) -> int:
        """How many of a project wait."""
        flow = self._flows.get(project)
        return len(flow.waiting) if flow is not None else 0

    def by_project(self) -> dict[str, int]:
        """How many of each project wait; those with none are left out."""
        return {name: len(flow.waiting) for name, flow in self._flows.items() if flow.waiting}

    def room(self, project: str, weight: float = 1.0) -> int:
        """How many a project may have waiting at this moment, those that wait included."""
        free = self.bound - self._count
        if free <= 0:
            return 0
        shared = max(free - self._kept, 0)
        return max(min(int(shared * max(weight, 1.0)), self.waiting(project) + shared), 1)

    def push(self, project: str, item: T, *, weight: float = 1.0, cost: float = 1.0) -> Ticket[T] | None:
        """Let it wait; None: there is no room for it. ``weight`` is the project's from now on."""
        if self.waiting(project) >= self.room(project, weight):
            return None
        flow = self._flow(project, weight)
        ticket = Ticket(project, item, max(cost, 0.0))
        flow.waiting[id(ticket)] = ticket
        self._count += 1
        if len(flow.waiting) == 1:
            self._schedule(project, flow)
        return ticket

    def remove(self, ticket: Ticket[T]) -> bool:
        """It waits no longer, and costs its project nothing; False: it did not wait any more."""
        flow = self._flows.get(ticket.project)
        if flow is None or id(ticket) not in flow.waiting:
            return False
        first = next(iter(flow.waiting.values())) is ticket
        del flow.waiting[id(ticket)]
        self._count -= 1
        if first:
            self._schedule(ticket.project, flow)
        return True

    def pop(self) -> Ticket[T] | None:
        """Whose turn it is; None: nobody waits."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if not self._counts(entry):
                continue
            start, _, project = entry
            flow = self._flows[project]
            _, ticket = flow.waiting.popitem(last=False)
            self._count -= 1
            self._charge(flow, start, ticket.cost)
            self._schedule(project, flow)
            return ticket
        return None

    def serve(self, project: str, *, weight: float = 1.0, cost: float = 1.0) -> None:
        """A turn that a project has at once, because nobody waits."""
        flow = self._flow(project, weight)
        self._charge(flow, max(self._now, flow.finish), max(cost, 0.0))

    def idle(self) -> None:
        """Nobody waits and nothing is in progress: nobody owes anybody anything."""
        if not self._count:
            self._flows.clear()
            self._heap.clear()
            self._now = 0.0

    def _flow(self, project: str, weight: float) -> _Flow[T]:
        flow = self._flows.get(project)
        if flow is None:
            flow = self._flows[project] = _Flow()
        flow.weight = min(max(weight, 1.0), MOST_WEIGHT)
        return flow

    def _charge(self, flow: _Flow[T], start: float, cost: float) -> None:
        self._now = start
        flow.finish = start + cost / flow.weight
        self._forget()

    def _schedule(self, project: str, flow: _Flow[T]) -> None:
        """Put a project's first ticket where it belongs; what was put there for an earlier first one no longer counts."""
        self._entries += 1
        flow.entry = self._entries
        if flow.waiting:
            heapq.heappush(self._heap, (max(self._now, flow.finish), flow.entry, project))
        if len(self._heap) > 2 * len(self._flows) + _SPARE:
            self._heap = [one for one in self._heap if self._counts(one)]
            heapq.heapify(self._heap)

    def _counts(self, entry: tuple[float, int, str]) -> bool:
        flow = self._flows.get(entry[2])
        return flow is not None and flow.entry == entry[1] and bool(flow.waiting)

    def _forget(self) -> None:
        """Projects that wait for nothing and owe nothing are as new; some are looked at each time, the others next time."""
        for _ in range(min(_LOOKED_AT, len(self._flows))):
            name, flow = next(iter(self._flows.items()))
            if flow.waiting or flow.finish > self._now:
                self._flows.move_to_end(name)
            else:
                del self._flows[name]
