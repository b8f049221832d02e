"""Processes of ours are killed at every kind of moment; what was acknowledged is still true, and nothing is left behind.

The program that is killed is ``crash_child.py``: it prints what was acknowledged. A test kills, opens the home again and compares.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import pytest

from dsec import Dsec, Settings
from dsec.errors import Conflict, DsecError
from dsec.model.journal import Phase
from dsec.model.sandbox import SandboxInfo, State
from dsec.stores import schema
from dsec.stores.layers import BtrfsLayers
from dsec.wiring import verify_journal

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(60)]
LEVELS: Final = pytest.mark.parametrize("level", ["container", "process"])
# DSEC_TEST_CRASH=full: every victim at every level.
FULL: Final = os.environ.get("DSEC_TEST_CRASH") == "full"
KILLS: Final = pytest.mark.parametrize(
    ("victim", "level"),
    [(victim, level) for victim in ("engine", "spawner", "both") for level in ("container", "process")]
    if FULL
    else [("engine", "container"), ("spawner", "process"), ("both", "container")],
)
SOME: Final = pytest.mark.parametrize("level", ["container", "process"] if FULL else ["container"])
VICTIMS: Final = pytest.mark.parametrize("victim", ["engine", "spawner", "both"])
LINES: Final = "".join(f"line {n}\n" for n in range(1, 61))
DEAD: Final = (State.GONE, State.FAILED, State.LOST)
POOL_BYTES: Final = 256 * 2**20
Step = dict[str, Any]
T = TypeVar("T")


def settings(images: Path) -> Settings:
    return Settings(images=images, pool=0, pool_bytes=POOL_BYTES, shelf=2, wait=5)


def until(probe: Callable[[], T], what: str, seconds: float = 15.0) -> T:
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return found


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class Home:
    """A state directory, seen from outside."""

    def __init__(self, path: Path, images: Path, tag: str = "") -> None:
        self.path = path
        self.images = images
        self.tag = tag or "dsec-" + hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]

    def open(self) -> Dsec:
        return Dsec(self.path, settings=settings(self.images))

    def spawners(self) -> list[int]:
        """Not their helpers, which end with them."""
        state = b"--state\0" + os.fsencode(self.path) + b"/"
        found = [pid for pid in _pids() if state in _command(pid)]
        return [pid for pid in found if _name(pid) == "spawner"]

    def groups(self) -> list[Path]:
        return sorted(Path("/sys/fs/cgroup").glob(f"*/{self.tag}-*"))

    def processes(self) -> set[int]:
        """Of sandboxes; not what a spawner makes ahead, which ends with it."""
        found: set[int] = set()
        for group in self.groups():
            with suppress(OSError):  # it goes with its last sandbox
                slots = list(group.glob("s*/cgroup.procs"))
                for slot in slots:
                    with suppress(OSError):
                        found.update(map(int, slot.read_text().split()))
        return {pid for pid in found if _name(pid) not in ("dsec-zygote", "dsec-seed")}

    def inits(self) -> dict[str, int]:
        """Sandbox ids to the pid of their init, from the machine's own tables."""
        words = {pid: _command(pid).split(b"\0") for pid in self.processes()}
        return {
            argv[2].decode(): pid
            for pid, argv in words.items()
            if argv[:2] == [b"dsec-init", b"--id"] and not _is_forked(pid, words)
        }

    def traces(self) -> list[str]:
        """Everything on this machine that belongs to it, but for the directory itself."""
        places = [Path("/run/dsec", self.tag), Path("/var/lib/dsec-homes", self.tag)]
        left = [path for place in places for path in place.rglob("*")]
        return self.alive() + [str(path) for path in left if not path.is_dir() or path.name.startswith("sb-")]

    def alive(self) -> list[str]:
        """What the kernel holds of it."""
        found = list(map(str, self.groups()))
        found += [f"process {pid}" for pid in [*self.spawners(), *self.processes()]]
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            with suppress(OSError):
                found += [str(backing)] if str(self.path) in backing.read_text() else []
        return found

    def layers(self) -> tuple[str, ...]:
        async def read() -> tuple[str, ...]:
            layers = await BtrfsLayers.open(self.path, size_bytes=POOL_BYTES, durable=True)
            try:
                return await layers.list()
            finally:
                await layers.close()

        return anyio.run(read)

    def volumes(self) -> tuple[str, ...]:
        """Ids of those whose files are there."""

        async def read() -> tuple[str, ...]:
            layers = await BtrfsLayers.open(self.path, size_bytes=POOL_BYTES, durable=True)
            try:
                return await layers.volumes.list()
            finally:
                await layers.close()

        return anyio.run(read)


def _is_forked(pid: int, among: dict[int, list[bytes]]) -> bool:
    """Init's own helpers carry its command line: they are its children."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in among
    return True


class Child:
    """A running ``crash_child.py``."""

    def __init__(self, home: Path | None, images: Path, scenario: str, level: str, pool: int = 0) -> None:
        argv = [sys.executable, str(Path(__file__).with_name("crash_child.py"))]
        argv += [str(home or "-"), str(images), scenario, level, str(pool)]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._steps: list[Step] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):
                self._steps.append(json.loads(line))

    def steps(self, name: str) -> list[Step]:
        return [step for step in tuple(self._steps) if step["step"] == name]

    def ids(self, name: str = "created") -> list[str]:
        return [step["id"] for step in self.steps(name)]

    def wait_for(self, name: str, count: int = 1) -> Step:
        """The step of that name number ``count``."""

        def look() -> list[Step]:
            if self._process.poll() is not None and len(self.steps(name)) < count:
                raise AssertionError(f"it ended: {self._process.stderr.read()}")  # type: ignore[union-attr]
            return self.steps(name)[count - 1 :]

        return until(look, f"step {name!r} number {count}")[0]

    def end(self, signo: int = signal.SIGKILL) -> str:
        """Kill it, and hear all that it said; what it wrote to standard error."""
        if self._process.poll() is None:
            self._process.send_signal(signo)
        self._process.wait(30)
        self._reader.join(30)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with self._process.stdout, self._process.stderr:
            return self._process.stderr.read()


@pytest.fixture
def home(tmp_path: Path, image_store: Path) -> Iterator[Home]:
    """Empty again, and everywhere, when the test is over."""
    one = Home(tmp_path / "home", image_store)
    try:
        yield one
        if one.path.exists():
            _check_empty(one)
    finally:
        (one.path / "layers.img").unlink(missing_ok=True)  # big


def _check_empty(one: Home) -> None:
    with one.open() as dsec:
        for info in dsec.sandboxes.list():
            if info.state not in DEAD:
                dsec.sandboxes.get(info.id).destroy()
        assert dsec.problems() == ()
    until(lambda: not one.traces(), f"removal of {one.traces()}", 5)
    assert one.layers() == ()
    assert verify_journal(one.path) == ()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    found: list[Child] = []
    yield found
    for child in found:
        with suppress(ValueError):
            child.end()


@pytest.fixture
def start(home: Home, children: list[Child]) -> Callable[..., Child]:
    def go(scenario: str, level: str, pool: int = 0) -> Child:
        children.append(Child(home.path, home.images, scenario, level, pool))
        children[-1].wait_for("open")
        return children[-1]

    return go


def kill_spawners(home: Home) -> None:
    for pid in home.spawners():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def strike(victim: str, home: Home, child: Child, progress: str = "") -> None:
    """Kill. An engine that lost only its spawner must get on (two more steps named ``progress``) before it is killed too."""
    if victim == "engine":
        child.end()
        return
    os.kill(child.pid, signal.SIGSTOP if victim == "both" else 0)  # so that it cannot notice
    kill_spawners(home)
    if victim == "spawner" and progress:
        child.wait_for(progress, len(child.steps(progress)) + 2)
    child.end()


def live(dsec: Dsec) -> dict[str, SandboxInfo]:
    return {info.id: info for info in dsec.sandboxes.list() if info.state not in DEAD}


def check_consistent(home: Home, dsec: Dsec) -> dict[str, SandboxInfo]:
    """What is recorded as living runs, and nothing else; no command is left open that does not run."""
    found = live(dsec)
    assert {info.state for info in found.values()} <= {State.RUNNING, State.PAUSED}
    assert set(home.inits()) == set(found)
    assert dsec.problems() == ()
    return found


def outcomes(dsec: Dsec, sandbox: str, act: str = "exec") -> list[tuple[Phase, Any]]:
    events = dsec.sandboxes.get(sandbox).events()
    return [(one.phase, one.payload.get("outcome")) for one in events if one.act == act]


# Durable


@KILLS
def test_idle(home: Home, start: Callable[..., Child], level: str, victim: str) -> None:
    child = start("idle", level)
    sandbox = child.wait_for("created")["id"]
    strike(victim, home, child)
    with home.open() as dsec:
        assert set(check_consistent(home, dsec)) == {sandbox}
        again = dsec.sandboxes.get(sandbox)
        assert again.files.read("kept") == sandbox.encode()
        assert again.exec("cat kept").stdout == sandbox.encode()


@KILLS
def test_during_creates(home: Home, start: Callable[..., Child], level: str, victim: str) -> None:
    """Twice, so that the second engine begins with what the first left."""
    acknowledged: set[str] = set()
    for _ in range(2):
        child = start("creating", level)
        child.wait_for("created", 3)
        time.sleep(random.uniform(0, 0.02))
        strike(victim, home, child, "created")
        acknowledged.update(child.ids())
        refused = child.steps("refused")
        assert all(step["retryable"] for step in refused), refused
        assert len(refused) <= (victim == "spawner"), refused
    with home.open() as dsec:
        found = set(check_consistent(home, dsec))
        assert acknowledged <= found
        assert len(found - acknowledged) <= 2, "at most the ones whose acknowledgement was on its way"
        for sandbox in found:
            assert dsec.sandboxes.get(sandbox).exec("true").ok


@KILLS
def test_during_an_exec_with_output(home: Home, start: Callable[..., Child], level: str, victim: str) -> None:
    child = start("executing", level)
    started = child.wait_for("started")
    time.sleep(random.uniform(0.05, 0.3))
    strike(victim, home, child, "more")
    with home.open() as dsec:
        check_consistent(home, dsec)
        sandbox = dsec.sandboxes.get(started["id"])
        if victim == "spawner":  # the engine lived on, and saw it end
            ended = child.wait_for("ended")
            assert (ended["code"], ended["stdout"]) == (7, LINES)
        else:
            result = sandbox.attach(started["exec"]).wait()
            assert (result.exit_code, result.text) == (7, LINES)
        assert sandbox.files.read("ran") == b"ran\n"
        counted = len(child.steps("more"))
        more = sandbox.files.read("more").count(b"x") if counted else 0
        assert counted <= more <= counted + 1
        told = [one for one in sandbox.events() if one.ref == started["exec"]]
        assert [one.phase for one in told] == [Phase.INTENT, Phase.RESULT]
        assert told[1].payload["exit_code"] == 7
        assert told[1].payload["stdout"] == "sha256:" + hashlib.sha256(LINES.encode()).hexdigest()


@KILLS
def test_during_destroys(home: Home, start: Callable[..., Child], level: str, victim: str) -> None:
    child = start("destroying", level)
    child.wait_for("destroying", 2)
    time.sleep(random.uniform(0, 0.003))
    strike(victim, home, child)
    with home.open() as dsec:
        found = set(check_consistent(home, dsec))
        assert set(child.ids()) - set(child.ids("destroying")) <= found
        assert not found & set(child.ids("destroyed"))
        for sandbox in set(child.ids()) - found:
            assert dsec.sandboxes.get(sandbox).inspect().state is State.GONE


@KILLS
def test_during_pauses(home: Home, start: Callable[..., Child], level: str, victim: str) -> None:
    child = start("pausing", level)
    child.wait_for("paused", 2)
    time.sleep(random.uniform(0, 0.02))
    strike(victim, home, child, "paused")
    with home.open() as dsec:
        ((sandbox, info),) = check_consistent(home, dsec).items()
        again = dsec.sandboxes.get(sandbox)
        if info.state is State.PAUSED:
            with pytest.raises(Conflict):
                again.exec("true")
            again.resume()
        assert again.exec("echo runs").stdout == b"runs\n"


@KILLS
def test_while_paused(home: Home, start: Callable[..., Child], level: str, victim: str) -> None:
    child = start("paused", level)
    started = child.wait_for("started")
    strike(victim, home, child)
    with home.open() as dsec:
        (info,) = check_consistent(home, dsec).values()
        assert info.state is State.PAUSED
        sandbox = dsec.sandboxes.get(started["id"])
        sandbox.resume()
        result = sandbox.attach(started["exec"]).wait()
        assert (result.exit_code, result.text) == (7, LINES)


@VICTIMS
def test_during_a_scratch_exec(home: Home, start: Callable[..., Child], victim: str) -> None:
    child = start("scratch", "container")
    until(lambda: len(home.inits()) == 2, "the copy")
    time.sleep(random.uniform(0, 0.1))
    strike(victim, home, child)
    with home.open() as dsec:
        assert set(check_consistent(home, dsec)) == set(child.ids())


@VICTIMS
def test_during_snapshots_and_rollbacks(home: Home, start: Callable[..., Child], victim: str) -> None:
    child = start("snapshots", "container")
    child.wait_for("kept", 3)
    time.sleep(random.uniform(0, 0.03))
    strike(victim, home, child, "kept")
    with home.open() as dsec:
        living = check_consistent(home, dsec)
        if victim == "engine" and len(child.steps("rolling")) == len(child.steps("rolled")):
            assert set(living) == set(child.ids())
        removed, kept = (
            set(child.ids("removed")),
            {step["id"]: step["number"] for step in child.steps("kept")},
        )
        there = {info.id for info in dsec.snapshots.list()}
        last = child.steps("kept")[-1]["id"]
        assert last in there
        # Besides: one that was not told yet, and one whose removal was not.
        assert len(there - {last}) <= 2
        assert not there & removed
        for snapshot in there & kept.keys():
            with dsec.sandboxes.create(dsec.snapshots.get(snapshot)) as again:
                assert again.files.read("f") == b"%d" % kept[snapshot]
        for snapshot in there:
            dsec.snapshots.remove(snapshot)


@VICTIMS
def test_during_volumes(home: Home, start: Callable[..., Child], victim: str) -> None:
    child = start("volumes", "container")
    child.wait_for("gone", 2)
    time.sleep(random.uniform(0, 0.05))
    strike(victim, home, child, "wrote")
    made, gone = set(child.ids("made")), set(child.ids("gone"))
    with home.open() as dsec:
        living = set(check_consistent(home, dsec))
        there = {info.name: info for info in dsec.volumes.list()}
        assert not there.keys() & gone
        assert made - there.keys() <= set(child.ids("removing")), (
            "one was made, not removed, and is not there"
        )
        assert there.keys() - made <= set(child.ids("making")[-1:]), "it was made, and nobody was told"
        assert {info.writer for info in there.values() if info.writer} <= living
        for step in child.steps("wrote"):
            if step["id"] in there:
                _check_volume(dsec, step, living)
        for id in living:
            dsec.sandboxes.get(id).destroy()
        kept = {info.id for info in there.values()}
    assert set(home.volumes()) == kept, "files without a row, or a row without files"
    with home.open() as dsec:
        for name in there:
            dsec.volumes.remove(name)
    assert home.volumes() == ()


def _check_volume(dsec: Dsec, step: Step, living: set[str]) -> None:
    """What was written is there, and it is used by whom it was used, if that lives."""
    name, holder = step["id"], step["sandbox"]
    assert dsec.volumes.get(name).writer == (holder if holder in living else None)
    if holder in living:
        with pytest.raises(Conflict, match=holder):
            dsec.sandboxes.create(volumes=[f"{name}:/data"])
    with dsec.sandboxes.create(volumes=[f"{name}:/data:ro"]) as reader:
        assert reader.files.read("/data/f") == b"%d" % step["number"]


@VICTIMS
def test_during_forks(home: Home, start: Callable[..., Child], victim: str) -> None:
    child = start("forks", "container")
    child.wait_for("forked", 1)
    child.wait_for("forking", 2)
    time.sleep(random.uniform(0, 0.03))
    strike(victim, home, child)
    with home.open() as dsec:
        living = set(check_consistent(home, dsec))
        told = {id for step in child.steps("forked") for id in step["ids"]}
        assert told | set(child.ids()) <= living
        # At most one fork was whole and not told yet; of a fork that was cut off nothing is left.
        assert len(living - told - set(child.ids())) in (0, 3)
        for id in living:
            assert dsec.sandboxes.get(id).files.read("kept") == b"1"
        assert dsec.snapshots.list() == ()


@KILLS
def test_during_writes(home: Home, start: Callable[..., Child], level: str, victim: str) -> None:
    child = start("writing", level)
    child.wait_for("wrote", 3)
    time.sleep(random.uniform(0, 0.02))
    strike(victim, home, child, "wrote")
    with home.open() as dsec:
        (sandbox,) = check_consistent(home, dsec)
        again = dsec.sandboxes.get(sandbox)
        names = {entry.name for entry in again.files.list() if entry.name not in ("tmp", "home")}
        numbers = [step["number"] for step in child.steps("wrote")]
        assert {f"f{number}" for number in numbers} <= names
        assert names <= {f"f{number}" for number in [*numbers, len(numbers) + 1]}
        for name in names:
            whole = b"%d\n" % int(name[1:]) * 20_000
            content = again.files.read(name)
            # Not acknowledged: as far as it came.
            assert content == whole or (int(name[1:]) not in numbers and whole.startswith(content)), name
        assert {outcome for _, outcome in outcomes(dsec, sandbox, "files.write")} <= {
            None,
            "ok",
            "unknown_outcome",
        }


@LEVELS
def test_killed_init_is_reported(home: Home, level: str) -> None:
    with home.open() as dsec:
        sandbox = dsec.sandboxes.create(level=level)
        running = sandbox.start("sleep 600")
        os.kill(home.inits()[sandbox.id], signal.SIGKILL)
        until(lambda: sandbox.inspect().state is State.FAILED, "failed")
        assert sandbox.info.reason == "its init was killed by signal 9"
        with pytest.raises(DsecError, match="signal 9"):
            running.wait()
        until(lambda: not home.inits(), "removal")
        until(lambda: not home.processes(), "removal of its processes")
        assert dsec.problems() == ()
        assert [phase for phase, _ in outcomes(dsec, sandbox.id)] == [Phase.INTENT, Phase.RESULT]


@SOME
def test_init_killed_while_no_engine_runs_is_lost(
    home: Home, start: Callable[..., Child], level: str
) -> None:
    child = start("idle", level)
    sandbox = child.wait_for("created")["id"]
    child.end()
    os.kill(home.inits()[sandbox], signal.SIGKILL)
    until(lambda: not home.inits(), "its end")
    with home.open() as dsec:
        assert not check_consistent(home, dsec)
        info = dsec.sandboxes.get(sandbox).inspect()
        assert info.state is State.LOST
        assert "did not run" in info.reason


@SOME
@pytest.mark.parametrize("signo", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end(home: Home, start: Callable[..., Child], level: str, signo: int) -> None:
    child = start("executing", level)
    started = child.wait_for("started")
    child.end(signo)
    with home.open() as dsec:
        check_consistent(home, dsec)
        result = dsec.sandboxes.get(started["id"]).attach(started["exec"]).wait()
        assert (result.exit_code, result.text) == (7, LINES)


@SOME
def test_ttl_passes_while_no_engine_runs(home: Home, start: Callable[..., Child], level: str) -> None:
    child = start("ttl", level)
    sandbox = child.wait_for("created")["id"]
    child.end()
    assert home.inits()
    until(lambda: not home.inits(), "the spawner's own end of it")
    with home.open() as dsec:
        info = dsec.sandboxes.get(sandbox).inspect()
        assert (info.state, info.reason) == (State.GONE, "ttl")
        assert not check_consistent(home, dsec)


@LEVELS
def test_ttl_is_told_to_the_spawner_of_the_next_engine(
    home: Home, start: Callable[..., Child], level: str
) -> None:
    child = start("polling", level)
    step = child.wait_for("created")
    strike("both", home, child)
    with home.open() as dsec:
        assert set(check_consistent(home, dsec)) == {step["id"], step["other"]}
    until(lambda: set(home.inits()) == {step["id"]}, "the spawner's own end of it")
    with home.open() as dsec:
        assert dsec.sandboxes.get(step["other"]).inspect().reason == "ttl"


@LEVELS
def test_a_replaced_spawner_holds_deadlines_and_sees_deaths(
    home: Home, start: Callable[..., Child], level: str
) -> None:
    child = start("polling", level)
    step = child.wait_for("created")
    old = home.spawners()
    kill_spawners(home)
    until(lambda: len(set(home.spawners()) - set(old)) == 2, "new spawners, unasked")
    os.kill(home.inits()[step["id"]], signal.SIGKILL)
    until(lambda: any(one["one"] == "failed" for one in child.steps("state")), "the death of an adopted one")
    assert "nobody watched" in child.steps("state")[-1]["reason"]
    child.end()  # now the new spawner alone knows of the ttl
    until(lambda: not home.inits(), "its end by ttl")
    with home.open() as dsec:
        assert dsec.sandboxes.get(step["other"]).inspect().reason == "ttl"


@SOME
def test_death_between_two_spawners_is_noticed(home: Home, level: str) -> None:
    with home.open() as dsec:
        kept, lost = dsec.sandboxes.create(level=level), dsec.sandboxes.create(level=level)
        kept.exec("true")
        inits = home.inits()
        for pid in home.spawners():
            os.kill(pid, signal.SIGKILL)
        os.kill(inits[lost.id], signal.SIGKILL)
        until(lambda: lost.inspect().state is State.FAILED, "failed")
        assert kept.exec("echo on").stdout == b"on\n"


def test_one_owner(home: Home, start: Callable[..., Child]) -> None:
    start("idle", "process").wait_for("created")
    quick = replace(settings(home.images), wait=0.1)
    with pytest.raises(Conflict, match="in use") as caught:
        Dsec(home.path, settings=quick).open()
    assert "connect" in caught.value.hint


@SOME
def test_after_a_reboot(home: Home, start: Callable[..., Child], level: str) -> None:
    """As a reboot leaves it: no process, and records of another boot."""
    child = start("executing", level)
    started = child.wait_for("started")
    strike("both", home, child)
    for pid in home.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not home.processes(), "the end of everything")
    with closing(schema.connect(home.path / "journal" / schema.DATABASE)) as database, database:
        changed = database.execute("UPDATE chain SET boot = 'another', boot_at = 1 WHERE boot <> ''").rowcount
    assert changed == 1
    with home.open() as dsec:
        sandbox = dsec.sandboxes.get(started["id"])
        kept = level == "container"  # its files are in a layer of their own
        assert sandbox.inspect().state is (State.HIBERNATED if kept else State.LOST)
        assert outcomes(dsec, started["id"])[-1] == (Phase.RESULT, "unknown_outcome") or child.steps("ended")
        if kept:
            assert sandbox.exec(["echo", "awake"]).text == "awake\n"
        sandbox.destroy()
    assert home.layers() == ()


@KILLS
def test_ready_sandboxes(home: Home, start: Callable[..., Child], level: str, victim: str) -> None:
    child = start("idle", level, 3)
    child.wait_for("created")
    time.sleep(random.uniform(0, 0.05))
    strike(victim, home, child)
    with home.open() as dsec:
        assert set(check_consistent(home, dsec)) == set(child.ids())


# Private


def _private(child: Child) -> Home:
    """Where its state is: its spawner's command line tells."""

    def look() -> list[Path]:
        environ = [_command(pid).split(b"\0") for pid in _pids() if _parent(pid) == child.pid]
        return [Path(os.fsdecode(argv[4])).parent for argv in environ if b"--state" in argv]

    path = until(look, "its spawner")[0]
    return Home(path, path, path.name)


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@SOME
@pytest.mark.parametrize("scenario", ["idle", "creating", "executing"])
def test_private_engine_killed(image_store: Path, children: list[Child], level: str, scenario: str) -> None:
    child = Child(None, image_store, scenario, level, 2)
    children.append(child)
    child.wait_for("created")
    home = _private(child)
    assert home.inits()
    child.end()
    until(lambda: not home.alive(), "its end", 2)
    assert home.path.exists()
    Dsec(settings=settings(image_store)).open().close()
    assert not home.path.exists()
    assert not home.traces()


@LEVELS
def test_private_engine_and_spawner_killed_at_once(
    image_store: Path, children: list[Child], level: str
) -> None:
    child = Child(None, image_store, "idle", level, 2)
    children.append(child)
    child.wait_for("created")
    home = _private(child)
    strike("both", home, child)
    assert home.inits(), "else there is nothing to sweep"
    Dsec(settings=settings(image_store)).open().close()
    assert not home.path.exists()
    until(lambda: not home.traces(), f"removal of {home.traces()}", 2)


def test_private_engines_leave_each_other_alone(image_store: Path) -> None:
    with Dsec(settings=settings(image_store)) as first:
        sandbox = first.sandboxes.create()
        with Dsec(settings=settings(image_store)) as second:
            second.sandboxes.create().exec("true")
            assert sandbox.exec("echo here").stdout == b"here\n"
        assert sandbox.exec("echo still").stdout == b"still\n"


@SOME
def test_private_engine_interrupted(image_store: Path, children: list[Child], level: str) -> None:
    child = Child(None, image_store, "creating", level, 2)
    children.append(child)
    child.wait_for("created", 3)
    home = _private(child)
    complaint = child.end(signal.SIGINT)
    assert "KeyboardInterrupt" in complaint
    assert not home.path.exists()
    assert not home.traces()
