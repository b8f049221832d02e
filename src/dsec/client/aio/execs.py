"""Commands in the background, and on a terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from dsec.client.aio_link import AsyncLink
from dsec.client.requests import SIGKILL, pty_size
from dsec.errors import BadRequest
from dsec.model.checks import check_count
from dsec.model.execs import Chunk, ExecResult
from dsec.model.ids import ExecId, SandboxId
from dsec.ports.engine import ExecSession


class AsyncExec:
    """A command in the background."""

    def __init__(self, link: AsyncLink, sandbox: SandboxId, session: ExecSession) -> None:
        self._link = link
        self._sandbox = sandbox
        self._session = session

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    @property
    def id(self) -> ExecId:
        """Its id, for :meth:`AsyncSandbox.attach`."""
        return self._session.id

    @property
    def pid(self) -> int:
        """Its process id inside the sandbox, 0 when it never started or has ended earlier."""
        return self._session.pid

    @property
    def output(self) -> AsyncIterator[Chunk]:
        """Output as it comes, until the command has ended. While this is iterated and not consumed, the command waits."""
        return self._link.iterate(self._session.output())

    async def wait(self) -> ExecResult:
        """How it ended, waited for.  Raises: UnknownOutcome: nobody knows. SandboxFailed: the sandbox died first."""
        return await self._link.call(self._session.wait())

    async def kill(self) -> None:
        """Kill its whole process tree. One that has ended is no error."""
        await self._link.call(self._session.signal(SIGKILL, tree=True))

    async def signal(self, signo: int) -> None:
        """Send it the signal ``signo``, its first process only. One that has ended is no error."""
        check_count("signo", signo, 0, 64)
        await self._link.call(self._session.signal(signo))

    async def send_stdin(self, data: bytes) -> None:
        """Send ``data`` to its standard input; waits while the command does not read.  Raises: Conflict: it was started without stdin=True, or that input was closed."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise BadRequest(f"data: {type(data).__name__} is not bytes", hint="text.encode()")
        await self._link.call(self._session.send(bytes(data)))

    async def close_stdin(self) -> None:
        """End of standard input."""
        await self._link.call(self._session.close_stdin())

    async def attach(self, *, stdout: int = 0, stderr: int = 0) -> AsyncExec:
        """The same command, followed anew with ``stdout`` and ``stderr`` bytes skipped.  Raises: NotFound: nothing is known of it any more."""
        work = self._link.services.execs.attach(self._sandbox, self.id, stdout=stdout, stderr=stderr)
        return AsyncExec(self._link, self._sandbox, await self._link.call(work))


class AsyncTerminal(AsyncExec):
    """A command on a terminal. Its output is one stream."""

    async def send(self, data: bytes) -> None:
        """Type ``data``."""
        await self.send_stdin(data)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell it a new size: ``rows`` and ``cols`` in characters, from 1 to 65,535."""
        await self._link.call(self._session.resize(pty_size(rows, cols)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
