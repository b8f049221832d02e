"""Quotas, kept where every sandbox and volume comes and goes: at their records.

However a sandbox is made, woken, put to rest or ended (asked for, by a deadline, by its death, by the reconciler), its recorded state
changes, once, and with it what its project holds. What may be refused is checked and reserved in memory before it is recorded; the
records have one owner, so nobody else counts meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from dsec.core.quotas import NOTHING, Holding, Ledger, Reservation, held
from dsec.model.ids import SandboxId
from dsec.model.sandbox import SandboxInfo, SandboxSpec, State

ACTIVE: Final = (State.PENDING, State.RUNNING, State.PAUSED, State.STOPPING)

Ended = Callable[[SandboxSpec], None]


class Accounts:
    """What projects hold, as their records say.

    Attributes:
        enforcing: False until the engine is open: what it finds when it comes back is so, whatever the quotas are.
        active: the project of every sandbox that is neither dormant nor ended.
        ended: told of every sandbox that is no longer active.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.enforcing = False
        self.active: dict[SandboxId, str] = {}
        self.written: dict[
            SandboxId, int
        ] = {}  # bytes in the journal, of active ones whose projects have a quota of that
        self.ended: Ended = _nobody
        self._stopping: dict[
            SandboxId, Holding
        ] = {}  # what it held when its end began, until that is complete
        self._around: ContextVar[Reservation | None] = ContextVar("dsec.reservation", default=None)

    # Before

    @contextmanager
    def reserved(self, project: str, change: Holding) -> Iterator[None]:
        """Room for what is made within, also by tasks that are started within.  Raises: OverQuota."""
        reservation = self.ledger.reserve(project, change)
        token = self._around.set(reservation)
        try:
            yield
        finally:
            self._around.reset(token)
            self.ledger.release(reservation)

    def room(self, project: str, change: Holding) -> Reservation:
        """For one change, out of what was reserved around it, or anew.  Raises: OverQuota."""
        if not self.enforcing:
            return Reservation(project, NOTHING)
        return self.ledger.use(self._around.get(), project, change)

    # After

    def change(self, sandbox: SandboxId, spec: SandboxSpec, seen: State | None, to: State) -> Holding:
        """Of a step. What is being destroyed holds what it held, until it is gone."""
        before = self._before(sandbox, spec, seen)
        return NOTHING if to is State.STOPPING else held(to, spec) - before

    def _before(self, sandbox: SandboxId, spec: SandboxSpec, seen: State | None) -> Holding:
        if seen is None:
            return NOTHING
        now = held(seen, spec)
        return self._stopping.get(sandbox, now) if seen is State.STOPPING else now

    def found(self, info: SandboxInfo) -> None:
        """It was recorded before we came. Of what is being destroyed it is not known what it held: all that it might."""
        now = held(info.state, info.spec)
        self.ledger.put(info.spec.project, now)
        if info.state is State.STOPPING:
            self._stopping[info.id] = now
        if info.state in ACTIVE:
            self.active[info.id] = info.spec.project

    def moved(
        self,
        sandbox: SandboxId,
        spec: SandboxSpec,
        seen: State | None,
        to: State,
        room: Reservation | None = None,
    ) -> None:
        """It was recorded."""
        change = self.change(sandbox, spec, seen, to)
        if to is State.STOPPING:
            self._stopping[sandbox] = self._before(sandbox, spec, seen)
        else:
            self._stopping.pop(sandbox, None)
        if room is None:
            self.ledger.put(spec.project, change)
        else:
            self.ledger.settle(room, change)
        if to in ACTIVE:
            self.active[sandbox] = spec.project
        elif self.active.pop(sandbox, None) is not None:
            self.ledger.put(spec.project, Holding(journal=-self.written.pop(sandbox, 0)))
            self.ended(spec)

    # The journal

    def check_written(self, sandbox: SandboxId, size: int) -> None:
        """Whether it may write so many bytes more.  Raises: OverQuota."""
        project = self.active.get(sandbox)
        if project is not None and self.enforcing:
            self.ledger.check(project, Holding(journal=size))

    def wrote(self, sandbox: SandboxId, size: int) -> None:
        """It has; of one that is no longer active nothing is held."""
        project = self.active.get(sandbox)
        if project is not None:
            self.written[sandbox] = self.written.get(sandbox, 0) + size
            self.ledger.put(project, Holding(journal=size))


def _nobody(_: SandboxSpec) -> None:
    """Nobody need know."""
