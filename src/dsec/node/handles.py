"""What the engine holds in memory of every sandbox that has not ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsec.errors import Conflict, DsecError, NotFound, SandboxFailed, UnknownOutcome
from dsec.model.ids import ExecId, SandboxId
from dsec.model.sandbox import Place, SandboxInfo, State
from dsec.node.clock import Clock
from dsec.ports.guest import Guest
from dsec.ports.journal import Sandboxes
from dsec.ports.runtime import Runtime


class Ongoing(Protocol):
    """A command in progress, as its sandbox's end sees it."""

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
        remaking: it is being rolled back.
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
        """Raises: NotFound, SandboxFailed, Conflict: it does not run."""
        handle = self._handles.get(sandbox)
        if handle is not None and handle.info.state is State.RUNNING:
            check_made(handle)
            return handle
        raise refusal(await self.info(sandbox))

    async def present(self, sandbox: SandboxId) -> Handle:
        """One that runs or is paused.  Raises: NotFound, SandboxFailed, Conflict."""
        handle = self._handles.get(sandbox)
        if handle is not None and handle.info.state in (State.RUNNING, State.PAUSED):
            check_made(handle)
            return handle
        raise refusal(await self.info(sandbox))

    @contextmanager
    def using(self, handle: Handle) -> Iterator[None]:
        """While an act goes on, the sandbox is not idle."""
        handle.busy += 1
        try:
            yield
        finally:
            handle.busy -= 1
            handle.used = self._clock.boot()
