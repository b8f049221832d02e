"""Level `container` on control groups of version 2 alone. Run as root by `scripts/v2_guest.py` in a guest of its own.

Prints one line a check, then `v2: N passed, M failed`. Whatever a limit or a state is, it is judged from outside the sandbox: in
the cgroup's own files. A limit that holds has a control: the same program with a higher limit gets through.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec import Dsec, Limits, Settings
from dsec.client.sync import Sandbox
from dsec.model.sandbox import Flag
from dsec.testing import census

CGROUPS = Path("/sys/fs/cgroup")
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


def group() -> Path:
    """The cgroup of the one sandbox that runs."""
    found = [path for path in CGROUPS.glob("dsec-*-container/s*") if (path / "cgroup.procs").read_text()]
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
    assert keyed(where / "cgroup.events", "populated") == 0, f"{where} still has processes"


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


CHECKS: tuple[Callable[[Dsec], None], ...] = (
    lifecycle,
    flags,
    limits_written,
    memory,
    pids,
    cpu,
    freeze,
    destroy_paused,
    metrics,
    quota,
    recycled,
)


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


def main() -> int:
    """All checks; 1 when one failed."""
    sys.stdout.write(f"kernel {os.uname().release}\n")
    before = census.take()
    results = [attempt("only version 2", only_v2)]
    with Dsec(settings=SETTINGS) as engine:
        results += [attempt(check.__name__, lambda check=check: check(engine)) for check in CHECKS]
    results.append(attempt("nothing left", lambda: nothing_left(before)))
    sys.stdout.write(f"v2: {sum(results)} passed, {len(results) - sum(results)} failed\n")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
