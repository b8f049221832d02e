"""Services that listen inside sandboxes: connections to them, bounded and recorded."""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dsec.errors import Busy, Conflict, NotFound, RuntimeUnavailable, TimedOut
from dsec.model.checks import check_count
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Phase
from dsec.node.handles import Handle
from dsec.node.kit import Kit
from dsec.ports.engine import PortService

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT: Final = "port.connect"
CONNECT_SECONDS: Final = 5.0
MAX_OPEN: Final = 256  # connections to one sandbox, those being made included
MAX_MAKING: Final = 256  # in all; a project may have as many as it leaves to others
MAX_MAKING_EACH: Final = 8  # to one sandbox, others wait: what takes no connections must not hold all places
TURN_SECONDS: Final = 15.0
NOTE_SECONDS: Final = 60.0  # between two records of one port of one sandbox
MAX_NOTED: Final = 4096


class Connection(socket.socket):
    """A socket of which it is told once that it is closed, handed to somebody else, or forgotten."""

    _told: Callable[[], object] | None = None

    def tell(self, gone: Callable[[], object]) -> None:
        """``gone`` is called then, in whichever thread that happens."""
        self._told = weakref.finalize(self, gone)

    def close(self) -> None:
        """Close it."""
        super().close()
        self._gone()

    def detach(self) -> int:
        """Give its descriptor away, as an event loop does that closes it by itself."""
        fd = super().detach()
        self._gone()
        return fd

    def _gone(self) -> None:
        if self._told is not None:
            self._told()


@dataclass(slots=True, eq=False)
class _Open:
    """The connections to one life of a sandbox, which ends when ``end`` is set; ``turns``: to make one."""

    end: asyncio.Event
    count: int = 0
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_MAKING_EACH))
    sockets: weakref.WeakSet[Connection] = field(default_factory=weakref.WeakSet)
    ending: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Noted:
    """The latest record of one port: when it was asked for (boot seconds), and how many connections were made since."""

    at: float
    record: asyncio.Task[object]
    since: int = 0


class Ports(PortService):
    """Connections into sandboxes.

    One record for each port and minute, written before the connection is made: a page of a program inside asks for dozens of
    files, and each of those may be a connection. That somebody came, when, to which port, and how often is what an audit asks;
    what was said there is the program's own.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._making: Counter[str] = Counter()  # connections, by project
        self._open: dict[SandboxId, _Open] = {}
        self._noted: OrderedDict[tuple[SandboxId, int], _Noted] = OrderedDict()

    async def connect(self, sandbox: SandboxId, port: int) -> socket.socket:
        """See :class:`PortService`. While the connection is open the sandbox is not idle; when the sandbox ends it is shut."""
        check_count("port", port, 1, 65535)
        handle = await self._kit.table.running(sandbox)
        with self._place(handle) as (here, gone):
            await self._note(sandbox, port)
            made = await self._dial(handle, port, here)
            if here.end.is_set():  # it would keep alive what is being removed
                made.close()
                raise handle.loss("before it took the connection") or NotFound(f"{sandbox} is ending")
            made.tell(gone)
            here.sockets.add(made)
            return made

    async def _dial(self, handle: Handle, port: int, here: _Open) -> Connection:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await here.turns.acquire()
        except TimeoutError:
            raise Busy(
                f"{here.count} connections to {handle.id} are being made", hint="retry in a moment"
            ) from None
        try:
            return await self._made(handle, port)
        finally:
            here.turns.release()

    async def _made(self, handle: Handle, port: int) -> Connection:
        project = handle.info.spec.project
        own, all_ = self._making[project], self._making.total()
        if own >= MAX_MAKING - all_:
            raise Busy(
                f"{all_} connections into sandboxes are being made, {own} of them of project {project!r}: "
                f"of {MAX_MAKING} it leaves as many as it has to others",
                hint="let the programs there take connections, or retry in a moment",
                limit=MAX_MAKING,
            )
        self._making[project] += 1
        try:
            plain = await handle.runtime.dial(handle.id, port, CONNECT_SECONDS)
        except (NotFound, RuntimeUnavailable, Conflict, TimedOut) as exc:
            loss = handle.loss("before it took the connection")
            if loss is not None:
                raise loss from exc
            if isinstance(exc, NotFound):
                raise RuntimeUnavailable(f"{handle.id} does not run here any more") from exc
            raise
        finally:
            self._making[project] -= 1
            if not self._making[project]:
                del self._making[project]
        made = Connection(plain.family, plain.type, plain.proto, plain.detach())
        made.setblocking(False)
        return made

    # Counting

    @contextmanager
    def _place(self, handle: Handle) -> Iterator[tuple[_Open, Callable[[], None]]]:
        """A place among the connections of the sandbox, given back on failure; otherwise by whoever calls what this yields."""
        here = self._here(handle)
        if here.count >= MAX_OPEN:
            raise Busy(
                f"{handle.id} has {here.count} connections open, its maximum",
                hint="close some, or retry",
                limit=MAX_OPEN,
            )
        here.count += 1
        handle.busy += 1
        if here.ending is None:
            here.ending = self._kit.work.start(self._shut(here))
        loop = asyncio.get_running_loop()

        def gone() -> None:
            with suppress(RuntimeError):  # the loop is closed, and so is the engine
                loop.call_soon_threadsafe(self._release, handle, here)

        try:
            yield here, gone
        except BaseException:
            self._release(handle, here)
            raise

    def _here(self, handle: Handle) -> _Open:
        """Those of its present life: what is left of an earlier one (before it was rolled back, or slept) is shut, and not counted with them."""
        here = self._open.get(handle.id)
        if here is None or here.end is not handle.ending:
            here = self._open[handle.id] = _Open(handle.ending)
        return here

    def _release(self, handle: Handle, here: _Open) -> None:
        handle.busy -= 1
        handle.used = self._kit.clock.boot()
        here.count -= 1
        if not here.count:
            if self._open.get(handle.id) is here:
                del self._open[handle.id]
            if here.ending is not None:
                here.ending.cancel()

    async def _shut(self, here: _Open) -> None:
        """A socket keeps the network of its sandbox alive: when the sandbox ends, whoever uses one is told by its end."""
        await here.end.wait()
        for each in tuple(here.sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    # Recording

    async def _note(self, sandbox: SandboxId, port: int) -> None:
        """Return when the journal has it.  Raises: StorageFull, StoreDamaged: no connection is made then."""
        now, key = self._kit.clock.boot(), (sandbox, port)
        noted = self._noted.get(key)
        if noted is None or now - noted.at >= NOTE_SECONDS:
            draft = Draft(
                chain=sandbox,
                act=CONNECT,
                phase=Phase.NOTE,
                payload={"port": port, "earlier": noted.since if noted is not None else 0},
            )
            noted = _Noted(now, self._kit.work.start(self._append(draft)))
            self._noted[key] = noted
            self._noted.move_to_end(key)
            if len(self._noted) > MAX_NOTED:
                self._noted.popitem(last=False)
        else:
            noted.since += 1
        try:
            await asyncio.shield(noted.record)
        except Exception:
            if self._noted.get(key) is noted:
                del self._noted[key]
            raise

    async def _append(self, draft: Draft) -> object:
        return await self._kit.journal.append(draft)
