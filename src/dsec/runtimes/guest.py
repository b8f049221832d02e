"""The engine's side of the init protocol: commands and files of one sandbox over one unix stream socket."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest, DsecError, RuntimeUnavailable
from dsec.model.execs import Command, ExecInfo, PtySize
from dsec.model.ids import ExecId
from dsec.ports.guest import Guest, GuestExec
from dsec.runtimes.calls import Unheard, call, tell_all
from dsec.runtimes.guest_errors import exec_error
from dsec.runtimes.guest_exec import AttachedExec, Requests, info_of
from dsec.runtimes.guest_files import FilesOverLink
from dsec.runtimes.link import Bounds, Link, outgoing
from dsec.wire import guest as wire

CONNECT_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestUsage:
    """Figures that init counts itself. ``user``, ``system``: CPU seconds of processes that have ended."""

    processes: int
    execs: int
    user: float
    system: float


class GuestConnection(Guest):
    """One connection. A newer one to the same init ends this one."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._files = FilesOverLink(link)
        self._requests = Requests()

    @property
    def files(self) -> FilesOverLink:
        """Files, over the same connection."""
        return self._files

    @property
    def lost(self) -> bool:
        """The connection has ended: make another."""
        return self._link.failure is not None

    @property
    def failure(self) -> DsecError | None:
        """Why the connection ended; None while it stands."""
        return self._link.failure

    @property
    def operations(self) -> int:
        """Operations under way."""
        return self._link.open_channels

    async def greeted(self) -> None:
        """Wait until init has answered.  Raises: RuntimeUnavailable."""
        try:
            await asyncio.shield(self._link.greeting.welcome)
        except DsecError:
            raise self._link.gone() from self._link.failure

    async def wait_ended(self) -> DsecError:
        """Wait until the connection has ended, and say why."""
        await asyncio.shield(self._link.over)
        return self._link.failure or RuntimeUnavailable("the connection to init ended")

    async def post(self, command: Command) -> AttachedExec:
        """Ask for a command to be started; cancelled here, it was not sent."""
        link = self._link
        if link.held:
            await link.drain()
        window = link.grant()
        followed = AttachedExec(
            link, command.id, window=window, fresh=True, stdin=command.stdin, timeout=command.timeout
        )
        link.begin(followed, wire.Kind.EXEC, self._requests.payload(command, window), window=window)
        return followed

    async def exec(self, command: Command) -> GuestExec:
        """As :meth:`post`, and wait until it has started.

        When this is cancelled, or the connection ends first, the command may have been started all the same: only the
        id tells (``execs``, ``attach``).
        """
        return await _started(await self.post(command))

    async def attach(self, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0) -> GuestExec:
        """Listen again from these offsets."""
        await self._link.drain()
        window = self._link.grant()
        followed = AttachedExec(self._link, exec_id, window=window, fresh=False)
        payload = outgoing(wire.Attach(exec_id.encode(), stdout, stderr, window))
        self._link.begin(followed, wire.Kind.ATTACH, payload, window=window)
        return await _started(followed)

    async def signal(self, exec_id: ExecId, signo: int, *, tree: bool = False) -> None:
        """Signal the command, or kill its whole tree."""
        scope = wire.Scope.TREE if tree else wire.Scope.COMMAND
        await self._tell(exec_id, wire.Signal(exec_id.encode(), signo, scope), (errno.ESRCH,))

    async def resize(self, exec_id: ExecId, size: PtySize) -> None:
        """Tell a pty its size; one whose command has ended is not an error."""
        await self._tell(exec_id, wire.Winsize(exec_id.encode(), size.rows, size.cols), (errno.ESRCH,))

    async def forget(self, *exec_ids: ExecId) -> None:
        """These outcomes are stored.  Raises: Conflict: one still runs."""
        payloads = [wire.encode_forget(exec_id.encode()) for exec_id in exec_ids]
        errors = await tell_all(self._link, wire.Kind.FORGET, payloads)
        for exec_id, error in zip(exec_ids, errors, strict=True):
            if error is not None and error.code != wire.ErrorCode.UNKNOWN_EXEC:
                raise exec_error(error, exec_id)

    async def _tell(self, exec_id: ExecId, message: wire.Message, harmless: tuple[int, ...]) -> None:
        answer = await call(self._link, message, wire.Ok)
        if not isinstance(answer, wire.Error):
            return
        known = answer.code != wire.ErrorCode.UNKNOWN_EXEC
        if not (known and answer.errno in harmless):
            raise exec_error(answer, exec_id)

    async def execs(self) -> tuple[ExecInfo, ...]:
        """All that run, and all ended ones not yet forgotten."""
        answer = await call(self._link, wire.ListExecs(), wire.Execs)
        if isinstance(answer, wire.Error):
            raise exec_error(answer, "*")
        try:
            return tuple(info_of(row) for row in answer.rows)
        except DsecError as wrong:
            self._link.fail(wrong)
            raise self._link.gone() from wrong

    async def shift(self, seconds: float) -> None:
        """Move every deadline later; does not wait for the answer."""
        if seconds < 0:
            raise BadRequest(f"seconds: {seconds} is negative")
        payload = outgoing(wire.Shift(round(seconds * 1000)))
        self._link.begin(Unheard(self._link), wire.Kind.SHIFT, payload)

    async def ping(self) -> None:
        """Wait until init has seen everything sent so far.  Raises: RuntimeUnavailable."""
        await call(self._link, wire.Ping(), wire.Pong)

    async def usage(self) -> GuestUsage:
        """What init counts.  Raises: RuntimeUnavailable."""
        answer = await call(self._link, wire.Usage(), wire.UsageIs)
        if isinstance(answer, wire.Error):
            raise exec_error(answer, "*")
        return GuestUsage(
            processes=answer.processes,
            execs=answer.execs,
            user=answer.user_us / 1e6,
            system=answer.system_us / 1e6,
        )

    async def close(self) -> None:
        """Drop the connection; commands go on. What was sent is sent, if init reads it within a second."""
        await self._link.finish(_CLOSE_SECONDS)

    async def __aenter__(self) -> GuestConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _started(followed: AttachedExec) -> AttachedExec:
    try:
        await followed.begun()
    except BaseException:
        followed.detach()
        raise
    return followed


def reach(
    where: str | Path | socket.socket, *, bounds: Bounds | None = None, seconds: float = CONNECT_SECONDS
) -> GuestConnection:
    """Connect to an init by the path of its socket, or over a connected socket (which is then owned here).

    Nothing is waited for: what is asked follows the greeting, and fails with the connection when init does not answer
    that within ``seconds``.

    Raises:
        RuntimeUnavailable: nobody listens there.
    """
    link = Link(asyncio.get_running_loop(), bounds or Bounds())
    link.attach(where if isinstance(where, socket.socket) else _connected(str(where)))
    link.greeting.hurry(seconds)
    link.write(wire.Hello().frame(0))
    return GuestConnection(link)


async def connect(
    where: str | Path | socket.socket, *, bounds: Bounds | None = None, seconds: float = CONNECT_SECONDS
) -> GuestConnection:
    """As :func:`reach`, and wait for init's answer.

    Raises:
        RuntimeUnavailable: nobody listens, or WELCOME did not come within ``seconds``.
    """
    guest = reach(where, bounds=bounds, seconds=seconds)
    try:
        await guest.greeted()
    except BaseException:
        await guest.close()
        raise
    return guest


def _connected(path: str) -> socket.socket:
    """A unix socket connects at once or not at all."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(path)
    except OSError as wrong:
        sock.close()
        raise RuntimeUnavailable(f"cannot connect to init: {wrong}", errno=wrong.errno) from wrong
    return sock
