"""Attending a command: its streams, its terminal and its signals are ours until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
import termios
import threading
import tty
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass
from typing import Final

from dsec.cli.codes import BROKEN_PIPE, SIGNALLED, TIMEOUT
from dsec.cli.output import STDERR, STDIN, STDOUT, complain, is_tty, write_all
from dsec.cli.session import Signals
from dsec.client.aio import AsyncExec, AsyncSandbox, AsyncTerminal
from dsec.errors import DsecError, FileMissing
from dsec.model.execs import ExecResult, Stream
from dsec.model.files import FileType

_PIECE: Final = 1 << 16
_INTERRUPTS: Final = 3  # a command that ignores this many is killed
_LAST: Final = 6  # signals of any kind until we leave, whatever still waits
_FDS: Final = {Stream.STDOUT: STDOUT, Stream.STDERR: STDERR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A command as it was asked for. ``tty`` and ``stdin``: whether it gets a terminal, and our standard input."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = ""
    user: str = ""
    timeout: float | None = None
    tty: bool = False
    stdin: bool = False


async def attend(sandbox: AsyncSandbox, asked: Asked, signals: Signals) -> int:
    """Run it; our exit code.  Raises: as :meth:`AsyncSandbox.start`."""
    if asked.tty:
        return await _on_terminal(sandbox, asked, signals)
    command = await sandbox.start(
        asked.argv,
        timeout=asked.timeout,
        env=asked.env,
        cwd=asked.cwd,
        user=asked.user,
        stdin=True if asked.stdin else None,
    )
    with signals.to(_Forward(command)):
        async with _feeding(command, asked.stdin):
            result = await _follow(command)
    return await told(sandbox, asked, result) if result else BROKEN_PIPE


async def _on_terminal(sandbox: AsyncSandbox, asked: Asked, signals: Signals) -> int:
    rows, cols = _size()
    env = {"TERM": os.environ.get("TERM") or "xterm-256color", **asked.env}
    terminal = await sandbox.terminal(
        asked.argv, rows=rows, cols=cols, timeout=asked.timeout, env=env, cwd=asked.cwd, user=asked.user
    )
    with signals.to(_Forward(terminal, terminal=True)), _resizing(terminal), _raw():
        async with _feeding(terminal, True):
            result = await _follow(terminal)
    return await told(sandbox, asked, result) if result else BROKEN_PIPE


async def _follow(command: AsyncExec) -> ExecResult | None:
    """Its output to ours, until it has ended; None: who read ours has gone, and it is killed."""
    try:
        async for chunk in command.output:
            await asyncio.to_thread(write_all, _FDS[chunk.stream], chunk.data)
    except BrokenPipeError:
        await command.kill()
        await command.wait()
        return None
    return await command.wait()


async def told(sandbox: AsyncSandbox, asked: Asked, result: ExecResult) -> int:
    """The exit code that a result means for us; what the code alone does not say goes to standard error."""
    if result.timed_out:
        complain(
            f"the command was ended: it ran longer than {asked.timeout or 0:g} s", "allow more with --timeout"
        )
        return TIMEOUT
    if result.oom:
        complain("a process was killed for memory", "--memory of `dsec run` and `dsec create` allows more")
    if result.start_errno:
        complain(*await _not_started(sandbox, asked, result.start_errno))
    return result.exit_code


async def _not_started(sandbox: AsyncSandbox, asked: Asked, number: int) -> tuple[str, str]:
    """Why there was no command: message and hint."""
    if number in (errno.ENOENT, errno.ENOTDIR) and asked.cwd and not await _is_directory(sandbox, asked):
        return (
            f"--workdir: there is no directory {asked.cwd} inside",
            "name one that is there, or make it first",
        )
    program = asked.argv[0]
    if number == errno.ENOENT:
        script = "; or, if it is a script, what its first line names is not there" if "/" in program else ""
        return f"there is no program {program} inside{script}", "`command -v NAME` inside shows what there is"
    return (
        f"{program} could not be started: {os.strerror(number)}",
        "`ls -la` inside shows what may be executed",
    )


async def _is_directory(sandbox: AsyncSandbox, asked: Asked) -> bool:
    """False only where it is certain."""
    try:
        return (await sandbox.files.stat(asked.cwd, user=asked.user)).type is FileType.DIRECTORY
    except FileMissing:
        return False
    except DsecError:
        return True


class _Forward:
    """Signals of ours to the command."""

    def __init__(self, command: AsyncExec, terminal: bool = False) -> None:
        self._command = command
        self._terminal = terminal
        self._interrupts = 0
        self._count = 0

    async def __call__(self, signo: int) -> None:
        self._interrupts += signo == signal.SIGINT
        self._count += 1
        if self._count >= _LAST and not self._terminal:
            os._exit(
                SIGNALLED + signo
            )  # whoever reads our output stalls; what is private is ended by its spawner
        if self._interrupts >= _INTERRUPTS:
            await self._command.kill()
        else:
            await self._command.signal(signo)


class Feeder:
    """A thread that reads a descriptor and hands every piece to the loop, one at a time: who is slow makes it wait.

    Args:
        send: takes a piece. end: is told that there is no more.
    """

    def __init__(
        self, fd: int, send: Callable[[bytes], Awaitable[None]], end: Callable[[], Awaitable[None]]
    ) -> None:
        self._fd = fd
        self._send = send
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="dsec-stdin", daemon=True)
        self._now: ThreadFuture[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    async def stop(self) -> None:
        """Read no more. Returns when the thread has ended."""
        self._stopped = True
        os.write(self._wake_write, b"x")
        if self._now is not None:
            self._now.cancel()
        await asyncio.to_thread(self._thread.join)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        with contextlib.suppress(DsecError, CancelledError):  # the command reads no more: neither do we
            while data := self._read():
                self._cross(self._send(data))
            if not self._stopped:
                self._cross(self._end())

    def _cross(self, work: Awaitable[None]) -> None:
        self._now = asyncio.run_coroutine_threadsafe(_awaited(work), self._loop)
        if self._stopped:
            self._now.cancel()
        self._now.result()

    def _read(self) -> bytes:
        """A piece; b"" at the end, or when stopped."""
        ready = select.poll()
        ready.register(self._wake_read, select.POLLIN)
        ready.register(self._fd, select.POLLIN)
        try:
            if any(fd == self._wake_read for fd, _ in ready.poll()):
                return b""
            return os.read(self._fd, _PIECE)
        except OSError:
            return b""  # closed, or a terminal that hung up


async def read_stdin() -> AsyncIterator[bytes]:
    """Our standard input, piece by piece."""
    pieces: asyncio.Queue[bytes] = asyncio.Queue(1)

    async def end() -> None:
        await pieces.put(b"")

    feeder = Feeder(STDIN, pieces.put, end)
    feeder.start()
    try:
        while piece := await pieces.get():
            yield piece
    finally:
        await feeder.stop()


async def _awaited(work: Awaitable[None]) -> None:
    await work


@contextlib.asynccontextmanager
async def _feeding(command: AsyncExec, wanted: bool) -> AsyncIterator[None]:
    """Meanwhile our standard input is the command's."""
    if not wanted:
        yield
        return
    feeder = Feeder(STDIN, command.send_stdin, command.close_stdin)
    feeder.start()
    try:
        yield
    finally:
        await feeder.stop()


def _size() -> tuple[int, int]:
    """Rows and columns of our terminal."""
    for fd in (STDOUT, STDIN, STDERR):
        with contextlib.suppress(OSError):
            rows, cols, _, _ = struct.unpack("4H", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
            if rows and cols:
                return rows, cols
    return 24, 80


@contextlib.contextmanager
def _resizing(terminal: AsyncTerminal) -> Iterator[None]:
    """Meanwhile the command's terminal has the size of ours."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def resize() -> None:
        with contextlib.suppress(DsecError):
            await terminal.resize(*_size())

    def changed() -> None:
        task = loop.create_task(resize())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Meanwhile our terminal passes every key on; it is put back however this ends."""
    if not is_tty(STDIN):
        yield
        return
    before = termios.tcgetattr(STDIN)
    try:
        tty.setraw(STDIN, termios.TCSADRAIN)
        yield
    finally:
        with contextlib.suppress(termios.error):  # it hung up: nothing is left to put back
            termios.tcsetattr(STDIN, termios.TCSADRAIN, before)
