"""One sandbox: its commands, its life, and what is known of it. Generated from `aio/sandbox.py` by `scripts/sync_client.py`: do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from dsec.client.requests import (
    NEVER_HAD,
    Argv,
    Content,
    content_of,
    each,
    exec_request,
    fed_at_start,
    killed,
    kind_of,
    pty_size,
)
from dsec.client.sync.execs import Exec, Terminal
from dsec.client.sync.files import Files
from dsec.client.sync_link import Link
from dsec.model.checks import check_count, check_text
from dsec.model.execs import ExecInfo, ExecResult
from dsec.model.ids import SandboxId, parse_exec_id, parse_snapshot_id
from dsec.model.journal import Json, Record
from dsec.model.sandbox import Flag, Metrics, SandboxInfo
from dsec.model.snapshots import MOST_CHILDREN, SnapshotInfo, SnapshotKind
from dsec.model.tenants import NewKey


class Sandbox:
    """One sandbox. Leaving its ``with`` destroys it."""

    def __init__(self, link: Link, info: SandboxInfo) -> None:
        self._link = link
        self._info = info
        self.files = Files(link, info.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    @property
    def id(self) -> SandboxId:
        """Its id."""
        return self._info.id

    @property
    def info(self) -> SandboxInfo:
        """What was known of it at the last act that told; :meth:`inspect` asks."""
        return self._info

    @property
    def flags(self) -> frozenset[Flag]:
        """What its level guarantees here."""
        return self._info.flags

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    # Commands

    def exec(
        self,
        command: Argv,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: Content | None = None,
        scratch: bool = False,
    ) -> ExecResult:
        """Run a command to its end. How it ended is the result, whatever that is: only our own failures raise.

        When this call is cancelled, the command's process tree is killed.

        Args:
            command: program and arguments, or one string for a shell.
            timeout: seconds until its whole process tree is ended; then ``timed_out`` is set. None = none.
            env: added to the sandbox's variables.
            cwd: relative to the sandbox's working directory. user: "root" where the level has users, "" = the ordinary one.
            stdin: bytes, a binary file or an iterator of bytes.
            scratch: in a throw-away copy of the sandbox.

        Raises:
            BadRequest, TooLarge, Unsupported: an argument.
            NotFound, Conflict, SandboxFailed: the sandbox does not run.
            Busy: it runs its maximum of commands.
            RuntimeUnavailable: the command was never reached. UnknownOutcome: it was, and its end is unknown.
        """
        source = None if stdin is None else content_of(stdin, "stdin")
        whole = source if isinstance(source, bytes) else None
        request = exec_request(
            command, env=env, cwd=cwd, user=user, timeout=timeout, stdin=whole, scratch=scratch
        )
        pieces = None if isinstance(source, bytes) else source
        return self._link.call(self._link.services.execs.run(self._info.id, request, pieces))

    def start(
        self,
        command: Argv,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bytes | bool | None = None,
    ) -> Exec:
        """Start a command in the background; it goes on whether or not anybody waits, and its result is recorded.

        What is not told here is as for :meth:`exec`.

        Args:
            stdin: all of standard input, or True to send it piece by piece.

        Raises:
            BadRequest, NotFound, Conflict, SandboxFailed, Busy, RuntimeUnavailable: as :meth:`exec`.
        """
        whole, more = fed_at_start(stdin)
        request = exec_request(
            command, env=env, cwd=cwd, user=user, timeout=timeout, stdin=whole, stdin_open=more
        )
        return self._link.make(
            self._link.services.execs.start(self._info.id, request),
            lambda session: Exec(self._link, self._info.id, session),
            killed,
        )

    def attach(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> Exec:
        """Follow a command, also one that an earlier engine started.

        Args:
            exec_id: its id.
            stdout, stderr: bytes of that stream to skip, counted from its start. What is no longer kept shows as a gap in the offsets.

        Raises:
            NotFound: there is no such command in this sandbox.
            Conflict: it is paused, and an earlier engine started the command.
        """
        work = self._link.services.execs.attach(
            self._info.id, parse_exec_id(exec_id), stdout=stdout, stderr=stderr
        )
        return Exec(self._link, self._info.id, self._link.call(work))

    def execs(self) -> tuple[ExecInfo, ...]:
        """Its latest thousand commands, oldest first, also those of an earlier engine."""
        return self._link.call(self._link.services.execs.list(self._info.id))

    def terminal(
        self,
        command: Argv = ("/bin/sh",),
        *,
        rows: int = 24,
        cols: int = 80,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
    ) -> Terminal:
        """Start a command on a terminal. As a context manager its tree is killed at the end.

        What is not told here is as for :meth:`exec`.

        Args:
            rows, cols: the terminal's size in characters.

        Raises:
            BadRequest, NotFound, Conflict, SandboxFailed, Busy, RuntimeUnavailable: as :meth:`exec`.
            Unsupported: this level has no terminals.
        """
        request = exec_request(
            command,
            env=env,
            cwd=cwd,
            user=user,
            timeout=timeout,
            stdin_open=True,
            pty=pty_size(rows, cols),
        )
        return self._link.make(
            self._link.services.execs.start(self._info.id, request),
            lambda session: Terminal(self._link, self._info.id, session),
            killed,
        )

    # Life

    def pause(self) -> SandboxInfo:
        """Stop all its processes. Twice is no error.  Raises: Unsupported: this level cannot. NotFound, Conflict, SandboxFailed: it does not run."""
        return self._told(self._link.call(self._link.services.sandboxes.pause(self._info.id)))

    def resume(self) -> SandboxInfo:
        """Let its processes go on; time-outs of commands did not run meanwhile. One that is dormant is woken.  Raises: Unsupported, NotFound, Conflict, SandboxFailed: as :meth:`pause`."""
        return self._told(self._link.call(self._link.services.sandboxes.resume(self._info.id)))

    def hibernate(self) -> SandboxInfo:
        """Keep its files, its id and its session, and nothing else: every process ends. Its next act wakes it. Twice is no error.

        Raises: Unsupported: its level keeps no files without a sandbox. NotFound, Conflict, SandboxFailed.
        """
        return self._told(self._link.call(self._link.services.sandboxes.hibernate(self._info.id)))

    def extend(self, ttl: float) -> SandboxInfo:
        """Let it live ``ttl`` seconds from now, 0 = without end.  Raises: NotFound, Conflict, SandboxFailed: it does not run."""
        return self._told(self._link.call(self._link.services.sandboxes.extend(self._info.id, ttl)))

    def snapshot(self, kind: SnapshotKind | str = SnapshotKind.FILES) -> SnapshotInfo:
        """Keep its files as they are now; it stands still for a few milliseconds. When this returns, the snapshot is whole.

        Args:
            kind: what is kept: "files".

        Raises:
            Unsupported: its level has no snapshots, or not of that kind. BadRequest: the kind.
            StorageFull: there is no room. NotFound, Conflict, SandboxFailed: it does not run.
        """
        work = self._link.services.snapshots.take(self._info.id, kind_of(kind))
        return self._link.call(work)

    def fork(self, count: int = 1, *, kind: SnapshotKind | str = SnapshotKind.FILES) -> list[Sandbox]:
        """Make sandboxes whose files begin as this one's are now: all of them, or none. They share what none of them changes.

        Processes are not copied. Each has its own id and SESSION_ID, and this one's limits, variables and time to live, counted anew; its volumes
        are read-only.

        Args:
            count: how many, at most 1,000.
            kind: what they begin with: "files".

        Raises:
            BadRequest, Unsupported: the count; its level has no snapshots.
            Busy, StorageFull, RuntimeUnavailable: not all could be made; none is left.
            NotFound, Conflict, SandboxFailed: it does not run.
        """
        kind_of(kind)
        check_count("count", count, 1, MOST_CHILDREN)
        sandboxes = self._link.services.sandboxes
        made = self._link.make(
            self._link.services.snapshots.fork(self._info.id, count),
            lambda fork: fork.children,
            lambda fork: each(fork.children, lambda child: sandboxes.destroy(child, reason=NEVER_HAD)),
        )
        return [Sandbox(self._link, self._link.call(sandboxes.get(child))) for child in made]

    def rollback(self, snapshot: SnapshotInfo | str) -> SandboxInfo:
        """Make its files those of a snapshot again. All its processes end first: commands that ran end with UnknownOutcome.

        Args:
            snapshot: one of this sandbox, or of another of the same level and base; or its id.

        Raises:
            NotFound, BadRequest: the snapshot. Conflict: it is of another level or base; the sandbox is paused or does not run.
            Unsupported: its level has no snapshots.
        """
        chosen = snapshot.id if isinstance(snapshot, SnapshotInfo) else parse_snapshot_id(snapshot)
        return self._told(self._link.call(self._link.services.snapshots.rollback(self._info.id, chosen)))

    def destroy(self, reason: str = "asked") -> None:
        """End it and remove everything. Twice is no error.

        Args:
            reason: kept in its record.

        Raises:
            CleanupFailed: something is left; it is recorded and will be retried.
        """
        check_text("reason", reason)
        self._link.call(self._link.services.sandboxes.destroy(self._info.id, reason=reason))

    def wait(self) -> SandboxInfo:
        """Wait until it has ended, however long that takes; the result says why."""
        return self._told(self._link.call(self._link.services.observe.wait(self._info.id)))

    # Looking

    def inspect(self) -> SandboxInfo:
        """What is known of it now, also when it has ended."""
        return self._told(self._link.call(self._link.services.sandboxes.get(self._info.id)))

    def metrics(self) -> Metrics:
        """Figures now.  Raises: NotFound, Conflict, SandboxFailed: it does not run."""
        return self._link.call(self._link.services.observe.metrics(self._info.id))

    def events(self, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        """Its records in the journal with a number above ``after``, the first ``limit`` of them (at most 10,000). Also when it has ended."""
        return self._link.call(self._link.services.observe.events(self._info.id, after=after, limit=limit))

    def decide(self, decision: Mapping[str, Json]) -> Record:
        """Keep in its journal what whoever acts in it is about to do, and why, beside what is done then. It need not run, and is not woken.

        Args:
            decision: an object of JSON of your own, at most 32 KiB: a plan, a tool that was chosen, what was not, ids of a trace.

        Raises:
            BadRequest: it is no JSON, or empty. TooLarge. NotFound, SandboxFailed: it has ended.
        """
        return self._link.call(self._link.services.observe.decide(self._info.id, decision))

    def token(self, *, ttl: float = 0.0) -> NewKey:
        """A key that is good for this sandbox alone and ends with it: for whoever acts in it, or asks its ports. It is shown this once.

        Args:
            ttl: seconds for which it is good, 0 = as long as the sandbox is there.

        Raises:
            Conflict: it has as many as it may have. NotFound, SandboxFailed: it has ended. Unsupported: the engine has no keys.
        """
        return self._link.call(self._link.services.tenants.token(self._info.id, ttl=ttl))

    def _told(self, info: SandboxInfo) -> SandboxInfo:
        self._info = info
        return info
