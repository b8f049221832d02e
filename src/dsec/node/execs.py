"""Commands: started, followed, listed, found again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from hashlib import sha256
from operator import attrgetter
from typing import Final

from dsec.errors import Busy, Conflict, NotFound, UnknownOutcome
from dsec.model.checks import check_count
from dsec.model.execs import Cause, Chunk, ExecInfo, ExecRequest, ExecResult, Exit, PtySize
from dsec.model.ids import ExecId, SandboxId, new_exec_id
from dsec.model.journal import Json, Phase, Record
from dsec.model.sandbox import State
from dsec.node.drafts import EXEC
from dsec.node.handles import Handle, Table, refusal
from dsec.node.output import Output
from dsec.node.policy import base_env, resolve
from dsec.node.run import Run
from dsec.node.runs import Runner
from dsec.ports.engine import ExecService, ExecSession
from dsec.ports.journal import Journal

MAX_RUNNING: Final = 1024  # commands at once in one sandbox
MAX_LISTED: Final = 1000
SHELF_RUNS: Final = 256
FOUND_PATIENCE: Final = 5.0  # seconds
SHELF_BYTES: Final = 64 << 20


class Shelf:
    """Ended background commands whose output can still be had: the latest, by number and by size."""

    def __init__(self) -> None:
        self._runs: OrderedDict[ExecId, Run] = OrderedDict()
        self._bytes = 0

    def put(self, run: Run) -> None:
        self._runs[run.id] = run
        self._bytes += run.output.kept
        while self._runs and (len(self._runs) > SHELF_RUNS or self._bytes > SHELF_BYTES):
            _, oldest = self._runs.popitem(last=False)
            self._bytes -= oldest.output.kept

    def find(self, sandbox: SandboxId, exec_id: ExecId) -> Run | None:
        run = self._runs.get(exec_id)
        return run if run is not None and run.handle.id == sandbox else None


class Session(ExecSession):
    """A run, followed from given offsets."""

    def __init__(self, run: Run, runner: Runner, table: Table, stdout: int = 0, stderr: int = 0) -> None:
        self._table = table
        self.id = run.id
        self.pid = run.followed.pid if run.followed is not None else 0
        self._run = run
        self._runner = runner
        self._offsets = (stdout, stderr)

    def output(self) -> AsyncIterator[Chunk]:
        output = self._run.output.read(*self._offsets)
        return self._thawed_output(output) if self._rests else output

    async def _thawed_output(self, output: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        await self._thawed()
        async for chunk in output:
            yield chunk

    @property
    def _rests(self) -> bool:
        """Its sandbox was frozen because nobody used it."""
        return self._run.handle.frozen and not self._run.over

    async def _thawed(self) -> None:
        """Using a command is using its sandbox."""
        if self._rests:
            await self._table.running(self._run.handle.id)

    async def wait(self) -> ExecResult:
        await self._thawed()
        return await self._runner.ended(self._run)

    async def signal(self, signo: int, *, tree: bool = False) -> None:
        check_count("signal", signo, 0, 64)
        await self._thawed()
        await self._runner.signal(self._run, signo, tree=tree)

    async def send(self, data: bytes) -> None:
        run = self._run
        if not run.request.stdin_open or run.followed is None:
            raise Conflict(f"{run.id} has no open standard input", hint="start it with stdin=True")
        if run.stdin_closed:
            raise Conflict(f"the standard input of {run.id} was closed")
        await self._thawed()
        run.fed = run.fed or sha256()
        run.fed.update(data)
        await run.followed.send(data)

    async def close_stdin(self) -> None:
        await self._thawed()
        if self._run.request.stdin_open and self._run.followed is not None:
            self._run.stdin_closed = True
            await self._run.followed.close_stdin()

    async def resize(self, size: PtySize) -> None:
        await self._thawed()
        await self._runner.resize(self._run, size)


class PastSession(ExecSession):
    """A command that ended earlier and of which the journal alone still tells."""

    def __init__(self, result: ExecResult, *, known: bool) -> None:
        self.id = result.id
        self.pid = 0
        self._result = result
        self._known = known

    async def output(self) -> AsyncIterator[Chunk]:
        for _ in ():
            yield _

    async def wait(self) -> ExecResult:
        if not self._known:
            raise UnknownOutcome(f"it is not known how {self.id} ended; the journal says why", exec=self.id)
        return self._result

    async def signal(self, signo: int, *, tree: bool = False) -> None:
        return None

    async def send(self, data: bytes) -> None:
        raise Conflict(f"{self.id} has ended")

    async def close_stdin(self) -> None:
        return None

    async def resize(self, size: PtySize) -> None:
        return None


class Execs(ExecService):
    """The commands of all sandboxes."""

    def __init__(self, table: Table, journal: Journal, runner: Runner) -> None:
        self._table = table
        self._journal = journal
        self._runner = runner
        self._shelf = Shelf()

    async def run(
        self, sandbox: SandboxId, request: ExecRequest, stdin: AsyncIterator[bytes] | None = None
    ) -> ExecResult:
        handle = self._table.find(sandbox)
        if handle is None or handle.remaking or handle.info.state is not State.RUNNING:
            handle = await self._table.running(sandbox)
        run = self._prepare(handle, request, stdin, late=True)
        return await self._runner.finished(run)

    async def start(self, sandbox: SandboxId, request: ExecRequest) -> ExecSession:
        run = self._prepare(await self._table.running(sandbox), request, None, late=False)
        run.started = asyncio.get_running_loop().create_future()
        self._keep(run)
        try:
            await asyncio.shield(run.started)
        except asyncio.CancelledError:
            self._runner.kill(run)  # its id was never told to anybody
            raise
        return Session(run, self._runner, self._table)

    def _prepare(
        self, handle: Handle, request: ExecRequest, stdin: AsyncIterator[bytes] | None, *, late: bool
    ) -> Run:
        if len(handle.runs) >= MAX_RUNNING:
            raise Busy(
                f"{handle.id} runs its maximum of {MAX_RUNNING} commands", hint="wait for one of them to end"
            )
        if stdin is not None and not request.stdin_open:
            request = replace(request, stdin_open=True)
        info = handle.info
        if not handle.env:
            handle.env = base_env(info, handle.place)
        command = resolve(info, handle.place, request, new_exec_id(), handle.env, late=late)
        return Run(command.id, handle, request, command, Output(info.spec.limits.output_bytes), stdin)

    def _keep(self, run: Run) -> None:
        """Launch it as one that can be found again after its end."""
        run.leaving = self._shelf.put  # before it leaves its sandbox: at every moment it is in one of the two
        self._runner.launch(run)

    def recover(self, handle: Handle, info: ExecInfo) -> None:
        """Follow a command that an earlier engine started."""
        request = ExecRequest(argv=(b"?",), stdin_open=True)
        run = Run(info.id, handle, request, None, Output(handle.info.spec.limits.output_bytes))
        run.started = asyncio.get_running_loop().create_future()
        self._keep(run)

    async def attach(
        self, sandbox: SandboxId, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0
    ) -> ExecSession:
        check_count("stdout", stdout, 0, 2**63 - 1)
        check_count("stderr", stderr, 0, 2**63 - 1)
        handle = self._table.find(sandbox)
        if handle is not None and handle.settling is not None:
            await asyncio.wait([handle.settling])
        run = handle.runs.get(exec_id) if handle is not None else None
        if run is None:
            run = self._shelf.find(sandbox, exec_id)
        if isinstance(run, Run):
            return Session(run, self._runner, self._table, stdout, stderr)
        records = await self._journal.latest(sandbox, EXEC, ref=exec_id, limit=2)
        past = self._past(sandbox, records).get(exec_id)
        if past is not None and handle is not None and handle.unsettled:
            raise refusal(
                handle.info
            )  # paused since an earlier engine: it cannot be reached before it is resumed
        if past is None or past.exit is None:
            raise NotFound(f"there is no command {exec_id} in {sandbox}", exec=exec_id)
        return PastSession(_past_result(past), known=past.exit.code >= 0)

    async def list(self, sandbox: SandboxId) -> tuple[ExecInfo, ...]:
        await self._table.info(sandbox)
        await self._found_again(sandbox)
        recent = await self._journal.latest(sandbox, EXEC, limit=2 * MAX_LISTED)
        still_open = await self._journal.unanswered(sandbox)  # they may have begun long before
        found = self._past(sandbox, [one for one in (*recent, *still_open) if one.act == EXEC])
        return tuple(found.values())[-MAX_LISTED:]

    async def _found_again(self, sandbox: SandboxId) -> None:
        """Of commands that an earlier engine started, the process is known when they are followed again."""
        handle = self._table.find(sandbox)
        runs = tuple(handle.runs.values()) if handle is not None else ()
        waits = [run.started for run in runs if isinstance(run, Run) and run.command is None and run.started]
        if waits:
            await asyncio.wait(waits, timeout=FOUND_PATIENCE)

    def _past(self, sandbox: SandboxId, records: Iterable[Record]) -> dict[ExecId, ExecInfo]:
        """The commands that these records tell of, oldest first."""
        found: dict[ExecId, ExecInfo] = {}
        for record in sorted(records, key=attrgetter("seq")):
            _collect(found, record)
        handle = self._table.find(sandbox)
        for run in tuple(handle.runs.values()) if handle is not None else ():
            if isinstance(run, Run) and run.followed is not None and run.id in found:
                seen = found[run.id]
                found[run.id] = ExecInfo(
                    id=run.id,
                    pid=run.followed.pid,
                    started_at=seen.started_at,
                    exit=seen.exit,
                    argv=seen.argv,
                )
        return found


def _collect(found: dict[ExecId, ExecInfo], record: Record) -> None:
    exec_id = ExecId(record.ref)
    if record.phase is Phase.INTENT:
        argv = record.payload.get("argv")
        words = tuple(str(word) for word in argv) if isinstance(argv, list) else ()
        found[exec_id] = ExecInfo(id=exec_id, pid=0, started_at=record.at, exit=None, argv=words)
    elif exec_id in found:
        seen = found[exec_id]
        found[exec_id] = ExecInfo(
            id=exec_id, pid=0, started_at=seen.started_at, exit=_past_exit(record), argv=seen.argv
        )


def _past_exit(record: Record) -> Exit:
    facts = record.payload
    cause = facts.get("cause")
    return Exit(
        code=_whole(facts.get("exit_code"), -1),
        signal=_whole(facts.get("signal"), 0),
        start_errno=_whole(facts.get("start_errno"), 0),
        cause=Cause(cause) if isinstance(cause, str) else Cause.ITSELF,
        stdout_bytes=_whole(facts.get("stdout_bytes"), 0),
        stderr_bytes=_whole(facts.get("stderr_bytes"), 0),
        wall=float(str(facts.get("duration", 0))),
    )


def _whole(value: Json, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _past_result(info: ExecInfo) -> ExecResult:
    exit_ = info.exit or Exit(code=-1)
    dropped = exit_.stdout_bytes + exit_.stderr_bytes
    return ExecResult(
        id=info.id,
        exit_code=exit_.code,
        stdout=b"",
        stderr=b"",
        start_errno=exit_.start_errno,
        signal=exit_.signal,
        timed_out=exit_.cause is Cause.TIMEOUT,
        truncated=dropped > 0,
        dropped=dropped,
        duration=exit_.wall,
    )
