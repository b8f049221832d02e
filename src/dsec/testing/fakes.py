"""Back-ends in memory: they keep the contracts of the ports, and a test can order their failures."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from dsec.core.deadlines import Moment
from dsec.errors import (
    CleanupFailed,
    Conflict,
    FileIsDirectory,
    FileMissing,
    FileProblem,
    NotFound,
    RuntimeUnavailable,
    StorageFull,
    UnknownOutcome,
)
from dsec.model.execs import Cause, Chunk, Command, ExecInfo, Exit, PtySize, Stream
from dsec.model.files import (
    Change,
    Entry,
    FileEvent,
    FileType,
    Identity,
    Listing,
    MakeDir,
    Remove,
    Rename,
    Transfer,
    TreePiece,
    WriteOptions,
)
from dsec.model.ids import ExecId, SandboxId
from dsec.model.journal import Draft, Finding, Phase, Record
from dsec.model.paging import PAGE, Page, check_limit, check_place
from dsec.model.sandbox import Flag, Level, Metrics, SandboxInfo, State
from dsec.ports.guest import Guest, GuestExec, GuestFiles
from dsec.ports.journal import Journal, Receipt, Sandboxes, Standing, check_many
from dsec.ports.runtime import Ended, OnEnded, Plan, Running, Runtime
from dsec.ports.trees import Trees

SIGKILL: Final = 9


class HandClock:
    """Clocks that a test moves by hand."""

    def __init__(self, wall: float = 1_000_000.0, boot: float = 1000.0, boot_id: str = "boot-1") -> None:
        self.wall = wall
        self.boottime = boot
        self.boot_id = boot_id

    def now(self) -> Moment:
        return Moment(self.wall, self.boottime, self.boot_id)

    def boot(self) -> float:
        return self.boottime

    def advance(self, seconds: float) -> None:
        """Let time pass on both."""
        self.wall += seconds
        self.boottime += seconds


class MemoryStore(Journal, Sandboxes):
    """Journal and table in memory. ``full``: everything that would store raises StorageFull."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.full = False
        self._now = now
        self._chains: dict[str, list[Record]] = {}
        self._all: list[Record] = []
        self._rows: dict[SandboxId, SandboxInfo] = {}

    def _need_room(self) -> None:
        if self.full:
            raise StorageFull("the disk under the state directory is full", hint="make room")

    def _store(self, draft: Draft) -> Record:
        chain = self._chains.setdefault(draft.chain, [])
        before = chain[-1].digest if chain else ""
        record = Record(
            chain=draft.chain,
            seq=len(chain) + 1,
            at=self._now(),
            act=draft.act,
            phase=draft.phase,
            ref=draft.ref,
            actor=draft.actor,
            payload=dict(draft.payload),
            digest="",
        )
        record = replace(record, digest=_digest(before, record))
        chain.append(record)
        self._all.append(record)
        return record

    async def append(self, *drafts: Draft) -> tuple[Receipt, ...]:
        self._need_room()
        records = [self._store(draft) for draft in drafts]
        return tuple([Receipt(one.seq, one.at, one.digest) for one in records])

    async def read(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        return tuple(self._chains.get(chain, ())[after : after + limit])

    async def latest(
        self, chain: str, act: str, *, ref: str | None = None, limit: int = 1000
    ) -> tuple[Record, ...]:
        records = reversed(self._chains.get(chain, ()))
        return tuple(one for one in records if one.act == act and ref in (None, one.ref))[:limit]

    async def unanswered(self, chain: str) -> tuple[Record, ...]:
        last = {
            (one.act, one.ref): one
            for one in self._chains.get(chain, ())
            if one.ref and one.phase is not Phase.NOTE
        }
        found = [one for one in last.values() if one.phase is Phase.INTENT]
        return tuple(sorted(found, key=lambda one: one.seq))

    async def tail(self, after: int, limit: int = 1000) -> tuple[tuple[int, Record], ...]:
        return tuple(enumerate(self._all, 1))[max(after, 0) :][:limit]

    async def verify(self) -> tuple[Finding, ...]:
        found = []
        for name, chain in self._chains.items():
            before = ""
            for record in chain:
                if record.digest != _digest(before, record):
                    found.append(Finding(chain=name, seq=record.seq, problem="the digest does not fit"))
                    break
                before = record.digest
        return tuple(found)

    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        self._need_room()
        if info.id in self._rows:
            raise Conflict(f"{info.id} exists")
        self._rows[info.id] = info
        self._store(draft)

    async def add_many(self, infos: Sequence[SandboxInfo], drafts: Sequence[Draft]) -> None:
        self._need_room()
        check_many(infos, drafts)
        ids = {info.id for info in infos}
        if len(ids) < len(infos) or ids & self._rows.keys():
            raise Conflict("one of the ids exists")
        for info, draft in zip(infos, drafts, strict=True):
            await self.add(info, draft)

    async def move(
        self, sandbox: SandboxId, *, seen: State, to: State, draft: Draft, reason: str = ""
    ) -> SandboxInfo:
        self._need_room()
        row = await self.get(sandbox)
        if row.state is not seen:
            raise Conflict(f"{sandbox} is {row.state}, not {seen}")
        ended = row.ended_at or (self._now() if to in (State.GONE, State.FAILED, State.LOST) else 0.0)
        self._rows[sandbox] = replace(row, state=to, reason=reason or row.reason, ended_at=ended)
        self._store(draft)
        return self._rows[sandbox]

    async def expire_at(self, sandbox: SandboxId, at: float, draft: Draft) -> SandboxInfo:
        self._need_room()
        self._rows[sandbox] = replace(await self.get(sandbox), expires_at=at)
        self._store(draft)
        return self._rows[sandbox]

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        row = self._rows.get(sandbox)
        if row is None:
            raise NotFound(f"there is no sandbox {sandbox}")
        return row

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        rows = sorted(self._rows.values(), key=lambda row: row.created_at)
        return tuple(row for row in rows if not states or row.state in states)

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        check_limit(limit)
        wanted = states or [state for state in State if state is not State.GONE]
        rows = [
            (n, row)
            for n, row in enumerate(self._rows.values(), 1)
            if n > check_place(after) and row.state in wanted and project in ("", row.spec.project)
        ]
        last = str(rows[limit - 1][0]) if len(rows) > limit else ""
        return Page(items=tuple([row for _, row in rows[:limit]]), next=last)

    async def count(self, project: str = "") -> Mapping[State, int]:
        return Counter(row.state for row in self._rows.values() if project in ("", row.spec.project))

    async def expiring(self, before: float, limit: int = 1000) -> tuple[SandboxInfo, ...]:
        rows = [row for row in self._rows.values() if row.state.value in ("hibernated", "cold")]
        due = sorted((row for row in rows if 0 < row.expires_at < before), key=lambda row: row.expires_at)
        return tuple(due[:limit])

    async def standing(self) -> frozenset[Standing]:
        specs = [row.spec for row in self._rows.values() if row.state is not State.GONE]
        return frozenset(Standing(spec.level, spec.base_digest, spec.layers) for spec in specs)

    async def prune(self, keep: int = 10_000) -> int:
        ended = [row for row in self._rows.values() if row.state in (State.GONE, State.FAILED)]
        ended.sort(key=lambda row: (row.state is not State.GONE, row.ended_at))
        surplus = ended[: max(len(ended) - keep, 0)]
        for row in surplus:
            del self._rows[row.id]
        return len(surplus)


def _digest(before: str, record: Record) -> str:
    facts = [record.chain, record.seq, record.act, record.phase, record.ref, record.actor, record.payload]
    return hashlib.sha256((before + json.dumps(facts, sort_keys=True, default=str)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """What a command does: waits, says, ends. ``seconds`` may be infinite; ``echo``: standard input comes out again."""

    code: int = 0
    start_errno: int = 0
    signal: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    echo: bool = False
    oom: bool = False


Script = Callable[[Command], Scripted]


def ordinary(command: Command) -> Scripted:
    """`true`, `false`, `echo`, `env`, `sleep`, `cat`, `oom`; anything else is not found."""
    match [argument.decode("utf-8", "replace") for argument in command.argv]:
        case ["true"]:
            return Scripted()
        case ["false"]:
            return Scripted(code=1)
        case ["echo", *words]:
            return Scripted(stdout=" ".join(words).encode() + b"\n")
        case ["env"]:
            return Scripted(stdout="".join(f"{k}={v}\n" for k, v in command.env.items()).encode())
        case ["sleep", seconds]:
            return Scripted(seconds=float(seconds))
        case ["cat"]:
            return Scripted(echo=True)
        case ["oom"]:
            return Scripted(signal=SIGKILL, code=128 + SIGKILL, oom=True)
        case _:
            return Scripted(code=127, start_errno=errno.ENOENT)


class _Process:
    """A scripted command, attached or not."""

    def __init__(self, command: Command, pid: int, oom: Callable[[], None]) -> None:
        self.command = command
        self.pid = pid
        self.output = {Stream.STDOUT: bytearray(), Stream.STDERR: bytearray()}
        self.more = asyncio.Condition()
        self.exit: Exit | None = None
        self.lost: UnknownOutcome | None = None
        self.stdin: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.started_at = time.time()
        self.deadline = asyncio.get_running_loop().time() + command.timeout if command.timeout else None
        self._oom = oom
        self._killed = asyncio.Event()
        self._cause, self._signal = Cause.ITSELF, 0

    async def run(self, script: Script) -> None:
        started = time.monotonic()
        what = script(self.command)
        work = asyncio.ensure_future(self._act(what))
        killed = asyncio.ensure_future(self._killed.wait())
        while not work.done() and not killed.done():
            left = None if self.deadline is None else self.deadline - asyncio.get_running_loop().time()
            if left is not None and left <= 0:
                self._cause, self._signal = Cause.TIMEOUT, SIGKILL
                break
            await asyncio.wait({work, killed}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        ended = work.done()
        for task in (work, killed):
            task.cancel()
        if ended:
            code, signal = what.code, what.signal
        else:
            code, signal = 128 + self._signal, self._signal
        if what.oom and ended:
            self._oom()
        self.exit = Exit(
            code=code,
            signal=signal,
            start_errno=what.start_errno if ended else 0,
            cause=self._cause,
            stdout_bytes=len(self.output[Stream.STDOUT]),
            stderr_bytes=len(self.output[Stream.STDERR]),
            wall=time.monotonic() - started,
        )
        await self._changed()

    async def _act(self, what: Scripted) -> None:
        await self._say(Stream.STDOUT, what.stdout)
        await self._say(Stream.STDERR, what.stderr)
        if what.echo and self.command.stdin:
            while (piece := await self.stdin.get()) is not None:
                await self._say(Stream.STDOUT, piece)
        if what.seconds:
            await asyncio.sleep(min(what.seconds, 1e6))

    async def _say(self, stream: Stream, data: bytes) -> None:
        if data:
            self.output[stream] += data
            await self._changed()

    async def stir(self) -> None:
        """Let those who follow it look again."""
        await self._changed()

    async def _changed(self) -> None:
        async with self.more:
            self.more.notify_all()

    def kill(self, signo: int, *, tree: bool) -> None:
        if self.exit is None:
            self._signal = SIGKILL if tree else signo
            self._cause = Cause.KILLED if tree else Cause.ITSELF
            self._killed.set()

    async def lose(self) -> None:
        self.lost = UnknownOutcome("init was lost")
        await self._changed()


class FakeExec(GuestExec):
    """Listening to a scripted command over one connection."""

    def __init__(self, guest: FakeGuest, process: _Process, stdout: int, stderr: int) -> None:
        self.id = process.command.id
        self.pid = process.pid
        self._guest = guest
        self._process = process
        self._at = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        self._left = False
        self.has_begun = True

    async def begun(self) -> None:
        return None

    def _fresh(self) -> list[Chunk]:
        found = []
        for stream, data in self._process.output.items():
            at = self._at[stream]
            if len(data) > at:
                found.append(Chunk(stream, at, bytes(data[at:])))
                self._at[stream] = len(data)
        return found

    async def chunks(self) -> AsyncIterator[Chunk]:
        while True:
            for chunk in self._fresh():
                yield chunk
            if await self._over():
                return

    async def _over(self) -> bool:
        process = self._process
        async with process.more:
            await process.more.wait_for(self._news)
        self._check()
        return process.exit is not None and all(
            len(data) <= self._at[stream] for stream, data in process.output.items()
        )

    def _news(self) -> bool:
        process = self._process
        more = any(len(data) > self._at[stream] for stream, data in process.output.items())
        return more or self._left or process.exit is not None or process.lost is not None or self._guest.lost

    def _check(self) -> None:
        if self._left:
            raise Conflict("detached")
        if self._process.exit is None:
            if self._process.lost is not None:
                raise self._process.lost
            if self._guest.lost:
                raise UnknownOutcome("the connection was lost")

    async def wait(self) -> Exit:
        async with self._process.more:
            await self._process.more.wait_for(self._ended)
        self._check()
        assert self._process.exit is not None
        return self._process.exit

    def _ended(self) -> bool:
        process = self._process
        return self._left or process.exit is not None or process.lost is not None or self._guest.lost

    def discard(self) -> None:
        return None

    async def send(self, data: bytes) -> None:
        await self._process.stdin.put(data)

    async def close_stdin(self) -> None:
        await self._process.stdin.put(None)

    def detach(self) -> None:
        self._left = True
        self._guest.stir(self._process)


class FakeFiles(GuestFiles):
    """Files in a dictionary."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self._all = sandbox.files

    async def read(
        self, path: str, *, who: Identity, offset: int = 0, length: int = 2**63 - 1
    ) -> AsyncIterator[bytes]:
        content = self._need(path)
        if content is None:
            raise FileIsDirectory(f"{path} is a directory", path=path, errno=errno.EISDIR)
        data = content[offset : offset + length]
        for start in range(0, len(data), 1 << 18):
            yield data[start : start + (1 << 18)]

    def _need(self, path: str) -> bytes | None:
        if path.rstrip("/") not in self._all:
            raise FileMissing(f"{path}: no such file or directory", path=path, errno=errno.ENOENT)
        return self._all[path.rstrip("/")]

    async def write(
        self, path: str, content: AsyncIterator[bytes | memoryview], *, who: Identity, options: WriteOptions
    ) -> Entry:
        if options.exclusive and path in self._all:
            raise FileProblem(f"{path}: file exists", path=path, errno=errno.EEXIST)
        parent = path.rpartition("/")[0]
        if options.parents:
            await self.apply(MakeDir(parent, parents=True), who=who)
        elif parent:
            self._need(parent)
        data = b"".join([piece async for piece in content])
        old = self._all.get(path) or b""
        self._all[path] = old + data if options.append else data
        return self._entry(path)

    def _entry(self, path: str) -> Entry:
        content = self._need(path)
        return Entry(
            name=path.rpartition("/")[2],
            type=FileType.DIRECTORY if content is None else FileType.FILE,
            mode=0o644,
            size=len(content or b""),
            uid=1000,
            gid=1000,
            mtime_ns=0,
        )

    async def stat(self, path: str, *, who: Identity, follow: bool = True) -> Entry:
        return self._entry(path)

    async def list(self, path: str, *, who: Identity, limit: int = 100_000) -> Listing:
        self._need(path)
        below = path.rstrip("/") + "/"
        names = sorted(p for p in self._all if p.startswith(below) and "/" not in p[len(below) :])
        return Listing(tuple(map(self._entry, names[:limit])), len(names) > limit)

    async def apply(self, change: Change, *, who: Identity) -> None:
        match change:
            case MakeDir(path, _, parents):
                parts = path.strip("/").split("/")
                for depth in range(1 if parents else len(parts), len(parts) + 1):
                    self._all.setdefault("/" + "/".join(parts[:depth]), None)
            case Rename(source, target, _):
                self._need(source)
                moved = {p: p for p in self._all if p == source or p.startswith(source + "/")}
                for path in moved:
                    self._all[target + path[len(source) :]] = self._all.pop(path)
            case Remove(path, _):
                self._need(path)
                for gone in [p for p in self._all if p == path or p.startswith(path + "/")]:
                    del self._all[gone]
            case _:
                raise FileProblem("the fake cannot do that")

    async def watch(
        self, path: str, *, who: Identity, recursive: bool = False
    ) -> AsyncGenerator[FileEvent, None]:
        return self._events()

    async def _events(self) -> AsyncGenerator[FileEvent, None]:
        nothing: tuple[FileEvent, ...] = ()
        for event in nothing:
            yield event

    async def tree(
        self, path: str, *, who: Identity, max_bytes: int = 2**40, max_entries: int = 1_000_000
    ) -> AsyncIterator[TreePiece]:
        nothing: tuple[TreePiece, ...] = ()
        for piece in nothing:
            yield piece


class FakeGuest(Guest):
    """One connection to a fake sandbox."""

    def __init__(self, sandbox: FakeSandbox, script: Script) -> None:
        self._sandbox = sandbox
        self._script = script
        self._lost = False
        self._files = FakeFiles(sandbox)
        self.shifted = 0.0

    @property
    def lost(self) -> bool:
        return self._lost or self._sandbox.dead

    @property
    def files(self) -> GuestFiles:
        if self.lost:
            raise RuntimeUnavailable("the guest is gone")
        return self._files

    async def post(self, command: Command) -> GuestExec:
        if self.lost:
            raise RuntimeUnavailable("the guest is gone")
        if command.id in self._sandbox.used:
            raise Conflict(f"{command.id} was used before")
        self._sandbox.used.add(command.id)
        process = _Process(command, len(self._sandbox.used) + 1, self._sandbox.count_oom)
        self._sandbox.processes[command.id] = process
        self._sandbox.start(process.run(self._script))
        return FakeExec(self, process, 0, 0)

    def stir(self, process: _Process) -> None:
        """Let those who follow it look again."""
        self._sandbox.start(process.stir())

    async def attach(self, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0) -> GuestExec:
        return FakeExec(self, self._process(exec_id), stdout, stderr)

    def _process(self, exec_id: ExecId) -> _Process:
        if self.lost:
            raise RuntimeUnavailable("the guest is gone")
        process = self._sandbox.processes.get(exec_id)
        if process is None:
            raise NotFound(f"no command {exec_id}")
        return process

    async def signal(self, exec_id: ExecId, signo: int, *, tree: bool = False) -> None:
        self._process(exec_id).kill(signo, tree=tree)

    async def resize(self, exec_id: ExecId, size: PtySize) -> None:
        self._process(exec_id)

    async def forget(self, *exec_ids: ExecId) -> None:
        for exec_id in exec_ids:
            self._sandbox.processes.pop(exec_id, None)

    async def execs(self) -> tuple[ExecInfo, ...]:
        return tuple(
            ExecInfo(id=exec_id, pid=process.pid, started_at=process.started_at, exit=process.exit)
            for exec_id, process in self._sandbox.processes.items()
        )

    async def shift(self, seconds: float) -> None:
        self.shifted += seconds
        for process in self._sandbox.processes.values():
            if process.deadline is not None:
                process.deadline += seconds

    async def ping(self) -> None:
        if self.lost:
            raise RuntimeUnavailable("the guest is gone")
        if self._sandbox.mute:
            await asyncio.Event().wait()

    async def close(self) -> None:
        await self.cut()

    async def cut(self) -> None:
        """Lose the connection, as a test orders or as a newer one does."""
        self._lost = True
        for process in tuple(self._sandbox.processes.values()):
            async with process.more:
                process.more.notify_all()


@dataclass(slots=True, eq=False)
class FakeSandbox:
    """What a fake runtime holds of one sandbox. ``mute``: its init runs, and answers nothing."""

    plan: Plan
    pid: int
    frozen: bool = False
    dead: bool = False
    mute: bool = False
    oom_kills: int = 0
    files: dict[str, bytes | None] = field(default_factory=lambda: {"": None, "/workspace": None})
    used: set[ExecId] = field(default_factory=set)
    processes: dict[ExecId, _Process] = field(default_factory=dict)
    guests: list[FakeGuest] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def count_oom(self) -> None:
        self.oom_kills += 1

    def start(self, job: object) -> None:
        task = asyncio.ensure_future(job)  # type: ignore[call-overload]  # a coroutine of _Process.run
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def end(self) -> None:
        """Everything in it dies."""
        self.dead = True
        for process in tuple(self.processes.values()):
            await process.lose()
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class FakeRuntime(Runtime):
    """A level in memory.

    Attributes:
        broken: ``create`` raises RuntimeUnavailable. undead: ``destroy`` of these raises CleanupFailed.
        stuck: ``create`` waits until it is set (None = does not wait). unfreezable: ``freeze`` raises.
        parked: files of those that do not run.
        created, destroyed: calls so far.
        listening: ports on which every sandbox listens. dialled: the other ends of connections to them, which the test closes.
        deaf: connections wait until it is set (None = do not wait).
    """

    def __init__(
        self,
        script: Script = ordinary,
        *,
        level: Level = Level.CONTAINER,
        flags: frozenset[Flag] | None = None,
        on_ended: OnEnded | None = None,
    ) -> None:
        self.level = level
        some = {Flag.USERS, Flag.PAUSE, Flag.PTY, Flag.MEMORY_LIMIT, Flag.PID_NAMESPACE, Flag.HIBERNATE}
        self.flags = frozenset(some) if flags is None else flags
        self.script = script
        self.on_ended = on_ended
        self.sandboxes: dict[SandboxId, FakeSandbox] = {}
        self.broken = False
        self.unfreezable = False
        self.undead: set[SandboxId] = set()
        self.stuck: asyncio.Event | None = None
        self.deadlines: dict[SandboxId, float] = {}
        self.parked: dict[SandboxId, dict[str, bytes | None]] = {}
        self.created = 0
        self.destroyed = 0
        self.listening: set[int] = set()
        self.dialled: list[socket.socket] = []
        self.deaf: asyncio.Event | None = None

    async def create(self, plan: Plan) -> Running:
        self.created += 1
        if self.stuck is not None:
            await self.stuck.wait()
        if self.broken:
            raise RuntimeUnavailable("it was ordered to fail")
        self.sandboxes[plan.id] = made = FakeSandbox(plan, pid=1000 + self.created)
        if plan.parked:
            made.files = self.parked.pop(plan.id)
        self.deadlines[plan.id] = plan.deadline
        return Running(id=plan.id, pid=1000 + self.created, started=self.created)

    async def destroy(self, sandbox: SandboxId) -> None:
        self.destroyed += 1
        if sandbox in self.undead:
            raise CleanupFailed(f"{sandbox} was ordered not to go")
        found = self.sandboxes.pop(sandbox, None)
        self.deadlines.pop(sandbox, None)
        self.parked.pop(sandbox, None)
        if found is not None:
            await found.end()

    async def park(self, sandbox: SandboxId) -> None:
        if sandbox in self.undead:
            raise CleanupFailed(f"{sandbox} was ordered not to go")
        found = self.sandboxes.pop(sandbox, None)
        self.deadlines.pop(sandbox, None)
        if found is not None:
            self.parked[sandbox] = found.files
            await found.end()

    def keeps(self, sandbox: SandboxId) -> bool:
        return sandbox in self.sandboxes or sandbox in self.parked

    async def list(self) -> tuple[Running, ...]:
        return tuple(
            Running(id=sandbox, pid=found.pid, started=found.pid)
            for sandbox, found in self.sandboxes.items()
            if not found.dead
        )

    def _need(self, sandbox: SandboxId) -> FakeSandbox:
        found = self.sandboxes.get(sandbox)
        if found is None or found.dead:
            raise NotFound(f"{sandbox} does not run here")
        return found

    async def freeze(self, sandbox: SandboxId, frozen: bool) -> None:
        if self.unfreezable and frozen:
            raise RuntimeUnavailable("it was ordered not to freeze")
        self._need(sandbox).frozen = frozen

    async def deadline(self, sandbox: SandboxId, at: float) -> None:
        self._need(sandbox)
        self.deadlines[sandbox] = at

    async def connect(self, sandbox: SandboxId) -> Guest:
        found = self._need(sandbox)
        for older in found.guests:
            await older.cut()
        found.guests = [FakeGuest(found, self.script)]
        return found.guests[0]

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        return Metrics(oom_kills=self._need(sandbox).oom_kills, pids=1)

    def memory(self, sandbox: SandboxId) -> int:
        self._need(sandbox)
        return -1

    async def dial(self, sandbox: SandboxId, port: int, timeout: float) -> socket.socket:
        del timeout
        self._need(sandbox)
        await asyncio.sleep(0)
        if self.deaf is not None:
            await self.deaf.wait()
        if port not in self.listening:
            raise Conflict(f"nothing listens on port {port} of {sandbox}")
        ours, theirs = socket.socketpair()
        self.dialled.append(theirs)
        return ours

    async def die(self, sandbox: SandboxId, reason: str = "init exited with 1", *, oom: bool = False) -> None:
        """Its init ends by itself, and the runtime says so."""
        await self._need(sandbox).end()
        if self.on_ended is not None:
            self.on_ended(Ended(id=sandbox, reason=reason, oom=oom))


class NoTrees(Trees):
    """Moves single files only."""

    async def upload(self, files: GuestFiles, local: Path, path: str, *, who: Identity) -> Transfer:
        data = await asyncio.to_thread(local.read_bytes)

        async def content() -> AsyncIterator[bytes]:
            yield data

        await files.write(path, content(), who=who, options=WriteOptions())
        return Transfer(entries=1, bytes=len(data))

    async def download(self, files: GuestFiles, path: str, local: Path, *, who: Identity) -> Transfer:
        data = b"".join([piece async for piece in files.read(path, who=who)])
        await asyncio.to_thread(local.write_bytes, data)
        return Transfer(entries=1, bytes=len(data))

    async def unpack(
        self, files: GuestFiles, archive: AsyncIterator[bytes], path: str, *, who: Identity
    ) -> Transfer:
        return Transfer(bytes=sum([len(piece) async for piece in archive]))

    async def pack(self, files: GuestFiles, path: str, *, who: Identity) -> AsyncIterator[bytes]:
        async for piece in files.read(path, who=who):
            yield piece
