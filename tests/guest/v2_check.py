"""Level `container` on control groups of version 2 alone. Run as root by `scripts/v2_guest.py` in a guest of its own.

Prints one line a check, then `v2: N passed, M failed`. Whatever a limit or a state is, it is judged from outside the sandbox: in
the cgroup's own files. A limit that holds has a control: the same program with a higher limit gets through.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec import Dsec, Limits, Settings
from dsec.client.sync import Sandbox
from dsec.errors import IsolationUnavailable
from dsec.model.sandbox import Flag
from dsec.testing import census

CGROUPS = Path("/sys/fs/cgroup")
AHEAD = ("", "spawner", "dsec-zygote", "dsec-seed")
SETTINGS = Settings(pool_bytes=512 * 2**20, shelf=1, pool=0)
EAT = "b = bytearray(200 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nprint(len(b))"
FORK = """
import os, time
made = 0
try:
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(60); os._exit(0)
        made += 1
except OSError:
    pass
print(made, flush=True)
os.kill(0, 9)
"""


def comm(pid: str) -> str:
    """What a process is called; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def processes(path: Path) -> list[str]:
    """Of a sandbox, not what its spawner makes ahead."""
    return [pid for pid in (path / "cgroup.procs").read_text().split() if comm(pid) not in AHEAD]


def group(level: str = "container") -> Path:
    """The cgroup of the one sandbox of this level that runs."""
    found = [path for path in CGROUPS.glob(f"dsec-*-{level}/s*") if processes(path)]
    assert len(found) == 1, f"cgroups in use: {found}"
    return found[0]


def keyed(path: Path, key: str) -> int:
    """One number of a file of `key number` lines."""
    return int(dict(line.split() for line in path.read_text().splitlines())[key])


@contextmanager
def sandbox(engine: Dsec, **limits: int) -> Iterator[Sandbox]:
    """One with these limits, destroyed at the end, after which its cgroup holds nothing."""
    with engine.sandboxes.create(limits=Limits(**limits)) as made:
        where = group()
        yield made
    assert not processes(where), f"{where} still has processes"


def lifecycle(engine: Dsec) -> None:
    with sandbox(engine) as made:
        done = made.exec(["/bin/sh", "-c", "id -u; echo x > f; cat f; cat /proc/self/cgroup; exit 3"])
        assert (done.exit_code, done.text) == (3, "1000\nx\n0::/\n"), done
        assert made.exec(["/usr/bin/python3", "-c", "print(6 * 7)"]).text == "42\n"


def flags(engine: Dsec) -> None:
    with sandbox(engine) as made:
        missing = {
            Flag.MEMORY_LIMIT,
            Flag.PIDS_LIMIT,
            Flag.CPU_LIMIT,
            Flag.PAUSE,
            Flag.DISK_QUOTA,
        } - made.flags
        assert not missing, f"missing: {missing}"


def limits_written(engine: Dsec) -> None:
    with sandbox(engine, memory_mib=100, pids=20, cpu_millis=250):
        found = {name: (group() / name).read_text().strip() for name in ("memory.max", "cpu.max", "pids.max")}
        assert found["memory.max"] == str(100 << 20), found
        assert found["cpu.max"] == "25000 100000", found
        assert 20 <= int(found["pids.max"]) <= 24, found  # init, and what it needs for itself


def memory(engine: Dsec) -> None:
    with sandbox(engine, memory_mib=64) as made:
        first = (group() / "cgroup.procs").read_text().split()[0]
        done = made.exec(["/usr/bin/python3", "-c", EAT])
        assert done.oom, done
        assert done.signal == 9, done
        assert keyed(group() / "memory.events", "oom_kill") >= 1
        assert first in (group() / "cgroup.procs").read_text().split(), "init was killed"
        assert made.exec(["/bin/true"]).ok
        assert not made.exec(["/bin/true"]).oom, "an earlier OOM is told again"
    with sandbox(engine, memory_mib=400) as made:
        done = made.exec(["/usr/bin/python3", "-c", EAT])
        assert done.ok, done
        assert not done.oom, done


def least_killable(engine: Dsec) -> None:
    """Init and the monitor that waits after a command fall to the memory killer last; what they start does not."""

    def score(pid: str) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with sandbox(engine) as made:
        first = processes(group())[0]
        for _ in range(3):
            told = made.exec(["/bin/cat", "/proc/self/oom_score_adj"])
            monitors = [pid for pid in processes(group()) if comm(pid) == "monitor"]
            assert monitors, "none waits for the next command"
            assert {score(pid) for pid in monitors} == {score(first)}, "a monitor kept what it lent"
            assert int(told.text) > score(first), told


def pids(engine: Dsec) -> None:
    with sandbox(engine, pids=16) as made:
        done = made.exec(["/usr/bin/python3", "-c", FORK])
        assert 1 <= int(done.text) < 16, done
        assert keyed(group() / "pids.events", "max") >= 1
        assert made.exec(["/bin/true"]).ok
    with sandbox(engine, pids=100) as made:
        assert made.exec(["/usr/bin/python3", "-c", FORK]).text == "40\n"


def share(engine: Dsec, millis: int) -> float:
    """CPU time by wall time of a busy loop."""
    with sandbox(engine, cpu_millis=millis) as made:
        made.start(["/bin/sh", "-c", "while :; do :; done"])
        time.sleep(1)
        begun, used = time.monotonic(), keyed(group() / "cpu.stat", "usage_usec")
        time.sleep(4)
        return (keyed(group() / "cpu.stat", "usage_usec") - used) / 1e6 / (time.monotonic() - begun)


def cpu(engine: Dsec) -> None:
    limited, free = share(engine, 200), share(engine, 1000)
    assert limited < 0.35, f"{limited:.2f} of a CPU where 0.20 are allowed"
    assert free > 0.5, f"the control had {free:.2f} of a CPU only"


def freeze(engine: Dsec) -> None:
    with sandbox(engine) as made:
        made.start(["/bin/sh", "-c", "while :; do :; done"])
        where = group()
        for paused in (False, True, False):
            if paused:
                made.pause()
            elif keyed(where / "cgroup.events", "frozen"):
                made.resume()
            assert keyed(where / "cgroup.events", "frozen") == paused
            used = keyed(where / "cpu.stat", "usage_usec")
            time.sleep(1)
            ran = keyed(where / "cpu.stat", "usage_usec") - used
            assert (ran < 20_000) is paused, f"{ran} µs of CPU while paused is {paused}"
        assert made.exec(["/bin/true"]).ok


def destroy_paused(engine: Dsec) -> None:
    with sandbox(engine) as made:
        made.start(["/bin/sh", "-c", "while :; do :; done"])
        made.pause()


def metrics(engine: Dsec) -> None:
    with sandbox(engine, memory_mib=400) as made:
        made.exec(["/usr/bin/python3", "-c", EAT])
        found = made.metrics()
        assert 0 < found.memory_bytes < 200 << 20, found
        assert found.memory_peak_bytes == int((group() / "memory.peak").read_text()) >= 200 << 20, found
        assert found.pids == int((group() / "pids.current").read_text()) >= 1, found
        assert found.cpu_seconds > 0, found
        assert found.oom_kills == 0, found
        assert found.disk_bytes >= 0, found


def quota(engine: Dsec) -> None:
    write = ["/bin/sh", "-c", "head -c 64M /dev/zero > f && sync f"]
    with sandbox(engine, disk_mib=16) as made:
        assert not made.exec(write).ok
        assert made.exec(["/bin/true"]).ok
    with sandbox(engine, disk_mib=128) as made:
        assert made.exec(write).ok


def recycled(engine: Dsec) -> None:
    """The figures of a sandbox never hold those of one that had the cgroup before."""
    with sandbox(engine, memory_mib=64) as made:
        made.exec(["/usr/bin/python3", "-c", EAT])
        before = made.metrics()
        assert before.oom_kills >= 1, before
    with sandbox(engine, memory_mib=64) as made:
        found = made.metrics()
        assert found.oom_kills == 0, found
        assert found.cpu_seconds < before.cpu_seconds, (found, before)


def inside(engine: Dsec) -> None:
    """What is made in another way on older kernels: the overlay, /dev, the image and the writable layer."""
    volume = Path("/disk/tmp/volume")
    volume.mkdir()
    volume.chmod(0o777)
    shm = "import multiprocessing as m; l = m.Lock(); l.acquire(); print(open('/dev/urandom', 'rb').read(1) and 'shm')"
    with engine.sandboxes.create(read_only=True, volumes=[f"{volume}:/mnt/v"]) as made:
        script = "echo x >/dev/null && echo 1 >/mnt/v/f && echo 2 >/workspace/f && ls -A /sys/class/net 2>/dev/null; ls /proc/self/fd"
        assert made.exec(["/bin/sh", "-c", script]).ok
        assert not made.exec(["/bin/sh", "-c", "echo x > /usr/f"], user="root").ok, "the root can be written"
        assert made.exec(["/usr/bin/python3", "-c", shm]).text == "shm\n"
        mounts = made.exec(["/bin/cat", "/proc/self/mountinfo"]).text
        kinds = {
            line.partition(" - ")[2].split()[0] for line in mounts.splitlines() if " /mnt/v " not in line
        }
        assert kinds == {"overlay", "tmpfs", "devpts", "proc"}, mounts
        assert "/disk" not in mounts, mounts
        with made.terminal(["/bin/sh", "-c", "test -t 0 && tty"]) as terminal:
            assert terminal.wait().ok
        interfaces = made.exec(["/bin/cat", "/proc/net/dev"]).text
        assert [line.split(":")[0].strip() for line in interfaces.splitlines()[2:]] == ["lo"], interfaces
    assert (volume / "f").read_text() == "1\n"


def scratch(engine: Dsec) -> None:
    with sandbox(engine) as made:
        made.files.write("kept", b"kept")
        done = made.exec(["/bin/sh", "-c", "cat kept; echo lost > lost; rm kept"], scratch=True)
        assert done.text == "kept", done
        assert made.exec(["/bin/sh", "-c", "ls"]).text == "kept\n"


def process_refused(engine: Dsec) -> None:
    """This kernel's Landlock cannot keep signals inside: level `process` is refused with that reason, not half made."""
    assert os.uname().release.startswith("6.1."), "a newer kernel has this level: check it"
    refusal = ""
    try:
        engine.sandboxes.create(level="process")
    except IsolationUnavailable as error:
        refusal = str(error)
    assert "Landlock" in refusal, refusal or "it was made"


def spawner_of(level: str) -> int:
    """Process id of the spawner of this level that the durable engine has; it has a helper with the same command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if words[0].endswith(b"/spawner") and level.encode() in words and b"--durable" in words:
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            found[int(path.parent.name)] = int(parent)
    first = [pid for pid, parent in found.items() if parent not in found]
    assert len(first) == 1, f"spawners and their parents: {found}"
    return first[0]


def spawner_dies() -> None:
    """Another spawner finds the sandboxes by their cgroups, and gets the same trees."""
    home = Path("/disk/tmp/home")
    with Dsec(home, settings=SETTINGS) as engine:
        with engine.sandboxes.create() as made:
            made.files.write("f", b"kept")
            paused = engine.sandboxes.create()
            paused.pause()
            old = spawner_of("container")
            os.kill(old, signal.SIGKILL)
            assert made.exec(["/bin/cat", "f"]).text == "kept"
            with engine.sandboxes.create() as other:  # by the new one
                assert other.exec(["/bin/true"]).ok
            assert spawner_of("container") != old
            assert made.metrics().pids >= 1
            paused.resume()
            assert paused.exec(["/bin/true"]).ok
            paused.destroy()
        assert not engine.problems()
    shutil.rmtree(home)


def ready() -> None:
    """With sandboxes kept ready, as by default."""
    with Dsec(settings=dataclasses.replace(SETTINGS, pool=2)) as engine:
        for _ in range(5):
            with engine.sandboxes.create() as made:
                assert made.exec(["/bin/true"]).ok


CHECKS: tuple[Callable[[Dsec], None], ...] = (
    lifecycle,
    flags,
    limits_written,
    memory,
    least_killable,
    pids,
    cpu,
    freeze,
    destroy_paused,
    metrics,
    quota,
    recycled,
    inside,
    scratch,
    process_refused,
)
ALONE: tuple[Callable[[], None], ...] = (spawner_dies, ready)


def attempt(name: str, check: Callable[[], None]) -> bool:
    """Run one and print its line."""
    begun = time.monotonic()
    try:
        check()
    except Exception:  # noqa: BLE001 - every failure is told
        sys.stdout.write(f"FAIL {name}\n{traceback.format_exc(limit=-2)}\n")
        return False
    sys.stdout.write(f"ok   {name} ({time.monotonic() - begun:.1f} s)\n")
    return True


def only_v2() -> None:
    """The machine is what the other checks take it for."""
    kinds = {
        line.partition(" - ")[2].split()[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()
    }
    assert "cgroup2" in kinds
    assert "cgroup" not in kinds
    assert {"memory", "pids", "cpu"} <= set((CGROUPS / "cgroup.controllers").read_text().split())


def nothing_left(before: census.Census) -> None:
    """The engine is closed: everything that it made is gone."""
    left = [path.name for path in CGROUPS.iterdir() if path.name.startswith("dsec-")]
    assert not left, left
    after = census.take()
    for name in ("processes", "namespaces", "mounts", "loops", "cgroups", "directories"):
        more = getattr(after, name) - getattr(before, name)
        assert not more, f"{name}: {sorted(more)}"


def wanted(check: Callable[..., None], names: list[str]) -> bool:
    """Whether a check was named, or none was."""
    return not names or check.__name__ in names


def main(names: list[str]) -> int:
    """The checks of these names, or all; 1 when one failed."""
    sys.stdout.write(f"kernel {os.uname().release}\n")
    before = census.take()
    results = [attempt("only version 2", only_v2)]
    with Dsec(settings=SETTINGS) as engine:
        results += [
            attempt(one.__name__, lambda one=one: one(engine)) for one in CHECKS if wanted(one, names)
        ]
    results += [attempt(one.__name__, one) for one in ALONE if wanted(one, names)]
    results.append(attempt("nothing left", lambda: nothing_left(before)))
    sys.stdout.write(f"v2: {sum(results)} passed, {len(results) - sum(results)} failed\n")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
