"""Kinds of sandboxes that are made ahead, and the ready ones of each: who is claimed, and what is known of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from dsec.core.warmth import IDLE, Demand, Wish, shares, wanted
from dsec.model.ids import SandboxId
from dsec.model.pool import PoolKind
from dsec.model.sandbox import MIB, SandboxSpec
from dsec.ports.guest import Guest
from dsec.ports.runtime import Plan, Running, Runtime

MOST_KINDS: Final = 32  # that are followed; the one that was asked for longest ago is forgotten
STRANGERS: Final = 3  # kinds in a row that nobody asked for before: from then on, what comes once is not taken for what comes again
GUESSED_SECONDS: Final = 0.005  # to make one, until one was made
GUESSED_BYTES: Final = 4 * MIB  # of one, until one was measured
RETRY_FIRST: Final = 0.25  # seconds after a failure, doubling
RETRY_MOST: Final = 60.0
_DOUBLINGS: Final = 16


@dataclass(slots=True, eq=False)
class Ready:
    """A sandbox that nobody has used. ``made``: when; ``claimed``: likewise, 0 = not yet.

    ``taken``: it was created, as far as its claimer knows; ``dead``: its init ended before that.
    """

    running: Running
    guest: Guest
    kind: Kind
    made: float
    claimed: float = 0.0
    taken: bool = False
    dead: bool = False

    @property
    def id(self) -> SandboxId:
        """Its id."""
        return self.running.id


@dataclass(slots=True, eq=False)
class Kind:
    """What two plans must share for a sandbox made for one to serve the other; ``plan`` has no id and no deadline.

    Attributes:
        spec: of whoever asked last. demand: arrivals. ready: oldest first. target: how many shall be.
        warm: how many somebody wanted ready at ``warmed``, whether or not they are asked for.
        seconds: to make one. cost: bytes of one.
        failures: in a row: of making one, or ready ones that died; the next is made at ``retry``. error: of the last that was not made.
    """

    plan: Plan
    runtime: Runtime
    spec: SandboxSpec
    demand: Demand = field(default_factory=Demand)
    ready: deque[Ready] = field(default_factory=deque)
    target: int = 0
    warm: int = 0
    warmed: float = 0.0
    seconds: float = GUESSED_SECONDS
    cost: int = GUESSED_BYTES
    measured: bool = False
    hits: int = 0
    misses: int = 0
    wasted: int = 0
    failures: int = 0
    retry: float = 0.0
    error: Exception | None = None

    @property
    def lacking(self) -> int:
        """How many are to be made, or minus how many there are too many."""
        return self.target - len(self.ready)

    def put_off(self, now: float) -> None:
        """One failed or died: make the next one later, and later each time, until one has served or answered."""
        self.retry = now + min(RETRY_FIRST * 2 ** min(self.failures, _DOUBLINGS), RETRY_MOST)
        self.failures += 1

    def info(self, now: float) -> PoolKind:
        """What is told of it."""
        return PoolKind(
            level=self.plan.level,
            base=self.spec.base,
            template=self.spec.template,
            limits=self.plan.limits,
            read_only=self.plan.read_only,
            hits=self.hits,
            misses=self.misses,
            wasted=self.wasted,
            ready=len(self.ready),
            target=self.target,
            rate=self.demand.rate(now) if self.demand.asked else 0.0,
            make_seconds=self.seconds,
            memory_bytes=self.cost,
        )


def kind_of(plan: Plan) -> Plan:
    """The part of a plan that makes its kind."""
    return replace(plan, id=SandboxId(""), deadline=0.0)


def can_be_ahead(plan: Plan) -> bool:
    """Not with what is its claimer's alone."""
    return not plan.volumes and plan.files_of is None


class Kinds:
    """Those that are followed, the one that was asked for last first."""

    def __init__(self, places: int, memory: int) -> None:
        self.places = places
        self.memory = memory
        self._all: list[Kind] = []
        self._strangers = 0

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def ask(self, plan: Plan, runtime: Runtime, spec: SandboxSpec) -> Kind:
        """The kind of that plan, which is now the first; it is new when nobody asked for it lately."""
        kinds = self._all
        if kinds and kinds[0].plan == plan:  # mostly
            return kinds[0]
        for index, kind in enumerate(kinds):
            if kind.plan == plan:
                kinds.insert(0, kinds.pop(index))
                return kind
        kind = Kind(plan, runtime, spec)
        kinds.insert(0, kind)
        return kind

    def meet(self, kind: Kind, now: float) -> None:
        """Somebody asks for one of it."""
        if kind.demand.asked:
            self._strangers = 0
        else:
            self._strangers += 1
        kind.demand.ask(now)

    def excess(self) -> Kind | None:
        """One to forget, which is no longer followed then."""
        return self._all.pop() if len(self._all) > MOST_KINDS else None

    def assess(self, now: float, *, short: bool) -> None:
        """Decide how many of each shall be ready."""
        wishes = [self._wish(kind, now, latest=index == 0) for index, kind in enumerate(self._all)]
        given = shares(wishes, 0 if short else self.places, self.memory)
        for kind, target in zip(self._all, given, strict=True):
            kind.target = target

    def _wish(self, kind: Kind, now: float, *, latest: bool) -> Wish:
        known = latest and self._strangers <= STRANGERS
        many = wanted(kind.demand, now, kind.seconds, latest=known) if kind.demand.asked else 0
        warm = kind.warm if now - max(kind.warmed, kind.demand.last) <= IDLE else 0
        first = max(warm, 1 if known and many else 0)
        rate = kind.demand.rate(now) if kind.demand.asked else 0.0
        return Wish(wanted=max(many, warm), saves=rate * kind.seconds, cost=kind.cost, first=first)

    def next(self, now: float) -> Kind | None:
        """The kind of which one is to be made now: the one that lacks the greatest part. Those that fail wait."""
        lacking = [kind for kind in self._all if kind.lacking > 0 and kind.retry <= now]
        return max(lacking, key=lambda kind: kind.lacking / kind.target, default=None)

    def retry_at(self) -> float | None:
        """When the first of those that fail is to be tried again."""
        return min((kind.retry for kind in self._all if kind.lacking > 0), default=None)

    def ready(self) -> int:
        """All ready ones."""
        return sum(len(kind.ready) for kind in self._all)

    def taken(self) -> int:
        """Bytes that they take."""
        return sum(len(kind.ready) * kind.cost for kind in self._all)

    def surplus(self) -> Kind | None:
        """The kind that has most beyond its target."""
        over = min(self._all, key=lambda kind: kind.lacking, default=None)
        return over if over is not None and over.lacking < 0 else None

    def room(self, kind: Kind) -> bool:
        """Whether one more of it may be ready."""
        return self.ready() < self.places and self.taken() + kind.cost <= self.memory
