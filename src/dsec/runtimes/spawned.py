"""What the two levels that the spawner makes have in common: finding, freezing, figures, talking to init, ending."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from dsec.errors import Busy, CleanupFailed, DsecError, NotFound, RuntimeUnavailable, Unsupported
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Flag, Metrics
from dsec.ports.guest import Guest
from dsec.ports.runtime import Ended, OnEnded, Plan, Running, Runtime
from dsec.runtimes import guest
from dsec.runtimes.cgroups import Counters, Figures, Hierarchy
from dsec.runtimes.spawner import Spawner, SpawnerConfig
from dsec.wire.spawn import Created, CreateRequest, EndedEvent

_FREEZE_SECONDS: Final = 10.0
_BACKLOG: Final = 16


@dataclass(frozen=True, slots=True)
class _Known:
    """A sandbox that runs: where its figures are, and its deadline (boot ns, 0 = none), for the next spawner to be told."""

    pid: int
    slot: int
    base: Counters
    deadline: int


def _known(created: Created, deadline: int) -> _Known:
    base = Counters(created.oom_base, created.cpu_base)
    return _Known(created.pid, created.slot, base, deadline)


class Sockets:
    """Where the inits listen: one socket file each, in a directory that only the engine's user enters."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def path(self, sandbox: SandboxId) -> str:
        """Through the descriptor: a socket's path may only have 107 bytes."""
        return f"/proc/self/fd/{self._fd}/{sandbox}"

    def listen(self, sandbox: SandboxId) -> socket.socket:
        """A new listener.  Raises: OSError: it exists."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(self.path(sandbox))
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def remove(self, sandbox: SandboxId) -> None:
        """Absent is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sandbox, dir_fd=self._fd)

    def list(self) -> tuple[SandboxId, ...]:
        """Whose socket is there."""
        return tuple(map(SandboxId, os.listdir(self._fd)))

    def close(self) -> None:
        """Release the directory."""
        os.close(self._fd)


class SpawnedRuntime(Runtime):
    """A level that the spawner makes. Subclasses say what a sandbox of theirs is made of.

    Args:
        config: of the spawner.
        on_ended: told when a sandbox ended unasked.
        disk_used: bytes in the writable layer of a sandbox, or -1.
    """

    def __init__(
        self,
        config: SpawnerConfig,
        hierarchies: tuple[Hierarchy, ...],
        on_ended: OnEnded,
        disk_used: Callable[[SandboxId], Awaitable[int]],
    ) -> None:
        config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._durable = config.durable
        self._spawner = Spawner(config, self._ended, self._connected)
        self._sockets = Sockets(config.sockets)
        self._figures = Figures(hierarchies)
        self._can_freeze = any(h.v2 or "freezer" in h.controllers for h in hierarchies)
        self._on_ended = on_ended
        self._disk_used = disk_used
        self._all: dict[SandboxId, _Known] = {}
        self._early: dict[SandboxId, guest.GuestConnection] = {}
        self._freezing: WeakValueDictionary[SandboxId, asyncio.Lock] = WeakValueDictionary()

    @abstractmethod
    async def _attach_trees(self, spawner: Spawner) -> None:
        """After each connection to a spawner: give it what sandboxes are made from."""

    @abstractmethod
    async def _request(self, plan: Plan) -> tuple[CreateRequest, list[int]]:
        """Make what the sandbox needs; the request and descriptors to go with it (closed by the caller)."""

    @abstractmethod
    async def _discard(self, sandbox: SandboxId) -> None:
        """Take away what ``_request`` made. Absent is no error."""

    async def create(self, plan: Plan) -> Running:
        """See :class:`Runtime`."""
        try:
            created = await self._create(plan)
        except BaseException:
            # Not "on failure", but always: a cancelled create may have succeeded behind our back.
            cleanup = asyncio.ensure_future((self.park if plan.parked else self.destroy)(plan.id))
            with contextlib.suppress(DsecError):
                await asyncio.shield(cleanup)
            raise
        self._all[plan.id] = _known(created, int(plan.deadline * 1e9))
        return Running(id=plan.id, pid=created.pid, started=0)

    async def _create(self, plan: Plan) -> Created:
        request, fds = await self._request(plan)
        try:
            listener = self._sockets.listen(plan.id)
            with listener:
                return await self._spawner.create(
                    request, [listener.fileno(), *fds], lambda: self._reach_early(plan.id)
                )
        except OSError as error:
            raise _not_made(plan.id, error) from error
        finally:
            for fd in fds:
                os.close(fd)

    def _reach_early(self, sandbox: SandboxId) -> None:
        """Connect while the sandbox is made: its listener is there, and init reads the greeting when it runs."""
        with contextlib.suppress(RuntimeUnavailable):
            self._early[sandbox] = guest.reach(self._sockets.path(sandbox))

    async def _set_down(self, sandbox: SandboxId) -> None:
        """Take away what ``_request`` made, but for its files. Absent is no error."""
        del sandbox

    async def destroy(self, sandbox: SandboxId) -> None:
        """See :class:`Runtime`."""
        await self._end(sandbox)
        await self._discard(sandbox)

    async def park(self, sandbox: SandboxId) -> None:
        """See :class:`Runtime`."""
        if Flag.HIBERNATE not in self.flags:
            await super().park(sandbox)  # refuses
        await self._end(sandbox)
        await self._set_down(sandbox)

    async def _end(self, sandbox: SandboxId) -> None:
        """End every process of it, and its mounts.  Raises: CleanupFailed."""
        early = self._early.pop(sandbox, None)
        if early is not None:
            await early.close()
        try:
            await self._spawner.destroy(sandbox)
        except DsecError as error:
            raise CleanupFailed(f"sandbox {sandbox} could not be ended: {error.message}") from error
        self._all.pop(sandbox, None)
        self._sockets.remove(sandbox)

    async def list(self) -> tuple[Running, ...]:
        """See :class:`Runtime`."""
        found = await self._spawner.list()
        self._all = {SandboxId(one.id): _known(one.created, one.deadline) for one in found}
        return tuple(Running(id=SandboxId(one.id), pid=one.created.pid, started=0) for one in found)

    def _at(self, sandbox: SandboxId) -> _Known:
        known = self._all.get(sandbox)
        if known is None:
            raise NotFound(f"sandbox {sandbox} does not run here")
        return known

    def slot(self, sandbox: SandboxId) -> int:
        """Its number among the ids and cgroups of this machine, -1 while it does not run."""
        known = self._all.get(sandbox)
        return known.slot if known is not None else -1

    async def freeze(self, sandbox: SandboxId, frozen: bool) -> None:
        """See :class:`Runtime`."""
        async with self._freezer(sandbox):
            await self._freeze(sandbox, frozen)

    def _freezer(self, sandbox: SandboxId) -> asyncio.Lock:
        """Held by whoever changes whether it runs, for as long as that has to last."""
        return self._freezing.setdefault(sandbox, asyncio.Lock())

    async def _freeze(self, sandbox: SandboxId, frozen: bool) -> None:
        if not self._can_freeze:
            raise Unsupported("there is no freezer here", hint="mount cgroup2, or the v1 freezer controller")
        slot = self._at(sandbox).slot
        await self._spawner.freeze(sandbox, frozen)
        if not frozen:
            return
        deadline = asyncio.get_running_loop().time() + _FREEZE_SECONDS
        while not await asyncio.to_thread(self._figures.frozen, slot):
            if asyncio.get_running_loop().time() > deadline:
                await self._spawner.freeze(sandbox, False)
                raise RuntimeUnavailable(
                    f"sandbox {sandbox} did not freeze within {_FREEZE_SECONDS:.0f} s; it runs on",
                    hint="a process of it waits in the kernel and cannot be stopped now: retry",
                )
            await asyncio.sleep(0.0005)

    @contextlib.asynccontextmanager
    async def stopped(self, sandbox: SandboxId) -> AsyncIterator[None]:
        """No process of it runs within; one that was frozen before stays so.  Raises: as :meth:`freeze`."""
        async with self._freezer(sandbox):
            if await asyncio.to_thread(self._figures.frozen, self._at(sandbox).slot):
                yield
                return
            await self._freeze(sandbox, True)
            try:
                yield
            finally:
                await asyncio.shield(self._freeze(sandbox, False))

    async def deadline(self, sandbox: SandboxId, at: float) -> None:
        """See :class:`Runtime`."""
        until = int(at * 1e9)
        if sandbox in self._all:  # first: a spawner that is started meanwhile is told this one
            self._all[sandbox] = replace(self._all[sandbox], deadline=until)
        await self._spawner.deadline(sandbox, until)

    async def connect(self, sandbox: SandboxId) -> Guest:
        """See :class:`Runtime`."""
        self._at(sandbox)
        early = self._early.pop(sandbox, None)
        if early is not None and not early.lost:
            return early
        return guest.reach(self._sockets.path(sandbox))

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        """See :class:`Runtime`."""
        known = self._at(sandbox)
        disk = await self._disk_used(sandbox)
        return await asyncio.to_thread(self._figures.read, known.slot, known.base, disk)

    def memory(self, sandbox: SandboxId) -> int:
        """See :class:`Runtime`."""
        return self._figures.memory(self._at(sandbox).slot)

    def _ended(self, event: EndedEvent) -> None:
        sandbox = SandboxId(event.id)
        known = self._all.get(sandbox)
        oom = known is not None and event.oom_kills > known.base.oom_kills
        self._on_ended(Ended(id=sandbox, reason=_words(event, oom), oom=oom))

    async def start(self) -> None:
        """Start or find the spawner now instead of at the first create, and remove what was left half-made.

        Raises:
            RuntimeUnavailable, CleanupFailed.
        """
        await self._spawner.ready()
        left = await asyncio.to_thread(self._traces)
        if left:
            running = {one.id for one in await self._spawner.list()}
            keep = Flag.HIBERNATE in self.flags  # whose the files are, they know who know the records
            for sandbox in left - running:
                await (self.park if keep else self.destroy)(sandbox)

    def _traces(self) -> set[SandboxId]:
        """Of whom there is anything on disk. Blocking."""
        return set(self._sockets.list())

    async def _connected(self, spawner: Spawner) -> None:
        """A spawner, new or old: it gets what sandboxes are made from, and every deadline; who died meanwhile is found."""
        await self._attach_trees(spawner)
        if not self._all:
            return
        runs = {SandboxId(one.id): one.deadline for one in await spawner.adopted()}
        for sandbox, known in tuple(self._all.items()):
            if sandbox not in runs:
                self._on_ended(Ended(id=sandbox, reason="its init ended while no spawner watched", oom=False))
            elif known.deadline != runs[sandbox]:
                await spawner.remind(sandbox, known.deadline)

    async def close(self) -> None:
        """A private runtime ends everything it made; a durable one leaves it running, but no spawner that has nothing to do."""
        await self._spawner.close(end=not self._durable or await self._spawner.idle())
        self._sockets.close()


def _words(event: EndedEvent, oom: bool) -> str:
    if event.expired:
        return "its time to live passed"
    if oom:
        return "its init was killed for memory"
    if event.status < 0:
        return "its init ended while nobody watched"
    if os.WIFSIGNALED(event.status):
        return f"its init was killed by signal {os.WTERMSIG(event.status)}"
    return f"its init ended with exit code {os.WEXITSTATUS(event.status)}"


def base_flags(hierarchy_flags: frozenset[Flag]) -> frozenset[Flag]:
    """Flags that every level made by the spawner has."""
    return hierarchy_flags | {Flag.PTY}


def _not_made(sandbox: SandboxId, error: OSError) -> DsecError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "destroy a sandbox, or allow more (`ulimit -n`): each takes one descriptor of its engine's process"
        return Busy(f"sandbox {sandbox}: {error.strerror}", hint=hint)
    where = f": {error.filename}" if error.filename else ""
    return RuntimeUnavailable(f"sandbox {sandbox}: {error.strerror}{where}")
