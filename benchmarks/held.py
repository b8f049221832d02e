"""Many sandboxes held at once: what creating the last costs against the first, and the memory of each, all included.

Memory is what the whole machine lost (MemAvailable), divided by their number; other work on the machine adds to it or
hides some of it. The parts (by kind of memory; our processes) are given beside it. bwrap is held too, a sleeping
process in each, in a smaller number.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns

from benchmarks.common import TRUE, Findings, Script, main, warm_up
from benchmarks.figures import Series, milliseconds, quantile, ratio, series
from benchmarks.lifecycles import Times, engine, lifecycle
from benchmarks.peers import BWRAP_TRUE, ENVIRONMENT, bwrap_problem
from benchmarks.processes import (
    MEMORY_KINDS,
    Footprint,
    descendants_pss_mib,
    footprint,
    memory_mib,
    spawners,
)
from dsec.client.sync import Sandbox

EDGE = 50
LEVEL = "container"
PEERS = 200
PROBES = 100


@dataclass(frozen=True, slots=True)
class State:
    """Memory of the machine and of our processes, MiB."""

    machine: dict[str, float]
    ours: Footprint
    inits: float


def _state(settle: float) -> State:
    gc.collect()
    time.sleep(settle)
    return State(memory_mib(), footprint(), descendants_pss_mib(spawners()))


def measure(options: argparse.Namespace) -> Findings:
    """Warm up, hold, look, probe, destroy."""
    _allow_descriptors()
    creation: list[int] = []
    destruction: list[int] = []
    held: list[Sandbox] = []
    probes = Times()
    execs: list[int] = []
    with engine() as dsec:
        for _ in range(warm_up(options.n)):
            lifecycle(dsec, LEVEL, Times())
        before = _state(options.settle)
        for _ in range(options.n):
            begun = perf_counter_ns()
            held.append(dsec.sandboxes.create(level=LEVEL))
            creation.append(perf_counter_ns() - begun)
        after = _state(options.settle)
        for number in range(min(PROBES, options.n)):
            begun = perf_counter_ns()
            held[number * len(held) // min(PROBES, options.n)].exec(TRUE)
            execs.append(perf_counter_ns() - begun)
            lifecycle(dsec, LEVEL, probes)
        for sandbox in held:
            begun = perf_counter_ns()
            sandbox.destroy()
            destruction.append(perf_counter_ns() - begun)
        end = _state(options.settle)
    lines = [
        *_creations(creation),
        milliseconds("destroy, each", destruction),
        milliseconds("exec /bin/true in one, while all are held", execs),
        milliseconds("a lifecycle more, while all are held", probes.whole),
    ]
    figures = _creation_figures(creation, destruction) | _memory(options.n, before, after, end)
    problem = bwrap_problem()
    if problem:
        return Findings(
            samples=options.n, series=tuple(lines), figures=figures, unavailable={"bwrap": problem}
        )
    peer, figures["bwrap_memory_mib"] = _bwraps(min(PEERS, options.n), options.settle)
    return Findings(samples=options.n, series=(*lines, peer), figures=figures)


def _allow_descriptors() -> None:
    """As many as the machine allows this process: each sandbox takes one, and shells begin with 1,024."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _edge(times: Sequence[int]) -> int:
    """How many are the first and the last: 50, of few a quarter."""
    return max(1, min(EDGE, len(times) // 4))


def _creations(creation: Sequence[int]) -> tuple[Series, ...]:
    edge = _edge(creation)
    return (
        milliseconds("create, all", creation),
        milliseconds(f"  the first {edge}", creation[:edge]),
        milliseconds(f"  the last {edge}", creation[-edge:]),
    )


def _creation_figures(creation: Sequence[int], destruction: Sequence[int]) -> dict[str, float]:
    edge = _edge(creation)
    first, last = quantile(creation[:edge], 0.5), quantile(creation[-edge:], 0.5)
    return {
        "creation_ratio": ratio(last, first),
        "create_all_s": sum(creation) / 1e9,
        "destroy_all_s": sum(destruction) / 1e9,
    }


def _memory(n: int, before: State, after: State, end: State) -> dict[str, float]:
    """MiB for each sandbox: in all, by kind of memory, and of our processes; and what was not given back in the end."""
    figures = {"memory_mib": (before.machine["MemAvailable"] - after.machine["MemAvailable"]) / n}
    for kind in MEMORY_KINDS:
        figures[f"each_{kind}_mib"] = (after.machine[kind] - before.machine[kind]) / n
    figures["each_init_pss_mib"] = (after.inits - before.inits) / n
    figures["each_engine_rss_mib"] = (after.ours.engine_mib - before.ours.engine_mib) / n
    figures["each_spawner_rss_mib"] = (after.ours.spawner_mib - before.ours.spawner_mib) / n
    figures["each_descriptors"] = (after.ours.descriptors - before.ours.descriptors) / n
    figures["left_after_destroy_mib"] = before.machine["MemAvailable"] - end.machine["MemAvailable"]
    return figures


def _bwraps(n: int, settle: float) -> tuple[Series, float]:
    """``n`` bwraps that sleep: the memory of each in MiB, as a line and a figure."""
    argv = [*BWRAP_TRUE[:-1], "/bin/sleep", "1000000"]
    gc.collect()
    time.sleep(settle)
    before = memory_mib()["MemAvailable"]
    pids = []
    try:
        for _ in range(n):
            pids.append(os.posix_spawn(argv[0], argv, ENVIRONMENT))
            time.sleep(0.01)
        time.sleep(settle)
        each = (before - memory_mib()["MemAvailable"]) / n
    finally:
        for pid in pids:
            _end(pid)
    return series(f"bwrap, {n} held: memory of each", [each], unit="MiB", peer=True), each


def _end(pid: int) -> None:
    """End a bwrap of ours: its outer process, and with it the pid namespace whose first process is its child."""
    for line in _children(pid):
        with suppress(ProcessLookupError):
            os.kill(int(line), signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _children(pid: int) -> list[str]:
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
    return []


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settle",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="rest before memory is read, so that work in the background has ended (default 2)",
    )


SCRIPT = Script(
    name="held",
    claim="many sandboxes held at once: creation of the last against the first, memory of each",
    n=1000,
    n_help="sandboxes held at once",
    measure=measure,
    options=_options,
)

if __name__ == "__main__":
    main(SCRIPT)
