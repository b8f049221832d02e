"""What the engine holds in memory of every sandbox that is resident: that runs, is paused, or is on its way from or to that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dsec.core.machine import DORMANT
from dsec.errors import Conflict, DsecError, NotFound, SandboxFailed, UnknownOutcome
from dsec.model.ids import ExecId, SandboxId
from dsec.model.sandbox import Place, SandboxInfo, State
from dsec.node.clock import Clock
from dsec.ports.guest import Guest
from dsec.ports.journal import Sandboxes
from dsec.ports.runtime import Runtime

GAP_WEIGHT: Final = 0.2  # of the latest gap between two acts in their average


class Ongoing(Protocol):
    """A command in progress, as its sandbox's end sees it."""

    @property
    def attended(self) -> bool:
        """Somebody waits for its end, or reads its output."""

    @property
    def settled(self) -> asyncio.Future[Any]:
        """Done when the command's outcome is recorded."""

    def abandon(self, error: DsecError, *, record: bool = True) -> None:
        """Stop following it: ``error`` is its outcome, and is recorded unless the engine only lets go of it."""


@dataclass(slots=True, eq=False)
class Handle:
    """One sandbox.

    Attributes:
        lock: held while the runtime makes, freezes, thaws or ends it.
        deadline: boot seconds, 0 = none. used: boot seconds of the last act; busy: acts in progress.
        told: ended commands, recorded, that the guest may forget.
        oom_kills: as last read. failure: why it died. unsaid: why it is being destroyed, while that could not be recorded. unsettled: its execs are still to be matched with the journal;
            settling: that is being done.
        remaking: it is being rolled back. frozen: it is paused because nobody used it, and the next act lets it go on.
        unparked: it is recorded as dormant, and something of it may run still. gap: seconds between two acts, on average.
        seen_cpu: when (boot seconds) its processor time was last looked at, and what it was. look_at: before that moment (boot seconds) nobody need look whether it may rest;
            decided: when that was last decided, and how, in words.
        removal: the destroy in progress. ending: set when its end has begun. over: set when it has ended and nothing is left.
    """

    info: SandboxInfo
    runtime: Runtime
    place: Place
    deadline: float = 0.0
    used: float = 0.0
    busy: int = 0
    paused_at: float = 0.0
    oom_kills: int = 0
    failure: str = ""
    unsaid: str = ""
    unsettled: bool = False
    remaking: bool = False
    frozen: bool = False
    unparked: bool = False
    gap: float = 0.0
    seen_cpu: tuple[float, float] = (0.0, 0.0)
    look_at: float = 0.0
    decided: tuple[float, str] = (0.0, "")
    guest: Guest | None = None
    env: dict[str, str] = field(default_factory=dict)
    runs: dict[ExecId, Ongoing] = field(default_factory=dict)
    told: list[ExecId] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    settling: asyncio.Task[None] | None = None
    removal: asyncio.Task[None] | None = None
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> SandboxId:
        return self.info.id

    def use(self, now: float) -> None:
        """An act ended at that moment (boot seconds)."""
        self.gap += (now - self.used - self.gap) * GAP_WEIGHT
        self.used = now

    def loss(self, doing: str) -> DsecError | None:
        """The error for an act that was cut off because this sandbox ended; None when it has not."""
        state = self.info.state
        if state in (State.FAILED, State.LOST) or self.failure:
            return SandboxFailed(
                f"{self.id} died {doing}: {self.failure or self.info.reason}", sandbox=self.id
            )
        if state in (State.STOPPING, State.GONE):
            why = self.info.reason or "asked"
            return UnknownOutcome(f"{self.id} was destroyed ({why}) {doing}", sandbox=self.id, reason=why)
        if state in DORMANT:
            return UnknownOutcome(f"{self.id} was hibernated {doing}", sandbox=self.id)
        return None


def refusal(info: SandboxInfo) -> DsecError:
    """Why a sandbox in this state takes no commands."""
    match info.state:
        case State.FAILED | State.LOST:
            return SandboxFailed(
                f"{info.id} is {info.state}: {info.reason}", sandbox=info.id, reason=info.reason
            )
        case State.GONE:
            return absent(info.id)
        case State.HIBERNATED | State.COLD:
            return Conflict(
                f"{info.id} is {info.state}",
                hint="resume it, or use it: that wakes it",
                state=info.state.value,
            )
        case State.PAUSED:
            return Conflict(f"{info.id} is paused", hint="resume it first", state=info.state.value)
        case _:
            return Conflict(f"{info.id} is {info.state}", state=info.state.value)


def absent(sandbox: SandboxId) -> NotFound:
    """The one answer for ids that do not exist, no longer exist, or are somebody else's."""
    return NotFound(f"there is no sandbox {sandbox}", sandbox=sandbox)


def check_made(handle: Handle) -> None:
    """Raises: Conflict: it is being rolled back."""
    if handle.remaking:
        raise Conflict(f"{handle.id} is being rolled back", hint="try again", sandbox=handle.id)


class Table:
    """All handles, by id."""

    def __init__(self, sandboxes: Sandboxes, clock: Clock) -> None:
        self._sandboxes = sandboxes
        self._clock = clock
        self._handles: dict[SandboxId, Handle] = {}
        self._ends: dict[SandboxId, tuple[asyncio.Event, int]] = {}
        self.waker: Callable[[SandboxId], Awaitable[Handle]] = self._nobody

    def __iter__(self) -> Iterator[Handle]:
        return iter(tuple(self._handles.values()))

    def __contains__(self, sandbox: SandboxId) -> bool:
        return sandbox in self._handles

    def add(self, handle: Handle) -> None:
        self._handles[handle.id] = handle

    def drop(self, sandbox: SandboxId) -> None:
        self._handles.pop(sandbox, None)

    def find(self, sandbox: SandboxId) -> Handle | None:
        return self._handles.get(sandbox)

    async def info(self, sandbox: SandboxId) -> SandboxInfo:
        """What is known.  Raises: NotFound."""
        handle = self._handles.get(sandbox)
        if handle is not None:
            return handle.info
        try:
            return await self._sandboxes.get(sandbox)
        except NotFound:
            raise absent(sandbox) from None

    async def running(self, sandbox: SandboxId) -> Handle:
        """One that runs; it is woken if it is dormant.  Raises: NotFound, SandboxFailed, Conflict: it does not run. What waking raises."""
        handle = self._handles.get(sandbox)
        if handle is None or handle.info.state is not State.RUNNING:
            handle = await self._woken(sandbox, handle)
        if handle.info.state is not State.RUNNING:
            raise refusal(handle.info)
        check_made(handle)
        handle.used = self._clock.boot()
        return handle

    async def present(self, sandbox: SandboxId) -> Handle:
        """One that runs or is paused; it is woken if it has no processes.  Raises: as :meth:`running`."""
        handle = self._handles.get(sandbox)
        if handle is None or handle.info.state not in (State.RUNNING, State.PAUSED):
            handle = await self._woken(sandbox, handle)
        check_made(handle)
        handle.used = self._clock.boot()
        return handle

    async def held(self, sandbox: SandboxId) -> Handle:
        """One that runs or is paused; nothing is woken.  Raises: NotFound, SandboxFailed, Conflict."""
        handle = self._handles.get(sandbox)
        if handle is not None and handle.info.state in (State.RUNNING, State.PAUSED):
            check_made(handle)
            return handle
        raise refusal(await self.info(sandbox))

    async def _woken(self, sandbox: SandboxId, handle: Handle | None) -> Handle:
        """Raises: as :meth:`running`."""
        info = handle.info if handle is not None else await self.info(sandbox)
        frozen = handle is not None and handle.frozen and info.state is State.PAUSED
        if not frozen and info.state not in DORMANT:
            found = self._handles.get(sandbox)
            if found is not None and found.info.state is State.RUNNING:
                return found  # woken by another one since
            raise refusal(info)
        return await self.waker(sandbox)

    async def _nobody(self, sandbox: SandboxId) -> Handle:
        raise refusal(await self.info(sandbox))

    @contextmanager
    def ending(self, sandbox: SandboxId) -> Iterator[asyncio.Event]:
        """An event that is set when nothing of it is left; what happened before is not seen."""
        event, waiting = self._ends.get(sandbox) or (asyncio.Event(), 0)
        self._ends[sandbox] = (event, waiting + 1)
        try:
            yield event
        finally:
            event, waiting = self._ends.get(sandbox, (event, 1))
            if waiting > 1:
                self._ends[sandbox] = (event, waiting - 1)
            else:
                self._ends.pop(sandbox, None)

    def ended(self, sandbox: SandboxId) -> None:
        """Nothing of it is left."""
        if sandbox in self._ends:
            self._ends[sandbox][0].set()

    @contextmanager
    def using(self, handle: Handle) -> Iterator[None]:
        """While an act goes on, the sandbox is not idle."""
        handle.busy += 1
        try:
            yield
        finally:
            handle.busy -= 1
            handle.use(self._clock.boot())
