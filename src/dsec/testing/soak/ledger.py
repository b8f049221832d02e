"""What was acknowledged, and what therefore must be true: kept by those who ask, read by the judge."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dsec.model.sandbox import State

ALIVE = frozenset({State.RUNNING, State.PAUSED, State.HIBERNATED, State.COLD})
AWAKE = frozenset({State.RUNNING})


@dataclass(slots=True)
class Traces:
    """Tokens that acts left in a sandbox's files: those that ``must`` be there, and those that ``may``."""

    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)

    def copy(self) -> Traces:
        return Traces(set(self.must), set(self.may))


@dataclass(slots=True)
class Command:
    """One that waits for a signal. ``sure``: nothing that ends processes was asked for since it began, so that its end must be known."""

    id: str
    script: str
    sandbox: str
    ended: bool = False
    sure: bool = True


@dataclass(slots=True)
class Known:
    """What is known of a sandbox.

    Attributes:
        witness: the file of the host that its commands write to beside their own, "" = none. level: of isolation.
        states: in which it must be when nobody asks any more. asked: acts under way that change them, touching: that need it awake; enders: that end its processes; alone: whether the last one that changes it was.
        ending: a destroy was asked for. ended: and acknowledged. shaky: its processes may have been ended by a rollback that nobody knows the
            end of. rolling: rollbacks under way, rolls: that ever were.
        ran: tokens in its files; ``/name`` is a file of that name. outside: those that the witness must have. execs: ids of acknowledged commands, and their exit codes, that were not looked up in the journal yet. seen: the last record that was.
    """

    id: str
    project: str
    level: str
    witness: str = ""
    states: frozenset[State] = ALIVE
    asked: int = 0
    touching: int = 0
    enders: int = 0
    alone: bool = True
    ending: bool = False
    ended: bool = False
    shaky: bool = False
    rolling: int = 0
    rolls: int = 0
    ran: Traces = field(default_factory=Traces)
    outside: set[str] = field(default_factory=set)
    execs: dict[str, int] = field(default_factory=dict)
    seen: int = 0

    def to_come(self, token: str) -> int:
        """An act that leaves it is asked for; what :meth:`done` is given."""
        self.ran.may.add(token)
        return -1 if self.rolling else self.rolls

    def done(self, token: str, rolls: int) -> None:
        """It was acknowledged. Where files went back meanwhile, nobody knows which came first."""
        if self.rolls == rolls:
            self.ran.must.add(token)

    def kept(self, before: Traces, rolls: int) -> Traces:
        """What a copy of its files has that was asked for when they were ``before``."""
        steady = not self.rolling and self.rolls == rolls
        return Traces(set(before.must) if steady else set(), self.ran.must | self.ran.may)

    def roll(self, kept: Traces) -> None:
        """Its files are about to go back to ``kept``."""
        self.rolling += 1
        self.rolls += 1
        self.ran = Traces(self.ran.must & kept.must, self.ran.must | self.ran.may | kept.must | kept.may)

    def rolled(self, kept: Traces) -> None:
        """They did. With another one under way nobody knows which was last."""
        self.rolling -= 1
        if not self.rolling and self.alone:
            self.ran.must |= kept.must


class Ledger:
    """Of one home, for several threads: whoever reads or writes what is in it holds :attr:`lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sandboxes: dict[str, Known] = {}
        self.snapshots: dict[str, tuple[str, Traces]] = {}
        """Ids of those acknowledged; project, and what must be in it."""
        self.dropped: set[str] = set()
        """Snapshots whose removal was acknowledged."""
        self.commands: dict[str, Command] = {}
        self.open_creates: set[str] = set()
        """Tokens of creations whose end nobody knows."""
        self.open_forks: Counter[str] = Counter()
        """Parents, and how many children they may have that nobody knows of."""
        self.acts: Counter[str] = Counter()
        """Acknowledged, by name."""
        self.refused: Counter[str] = Counter()
        """Codes of refusals that were in order."""
        self.wrong: list[str] = []
        """What must not have been answered."""

    @contextmanager
    def moving(self, one: Known, to: frozenset[State], *, ends: bool = False) -> Iterator[None]:
        """An act that may change a state is under way. ``ends``: it ends the processes."""
        with self.lock:
            one.alone = one.asked == 0 and one.touching == 0
            one.asked += 1
            one.states = ALIVE
            one.enders += ends
            if ends:
                self.unsure(one.id)
        acknowledged = False
        try:
            yield
            acknowledged = True
        finally:
            with self.lock:
                one.asked -= 1
                one.enders -= ends
                if acknowledged and one.alone and not one.asked:
                    one.states = to

    @contextmanager
    def touching(self, one: Known) -> Iterator[None]:
        """An act is under way that wakes it, should it be dormant."""
        with self.lock:
            one.touching += 1
            one.alone = False
            if one.states != AWAKE and State.RUNNING not in one.states and State.PAUSED not in one.states:
                one.states |= AWAKE
        try:
            yield
        finally:
            with self.lock:
                one.touching -= 1

    def unsure(self, sandbox: str) -> None:
        """Commands in it may end without an end that anybody sees."""
        for command in self.commands.values():
            if command.sandbox == sandbox:
                command.sure = False

    def living(self, project: str = "") -> list[Known]:
        """Whose end nobody asked for."""
        with self.lock:
            return [one for one in self.sandboxes.values() if not one.ending and project in ("", one.project)]
