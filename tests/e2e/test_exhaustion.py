"""Sandboxes that take all they can get: they alone suffer.

Every test has a *neighbour*, a sandbox of the same engine that must go on working while the greedy one is at it, and after
each the greedy one must be destroyed completely (the census counts). What a payload takes is judged from outside, by control
groups and by what this process and the machine have left.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import Dsec, Level, Limits, Settings
from dsec.client.sync import Sandbox
from dsec.errors import DsecError, QuotaExceeded, SandboxFailed

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(90)]

MIB = 2**20
SMALL = Limits(memory_mib=128, pids=64, disk_mib=32, open_files=128, output_bytes=MIB, cpu_millis=1000)
LEVELS = tuple(Level)


@pytest.fixture(scope="module")
def engine(image_store: Path) -> Iterator[Dsec]:
    with Dsec(settings=Settings(images=image_store, shelf=4, pool=0)) as opened:
        for level in LEVELS:
            held = [opened.sandboxes.create(level=level, limits=SMALL) for _ in range(3)]
            for sandbox in held:
                sandbox.exec("true")
                sandbox.destroy()
        yield opened


@pytest.fixture
def neighbour(engine: Dsec, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Works before, meanwhile and afterwards."""
    callspec = getattr(request.node, "callspec", None)
    level = callspec.params.get("level", Level.CONTAINER) if callspec else Level.CONTAINER
    with engine.sandboxes.create(level=level) as sandbox:
        works(sandbox)
        yield sandbox
        works(sandbox)


def works(sandbox: Sandbox) -> None:
    """It runs commands and keeps files."""
    content = os.urandom(100_000)
    sandbox.files.write("kept", content)
    assert sandbox.files.read("kept") == content
    assert sandbox.exec("echo $((6 * 7))", timeout=30).stdout == b"42\n"


def python(code: str) -> list[str]:
    return ["python3", "-I", "-c", code]


def resident() -> int:
    """This process, the engine in it included, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads_and_descriptors() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def machine_processes() -> int:
    return sum(entry.isdigit() for entry in os.listdir("/proc"))


class Peak:
    """The highest value of a figure while the block runs."""

    def __init__(self, figure: object) -> None:
        self._figure = figure
        self._done = threading.Event()
        self.value = 0
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.value = max(self.value, self._figure())  # type: ignore[operator]

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


# --- processes

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.mark.parametrize("level", LEVELS)
def test_a_fork_bomb_is_bounded_and_ended(engine: Dsec, neighbour: Sandbox, level: Level) -> None:
    before = machine_processes()
    with engine.sandboxes.create(level=level, limits=SMALL) as greedy, Peak(machine_processes) as peak:
        result = greedy.exec(python(FORK_BOMB), timeout=1.5)
        assert result.timed_out
        works(neighbour)
        assert greedy.exec("echo usable").stdout == b"usable\n"
    assert before + 20 < peak.value < before + SMALL.pids + 60, (
        "it must have forked, and not more than it may"
    )


ORPHANS = "n=0; while [ $n -lt 10000 ]; do ( : & ); n=$((n + 1)); done; echo done"


@pytest.mark.slow
def test_ten_thousand_orphans_are_reaped(engine: Dsec, neighbour: Sandbox) -> None:
    with engine.sandboxes.create(limits=SMALL) as greedy:
        assert greedy.exec(ORPHANS, timeout=60).text == "done\n"
        deadline = time.monotonic() + 10
        while greedy.metrics().pids > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert greedy.metrics().pids == 1, "init alone is left: no zombie"
        works(greedy)


DAEMON = """
import os, signal, time
for n in range(1, 65):
    try:
        signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "8642"])
        os._exit(0)
time.sleep(%s)
"""


def sleepers() -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == b"sleep\x008642\x00":
                count += 1
    return count


@pytest.mark.parametrize("level", LEVELS)
def test_a_timeout_ends_daemons_that_ignore_every_signal(
    engine: Dsec, neighbour: Sandbox, level: Level
) -> None:
    with engine.sandboxes.create(level=level) as greedy:
        with Peak(sleepers) as peak:
            result = greedy.exec(python(DAEMON % 60), timeout=1)
        assert result.timed_out
        assert peak.value == 8, "the daemons must have run"
        assert sleepers() == 0, "dead before the time-out is reported"
        works(greedy)


@pytest.mark.parametrize("level", LEVELS)
def test_destroy_ends_daemons_that_ignore_every_signal(
    engine: Dsec, neighbour: Sandbox, level: Level
) -> None:
    with engine.sandboxes.create(level=level) as greedy:
        greedy.exec(python(DAEMON % 0.2), timeout=20)
        assert sleepers() == 8
    assert sleepers() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_cpu_is_limited_for_all_processes_together(engine: Dsec, neighbour: Sandbox, level: Level) -> None:
    burn = "import os\nfor _ in range(4):\n  if os.fork() == 0: break\nwhile True: pass"
    used = {}
    for millis in (2000, 200):
        with engine.sandboxes.create(level=level, limits=Limits(cpu_millis=millis)) as greedy:
            assert greedy.exec(python(burn), timeout=1.5).timed_out
            used[millis] = greedy.metrics().cpu_seconds
            works(greedy)
    assert used[200] < 0.8, "a fifth of a CPU for a second and a half, and its own start"
    assert used[2000] > 1.5 * used[200] or used[2000] > 0.5, "the control must burn more"


# --- memory


@pytest.mark.parametrize("user", ["user", "root"])
def test_running_out_of_memory_is_said(engine: Dsec, neighbour: Sandbox, user: str) -> None:
    bomb = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    with engine.sandboxes.create(limits=SMALL) as greedy:
        result = greedy.exec(python(bomb), timeout=30, user=user)
        assert (result.oom, result.signal, result.timed_out) == (True, 9, False)
        assert greedy.metrics().oom_kills >= 1
        assert greedy.metrics().memory_peak_bytes <= SMALL.memory_mib * MIB
        assert greedy.exec("echo usable").stdout == b"usable\n"
        calm = greedy.exec("true")
        assert not calm.oom, "only what happened while it ran"


def test_many_small_hogs_are_one_sandbox(engine: Dsec, neighbour: Sandbox) -> None:
    bomb = "import os\nfor _ in range(3): os.fork()\nx = []\nwhile True: x.append(bytearray(1 << 18))"
    with engine.sandboxes.create(limits=SMALL) as greedy:
        with contextlib.suppress(SandboxFailed):
            assert greedy.exec(python(bomb), timeout=20).oom
        works(neighbour)
        with contextlib.suppress(SandboxFailed):
            assert greedy.exec("echo usable").stdout == b"usable\n"


def test_process_level_memory_ends_in_the_program(engine: Dsec) -> None:
    bomb = "x = []\ntry:\n  while True: x.append(bytearray(1 << 20))\nexcept MemoryError: n = len(x); x = 0; print(n)"
    with engine.sandboxes.create(level="process", limits=SMALL) as greedy:
        result = greedy.exec(python(bomb), timeout=30)
        assert result.oom or int(result.stdout) < SMALL.memory_mib
        assert greedy.exec("echo usable").stdout == b"usable\n"


def test_memory_of_files_in_memory_counts(engine: Dsec, neighbour: Sandbox) -> None:
    code = """
import os
fd = os.memfd_create("x")
print("start", flush=True)
while True: os.write(fd, bytes(1 << 20))
"""
    free = _available()
    with engine.sandboxes.create(limits=SMALL) as greedy, Peak(lambda: free - _available()) as peak:
        result = greedy.exec(python(code), timeout=30)
        assert b"start" in result.stdout
        assert result.oom
        assert greedy.exec("echo usable").stdout == b"usable\n"
    assert peak.value < 16 * SMALL.memory_mib * MIB


def _available() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) * 1024


# --- disk


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/dev/shm", "/home/user"])
def test_a_full_disk_is_the_sandboxs_own(engine: Dsec, neighbour: Sandbox, place: str) -> None:
    code = f"""
import errno, os
fd = os.open("{place}/fill", os.O_WRONLY | os.O_CREAT)
n = 0
try:
    while n < 1 << 30:
        n += os.write(fd, os.urandom(1 << 18))
    os.fsync(fd)
except OSError as error:
    print(errno.errorcode[error.errno], n)
"""
    with engine.sandboxes.create(limits=SMALL) as greedy:
        result = greedy.exec(python(code), timeout=60)
        name, written = result.text.split()
        assert name in ("EDQUOT", "ENOSPC")
        assert 8 * MIB < int(written) <= SMALL.disk_mib * MIB * 1.1
        works(neighbour)
        with pytest.raises(QuotaExceeded):
            greedy.files.write("more", bytes(8 * MIB))
        assert greedy.exec("echo usable").stdout == b"usable\n"
        greedy.files.remove(f"{place}/fill")


@pytest.mark.slow
def test_a_million_names_are_the_sandboxs_own(engine: Dsec, neighbour: Sandbox) -> None:
    code = """
import errno, os
n = 0
try:
    while n < 1_000_000:
        if n % 5000 == 0:
            os.mkdir("d%d" % n)
            top = "d%d/" % n
        os.symlink("y" * 1000, top + "x" * 200 + str(n))
        n += 1
except OSError as error:
    print(errno.errorcode[error.errno], n)
"""
    with engine.sandboxes.create(limits=Limits(disk_mib=16, memory_mib=512)) as greedy:
        result = greedy.exec(python(code), timeout=75)
        assert result.text.split()[0] in ("EDQUOT", "ENOSPC"), result.stderr
        works(neighbour)
        assert greedy.exec("echo usable").stdout == b"usable\n"


# --- descriptors


@pytest.mark.parametrize("level", LEVELS)
def test_descriptors_end_at_the_limit(engine: Dsec, neighbour: Sandbox, level: Level) -> None:
    code = """
import errno, os
n = 0
try:
    while True:
        os.dup(0)
        n += 1
except OSError as error:
    print(errno.errorcode[error.errno], n)
"""
    with engine.sandboxes.create(level=level, limits=SMALL) as greedy:
        name, count = greedy.exec(python(code)).text.split()
        assert name == "EMFILE"
        assert int(count) < SMALL.open_files
        works(greedy)


# --- output


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_flood_of_output_is_cut_and_the_engine_stays_small(
    engine: Dsec, neighbour: Sandbox, level: Level
) -> None:
    with engine.sandboxes.create(level=level, limits=SMALL) as greedy:
        greedy.exec("head -c 4M /dev/zero")
        before = resident()
        with Peak(resident) as peak:
            result = greedy.exec("head -c 1G /dev/zero", timeout=60)
        assert result.exit_code == 0
        assert result.truncated
        assert len(result.stdout) + result.dropped == 2**30
        assert len(result.stdout) == SMALL.output_bytes
        assert peak.value - before < 64 * MIB


def test_nobody_reads_a_flood(engine: Dsec, neighbour: Sandbox) -> None:
    """A stalled reader: the command waits, nothing grows, and killing it is at once."""
    with engine.sandboxes.create(limits=SMALL) as greedy:
        task = greedy.start("cat /dev/zero")
        next(iter(task.output))
        before = resident()
        with Peak(resident) as peak:
            time.sleep(1)
            works(greedy)
            works(neighbour)
        assert peak.value - before < 32 * MIB
        task.kill()
        assert task.wait().signal == 9


def test_a_flood_on_a_terminal(engine: Dsec, neighbour: Sandbox) -> None:
    with engine.sandboxes.create(limits=SMALL) as greedy, Peak(resident) as peak:
        before = resident()
        with greedy.terminal(["sh", "-c", "yes flood"]) as terminal:
            got = 0
            for chunk in terminal.output:
                got += len(chunk.data)
                if got > 4 * MIB:
                    break
            for _ in range(20):  # typed at a program that does not read
                terminal.send(b"x" * 1000)
            works(neighbour)
        works(greedy)
    assert peak.value - before < 48 * MIB


# --- many things at once


def test_a_hundred_greedy_commands_at_once(engine: Dsec, neighbour: Sandbox) -> None:
    with engine.sandboxes.create(limits=SMALL) as greedy:
        base = threads_and_descriptors()
        started = []
        code = ""
        while not code and len(started) < 2000:
            try:
                started.append(greedy.start("while :; do :; done"))
            except DsecError as error:
                code = error.code
        assert code in ("busy", "runtime_unavailable")
        assert started
        works(neighbour)
        assert threads_and_descriptors()[0] < base[0] + 40
    # destroyed with all of it running; the census does the rest


def test_destroy_while_everything_runs(engine: Dsec, neighbour: Sandbox) -> None:
    for load in (
        python(FORK_BOMB),
        "cat /dev/zero",
        "head -c 100M /dev/zero > /workspace/x",
        "yes > /dev/null",
    ):
        greedy = engine.sandboxes.create(limits=SMALL)
        greedy.start(load)
        time.sleep(0.05)
        greedy.destroy()
        works(neighbour)


FEW_FILES = """
import resource, sys, time
from pathlib import Path
from dsec import Dsec, Settings
from dsec.errors import Busy
with Dsec(settings=Settings(images=Path(sys.argv[1]), pool=0)) as d:
    held = [d.sandboxes.create(level=sys.argv[2])]
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    try:
        while len(held) < 100:
            held.append(d.sandboxes.create(level=sys.argv[2]))
    except Busy as error:
        print("BUSY", error.hint)
    print(held[-1].exec("echo works").text)
    held.pop().destroy()
    for tries in range(40, -1, -1):  # what it had is closed by the engine's loop, soon
        try:
            print(d.sandboxes.create(level=sys.argv[2]).exec("echo again").text)
            break
        except Busy as error:
            if not tries or not error.retryable:
                raise
            time.sleep(0.05)
"""


@pytest.mark.parametrize("level", LEVELS)
def test_an_engine_without_descriptors_says_so(image_store: Path, level: Level) -> None:
    words = [sys.executable, "-c", FEW_FILES, str(image_store), level]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("\n")
    assert said[0].startswith("BUSY"), done.stdout
    assert "ulimit -n" in said[0]
    assert said[1:4:2] == ["works", "again"]
