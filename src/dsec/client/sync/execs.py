"""Commands in the background, and on a terminal. Generated from `aio/execs.py` by `scripts/sync_client.py`: do not edit."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from dsec.client.requests import SIGKILL, pty_size
from dsec.client.sync_link import Link
from dsec.errors import BadRequest
from dsec.model.checks import check_count
from dsec.model.execs import Chunk, ExecResult
from dsec.model.ids import ExecId, SandboxId
from dsec.ports.engine import ExecSession


class Exec:
    """A command in the background."""

    def __init__(self, link: Link, sandbox: SandboxId, session: ExecSession) -> None:
        self._link = link
        self._sandbox = sandbox
        self._session = session

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    @property
    def id(self) -> ExecId:
        """Its id, for :meth:`Sandbox.attach`."""
        return self._session.id

    @property
    def pid(self) -> int:
        """Its process id inside the sandbox, 0 when it never started or has ended earlier."""
        return self._session.pid

    @property
    def output(self) -> Iterator[Chunk]:
        """Output as it comes, until the command has ended. While this is iterated and not consumed, the command waits."""
        return self._link.iterate(self._session.output())

    def wait(self) -> ExecResult:
        """How it ended, waited for.  Raises: UnknownOutcome: nobody knows. SandboxFailed: the sandbox died first."""
        return self._link.call(self._session.wait())

    def kill(self) -> None:
        """Kill its whole process tree. One that has ended is no error."""
        self._link.call(self._session.signal(SIGKILL, tree=True))

    def signal(self, signo: int) -> None:
        """Send it the signal ``signo``, its first process only. One that has ended is no error."""
        check_count("signo", signo, 0, 64)
        self._link.call(self._session.signal(signo))

    def send_stdin(self, data: bytes) -> None:
        """Send ``data`` to its standard input; waits while the command does not read.  Raises: Conflict: it was started without stdin=True, or that input was closed."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise BadRequest(f"data: {type(data).__name__} is not bytes", hint="text.encode()")
        self._link.call(self._session.send(bytes(data)))

    def close_stdin(self) -> None:
        """End of standard input."""
        self._link.call(self._session.close_stdin())

    def attach(self, *, stdout: int = 0, stderr: int = 0) -> Exec:
        """The same command, followed anew with ``stdout`` and ``stderr`` bytes skipped.  Raises: NotFound: nothing is known of it any more."""
        work = self._link.services.execs.attach(self._sandbox, self.id, stdout=stdout, stderr=stderr)
        return Exec(self._link, self._sandbox, self._link.call(work))


class Terminal(Exec):
    """A command on a terminal. Its output is one stream."""

    def send(self, data: bytes) -> None:
        """Type ``data``."""
        self.send_stdin(data)

    def resize(self, rows: int, cols: int) -> None:
        """Tell it a new size: ``rows`` and ``cols`` in characters, from 1 to 65,535."""
        self._link.call(self._session.resize(pty_size(rows, cols)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
