"""How long a sandbox stands still for a snapshot of much, and how long a hundred forks take.

Before each snapshot the sandbox changes what is measured: 10 MB in one file, 1 GB in one file, 50,000 small files. ``paused`` is what the
snapshot itself tells; the whole call is given beside it: it waits for the disk while the sandbox runs on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

from benchmarks.common import Findings, Script, main
from benchmarks.figures import NS_PER_MS, Series, milliseconds
from dsec import Dsec, Limits, Settings
from dsec.client.sync import Sandbox

GIB = 2**30
CHILDREN = 100
MANY = """
import os
for d in range(FILES // 100):
    os.mkdir(str(d))
    for f in range(100):
        with open(f"{d}/{f}", "w") as file:
            file.write("x" * 100)
"""


def _loads(percent: int) -> dict[str, list[str]]:
    """What is changed before each snapshot: its name, and the command that does it."""
    many = MANY.replace("FILES", str(500 * percent))
    return {
        "10 MB": ["sh", "-c", f"head -c {100_000 * percent} /dev/urandom > big"],
        "1 GB": ["sh", "-c", f"head -c {10_000_000 * percent} /dev/zero > big"],
        "50,000 files": ["sh", "-c", 'rm -rf many; mkdir many; cd many; exec python3 -c "$0"', many],
    }


@dataclass(slots=True)
class Times:
    """Nanoseconds of many snapshots."""

    paused: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)


@contextmanager
def _sandbox() -> Iterator[tuple[Dsec, Sandbox]]:
    limits = Limits(disk_mib=8192, memory_mib=4096, cpu_millis=2000)
    with (
        Dsec(settings=Settings(pool=0, pool_bytes=12 * GIB)) as dsec,
        dsec.sandboxes.create(limits=limits) as sandbox,
    ):
        yield dsec, sandbox


def _taken(dsec: Dsec, sandbox: Sandbox, load: list[str], times: Times) -> None:
    done = sandbox.exec(load, timeout=120)
    if not done.ok:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    begun = perf_counter_ns()
    snapshot = sandbox.snapshot()
    times.whole.append(perf_counter_ns() - begun)
    times.paused.append(int(snapshot.paused * 1e9))
    dsec.snapshots.remove(snapshot.id)


def _forked(sandbox: Sandbox, times: list[int]) -> None:
    """Make all children, time that, and end them."""
    begun = perf_counter_ns()
    children = sandbox.fork(CHILDREN)
    times.append(perf_counter_ns() - begun)
    for child in children:
        child.destroy()


def measure(options: argparse.Namespace) -> Findings:
    """One load after the other, in one sandbox."""
    lines: list[Series] = []
    figures: dict[str, float] = {}
    with _sandbox() as (dsec, sandbox):
        for name, load in _loads(options.percent).items():
            times = Times()
            for _ in range(options.n):
                _taken(dsec, sandbox, load, times)
            lines.append(milliseconds(f"stands still, {name} changed", times.paused))
            lines.append(milliseconds("  the whole call", times.whole))
            figures[f"paused_ms_{name.replace(' ', '_').replace(',', '')}"] = lines[-2].p50
        figures["paused_ms"] = max(figures.values())
        figures["paused_most_ms"] = max(line.most for line in lines[::2])
        shared = 1_000_000 * options.percent
        sandbox.exec(f"rm -rf many big; head -c {shared} /dev/urandom > shared; sync shared", timeout=60)
        forks: list[int] = []
        for _ in range(options.n):
            _forked(sandbox, forks)
        lines.append(milliseconds(f"{CHILDREN} forks with 100 MB each, together", forks))
        figures["percent"] = float(options.percent)
        figures["forks_s"] = lines[-1].p50 * NS_PER_MS / 1e9
    return Findings(samples=options.n, series=tuple(lines), figures=figures)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--percent", type=int, default=100, help="of the sizes that bars ask for")


SCRIPT = Script(
    name="snapshots",
    claim="a snapshot of much changed stands the sandbox still for milliseconds; a hundred forks share what they begin with",
    n=10,
    measure=measure,
    options=_options,
)

if __name__ == "__main__":
    main(SCRIPT)
