"""One command, attached: its output within a window, its input within init's, and its end."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Final

from dsec.errors import BadRequest, Conflict, DsecError, ProtocolError, UnknownOutcome
from dsec.model.execs import Cause, Chunk, Command, ExecInfo, Exit, Stream
from dsec.model.ids import ExecId
from dsec.ports.guest import GuestExec
from dsec.runtimes.channel import Channel, unexpected
from dsec.runtimes.flow import Inlet, Outlet
from dsec.runtimes.guest_errors import exec_error
from dsec.runtimes.link import Link
from dsec.wire import guest as wire

_STREAMS: Final = {1: Stream.STDOUT, 2: Stream.STDERR}
_NOT_EXECUTABLE: Final = 126
_NOT_FOUND: Final = 127
_CAUSES: Final = (Cause.ITSELF, Cause.TIMEOUT, Cause.KILLED)
_KEPT_ENV: Final = 4096  # bytes
_DATA: Final = int(wire.Kind.DATA)
_CREDIT: Final = int(wire.Kind.CREDIT)
_STARTED: Final = int(wire.Kind.STARTED)
_EXIT: Final = int(wire.Kind.EXIT)
_WHOLE_SANDBOX: Final = len(_CAUSES)  # the reason that does not tell which of them it was


class Requests:
    """Makes the EXEC of commands. Variables and directory of the last one are kept encoded: most have the same."""

    __slots__ = ("_cwd", "_directory", "_env", "_packed")

    def __init__(self) -> None:
        self._directory, self._cwd = "", b""
        self._env: dict[str, str] = {}
        self._packed = wire.pack_strings(())

    def payload(self, command: Command, credit: int) -> bytes:
        """The payload of EXEC.  Raises: BadRequest."""
        if not command.argv:
            raise BadRequest("argv: is empty", hint="give a program and its arguments")
        pty, timeout = command.pty, command.timeout
        try:
            return wire.encode_exec(
                command.id.encode(),
                wire.pack_strings(command.argv),
                self._packed if command.env == self._env else self._pack(command.env),
                self._cwd if command.cwd == self._directory else self._change(command.cwd),
                (command.uid, command.gid, command.groups),
                (
                    (wire.ExecFlag.PTY if pty else 0)
                    | (wire.ExecFlag.STDIN if command.stdin else 0)
                    | (wire.ExecFlag.LATE if command.late else 0),
                    pty.rows if pty else 0,
                    pty.cols if pty else 0,
                    math.ceil(timeout * 1000) if timeout else 0,
                    command.keep,
                    command.open_files,
                    credit,
                ),
            )
        except UnicodeEncodeError as wrong:
            raise BadRequest(f"env or cwd: cannot be encoded: {wrong.reason}") from None
        except ProtocolError as wrong:
            raise BadRequest(f"exec: {wrong.message}") from None

    def _change(self, cwd: str) -> bytes:
        self._directory, self._cwd = cwd, os.fsencode(cwd)
        return self._cwd

    def _pack(self, env: Mapping[str, str]) -> wire.Packed:
        for name in env:
            if not name or "=" in name:
                raise BadRequest(f"env: {name!r} is not a name without '='")
        packed = wire.pack_strings([os.fsencode(f"{name}={value}") for name, value in env.items()])
        if packed.size <= _KEPT_ENV:
            self._env, self._packed = dict(env), packed
        return packed


def _outcome(how: int, code: int) -> tuple[int, int, int]:
    """Exit code, signal and start errno.  Raises: ProtocolError: not how a process ends."""
    if how == wire.How.EXITED and 0 <= code <= 255:
        return code, 0, 0
    if how == wire.How.SIGNALLED and 1 <= code <= 64:
        return 128 + code, code, 0
    if how == wire.How.NEVER_STARTED and 1 <= code <= 4095:
        return (_NOT_FOUND if code == errno.ENOENT else _NOT_EXECUTABLE), 0, code
    raise ProtocolError(f"a command cannot end with how {how} and code {code}", how=how, exit_code=code)


def _cause(reason: int, *, timed_out: bool) -> Cause:
    """Reason 3 does not tell which of the two ended the tree; its time does."""
    if reason < _WHOLE_SANDBOX:
        return _CAUSES[reason]
    return Cause.TIMEOUT if timed_out else Cause.KILLED


def exit_of(status: wire.ExitFields, timeout: float = 0.0) -> Exit:
    """How a command ended.  Raises: ProtocolError."""
    code, signal, start_errno = _outcome(status.how, status.code)
    wall = status.wall_ns / 1e9
    return Exit(
        code=code,
        signal=signal,
        start_errno=start_errno,
        cause=_cause(status.reason, timed_out=0 < timeout <= wall),
        whole_sandbox=status.reason == _WHOLE_SANDBOX,
        stdout_bytes=status.stdout_bytes,
        stderr_bytes=status.stderr_bytes,
        user=status.user_us / 1e6,
        system=status.system_us / 1e6,
        max_rss=status.max_rss_kib * 1024,
        wall=wall,
    )


def info_of(row: wire.ExecRow) -> ExecInfo:
    """One line of a list.  Raises: ProtocolError."""
    name = row.id.decode("ascii", "replace")
    if not name.isascii() or not name.isprintable():
        raise ProtocolError(f"exec id {row.id!r} is none of ours")
    ended = None
    if row.state == 1:
        code, signal, start_errno = _outcome(row.how, row.code)
        ended = Exit(
            code=code,
            signal=signal,
            start_errno=start_errno,
            cause=_cause(row.reason, timed_out=False),
            whole_sandbox=row.reason == len(_CAUSES),
            stdout_bytes=row.stdout_bytes,
            stderr_bytes=row.stderr_bytes,
        )
    return ExecInfo(id=ExecId(name), pid=row.pid, started_at=row.started_ns / 1e9, exit=ended)


class AttachedExec(GuestExec, Channel):
    """A channel with one exec on it."""

    def __init__(
        self,
        link: Link,
        exec_id: ExecId,
        *,
        window: int,
        fresh: bool,
        stdin: bool = True,
        timeout: float = 0.0,
    ) -> None:
        self.id = exec_id
        self.pid = 0
        self.has_begun = False  # a command that never started (no such program) begins too, with pid 0
        self._link = link
        self._fresh = fresh
        self._timeout = timeout
        self._inlet = Inlet(link, self, window)
        self._outlet = Outlet(link, self) if stdin else None
        self._at = [0, 0, 0]
        self._over = [False, False, False]
        self._exit: Exit | None = None
        self._failure: Callable[[], DsecError] | None = None
        self._awaited = False  # somebody waits for the start alone

    # from init

    def on_frame(self, frame: wire.Frame) -> None:
        kind = frame.kind
        if kind == _DATA:
            self._on_output(frame)
        elif kind == _STARTED and not self.has_begun and not frame.flags:
            self._on_started(*wire.unpack_started(frame.payload))
        elif kind == _EXIT and self.has_begun and not frame.flags:
            self._exit = exit_of(wire.unpack_exit(frame.payload), self._timeout)
            self._finish()
        elif kind == _CREDIT and self._outlet is not None and self.has_begun:
            self._outlet.grant(frame)
        else:
            self._on_message(frame, wire.decode_reply(frame))

    def _on_output(self, frame: wire.Frame) -> None:
        stream = frame.stream
        offset, data = wire.split_output(frame.payload)
        end = frame.flags & wire.END != 0
        if not self.has_begun or stream not in _STREAMS or self._over[stream]:
            raise unexpected(frame, f"for stream {stream}, which is not open")
        if offset != self._at[stream]:
            raise ProtocolError(
                f"output of stream {stream} goes on at {offset}, not at {self._at[stream]}",
                channel=frame.channel,
            )
        if data:
            self._inlet.check(frame, len(data))
            self._inlet.put(stream, offset, data)
            self._at[stream] = offset + len(data)
        elif not end:
            raise ProtocolError("init sent an empty DATA frame", channel=frame.channel)
        self._over[stream] = end

    def _on_message(self, frame: wire.Frame, message: wire.Message) -> None:
        if isinstance(message, wire.Error) and not self.has_begun:
            self.refused = True
            self._failure = partial(exec_error, message, self.id)
            self._finish()
        elif isinstance(message, wire.Error) and message.errno == errno.ECONNRESET:
            self._failure = self._replaced
            self._finish()
        else:
            raise unexpected(frame, "during an exec")

    def _on_started(self, pid: int, stdout: int, stderr: int) -> None:
        if self._fresh and (stdout or stderr):
            raise ProtocolError(f"exec {self.id} started as pid {pid} at an offset that is not 0")
        self.has_begun = True
        self.pid = pid
        self._at[1:] = (stdout, stderr)
        if self._awaited:
            self._inlet.arrived.notify()

    def on_lost(self, reason: DsecError) -> None:
        self._failure = self._unknown
        self._finish()

    def _finish(self) -> None:
        self._link.release(self)
        if self._outlet is not None:
            self._outlet.close()
        self._inlet.finish()

    def _unknown(self) -> DsecError:
        reason = self._link.gone()
        known = "was started" if self.has_begun else "was asked for"
        error = UnknownOutcome(
            f"exec {self.id} {known} and its outcome is not known: {reason.message}",
            hint="connect again and attach by id; if init itself ended, the outcome is lost",
            exec_id=self.id,
        )
        error.__cause__ = reason
        return error

    def _replaced(self) -> DsecError:
        return Conflict(f"exec {self.id} was attached elsewhere", exec_id=self.id)

    def _detached(self) -> DsecError:
        return Conflict(f"exec {self.id} was detached here", hint="attach to it again", exec_id=self.id)

    # GuestExec

    async def begun(self) -> None:
        """Wait for STARTED.  Raises: UnknownOutcome, Conflict: as :meth:`chunks`; what init said when it refused."""
        self._awaited = True
        while not self.has_begun:
            if self._failure is not None:
                raise self._failure()
            await self._inlet.arrived

    def chunks(self) -> AsyncIterator[Chunk]:
        """Output as it comes. Leaving early neither detaches nor discards: call one of them.

        Raises:
            UnknownOutcome: init was lost before the end. Conflict: detached, or attached elsewhere.
            Conflict, Busy, RuntimeUnavailable, NotFound: init refused it.
        """
        return _Chunks(self)

    async def next_chunk(self) -> Chunk | None:
        """The next piece of output, None at the end.  Raises: as :meth:`chunks`."""
        inlet = self._inlet
        while True:
            piece = inlet.pop()
            if piece is not None:
                return Chunk(_STREAMS[piece.stream], piece.offset, bytes(piece.data))
            if self._exit is not None:
                return None
            if self._failure is not None:
                raise self._failure()
            await inlet.arrived

    async def wait(self) -> Exit:
        """How it ended.  Raises: UnknownOutcome, Conflict: as :meth:`chunks`."""
        while self._exit is None:
            if self._failure is not None:
                raise self._failure()
            await self._inlet.arrived
        return self._exit

    @property
    def _ended(self) -> bool:
        return self._exit is not None or self._failure is not None

    def discard(self) -> None:
        """Consume and drop all further output."""
        self._inlet.drop()

    async def send(self, data: bytes) -> None:
        """Standard input.  Raises: Conflict: the command was started without it. RuntimeUnavailable."""
        if not self._ended:
            await self._input().send(data)

    async def close_stdin(self) -> None:
        """End of standard input.  Raises: as :meth:`send`."""
        if not self._ended:
            await self._input().send(b"", end=True)

    def _input(self) -> Outlet:
        if self._outlet is None:
            raise Conflict(f"exec {self.id} has no standard input", hint="start it with stdin=True")
        return self._outlet

    def detach(self) -> None:
        """Stop listening; the command goes on."""
        if self.number:
            self._link.abandon(self)
            self._failure = self._detached
            self._inlet.drop()
            self._finish()


class _Chunks(AsyncIterator[Chunk]):
    """The output of one command."""

    __slots__ = ("_of",)

    def __init__(self, of: AttachedExec) -> None:
        self._of = of

    async def __anext__(self) -> Chunk:
        chunk = await self._of.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk
