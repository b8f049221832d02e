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
LOADS = {
    "10 MB": "head -c 10000000 /dev/urandom > big",
    "1 GB": "head -c 1000000000 /dev/zero > big",
    "50,000 files": (
        'rm -rf many; mkdir many; cd many; python3 -c "\n'
        "import os\n"
        "for d in range(500):\n"
        "    os.mkdir(str(d))\n"
        "    for f in range(100):\n"
        "        open(f'{d}/{f}', 'w').write('x' * 100)\n\""
    ),
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


def _taken(dsec: Dsec, sandbox: Sandbox, load: str, times: Times) -> None:
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
        for name, load in LOADS.items():
            times = Times()
            for _ in range(options.n):
                _taken(dsec, sandbox, load, times)
            lines.append(milliseconds(f"stands still, {name} changed", times.paused))
            lines.append(milliseconds("  the whole call", times.whole))
            figures[f"paused_ms_{name.replace(' ', '_').replace(',', '')}"] = lines[-2].p50
        figures["paused_ms"] = max(figures.values())
        figures["paused_most_ms"] = max(line.most for line in lines[::2])
        sandbox.exec("rm -rf many big; head -c 100000000 /dev/urandom > shared; sync shared", timeout=60)
        forks: list[int] = []
        for _ in range(options.n):
            _forked(sandbox, forks)
        lines.append(milliseconds(f"{CHILDREN} forks with 100 MB each, together", forks))
        figures["forks_s"] = lines[-1].p50 * NS_PER_MS / 1e9
    return Findings(samples=options.n, series=tuple(lines), figures=figures)


SCRIPT = Script(
    name="snapshots",
    claim="a snapshot of much changed stands the sandbox still for milliseconds; a hundred forks share what they begin with",
    n=10,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
