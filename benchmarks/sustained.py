"""Two worker processes that do nothing but lifecycles, each with its own engine; beside bwrap in the same two workers.

Blocks of DSec and of bwrap alternate, so that noise is shared; after each
an engine has half a second to end what it does in the background; then its memory and descriptors are counted. Drift compares the first with the last third of DSec's blocks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import fmean
from time import perf_counter_ns

from benchmarks.common import ROOT, Findings, Script, main
from benchmarks.figures import NS_PER_MS, quantile, ratio, series, thirds
from benchmarks.lifecycles import Times, engine, lifecycle
from benchmarks.peers import BWRAP_TRUE, bwrap_problem, timed
from benchmarks.processes import Footprint, footprint
from dsec.client import sync

WORKERS = 2
LEVEL = "container"
SETTLE = 0.5  # seconds, not measured
WARM_UP = 2.0
PATIENCE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What one worker did in one block; ``seconds`` it really took."""

    count: int
    seconds: float
    p50_ms: float
    p99_ms: float
    engine_mib: float
    spawner_mib: float
    descriptors: int


def work() -> None:
    """A worker: each line ``KIND SECONDS`` is answered with a block."""
    with engine() as dsec:
        for line in sys.stdin:
            kind, seconds = line.split()
            block = _block(dsec, kind, float(seconds))
            sys.stdout.write(json.dumps(asdict(block)) + "\n")
            sys.stdout.flush()


def _block(dsec: sync.Dsec, kind: str, seconds: float) -> Block:
    times = Times()
    begun = perf_counter_ns()
    end = begun + int(seconds * 1e9)
    if kind == "dsec":
        while perf_counter_ns() < end:
            lifecycle(dsec, LEVEL, times)
    else:
        while perf_counter_ns() < end:
            times.whole.append(timed(BWRAP_TRUE))
    took = (perf_counter_ns() - begun) / 1e9
    time.sleep(SETTLE)
    held: Footprint = footprint()
    return Block(
        count=len(times.whole),
        seconds=took,
        p50_ms=quantile(times.whole, 0.5) / NS_PER_MS,
        p99_ms=quantile(times.whole, 0.99) / NS_PER_MS,
        engine_mib=held.engine_mib,
        spawner_mib=held.spawner_mib,
        descriptors=held.descriptors,
    )


class Worker:
    """A worker process and the pipe to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sustained", "--worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, kind: str, seconds: float) -> None:
        """Begin a block."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {seconds}\n")
        self._process.stdin.flush()

    def answer(self) -> Block:
        """The block asked for.  Raises: RuntimeError: the worker has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with exit code {self._process.wait(30)}")
        return Block(**json.loads(line))

    def close(self) -> None:
        """End it; its engine closes. One that does not end is killed: its spawner ends its sandboxes."""
        try:
            self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def measure(options: argparse.Namespace) -> Findings:
    """Alternate blocks until each side has had its seconds."""
    problem = bwrap_problem()
    blocks = max(1, round(options.n / options.block))
    ours: list[list[Block]] = []
    theirs: list[list[Block]] = []
    with ExitStack() as stack:
        workers = []
        for _ in range(WORKERS):
            worker = Worker()
            stack.callback(worker.close)
            workers.append(worker)
        _together(workers, "dsec", min(WARM_UP, options.block))
        for _ in range(blocks):
            ours.append(_together(workers, "dsec", options.block))
            if not problem:
                theirs.append(_together(workers, "bwrap", options.block))
    return _findings(options.n, ours, theirs, problem)


def _together(workers: list[Worker], kind: str, seconds: float) -> list[Block]:
    for worker in workers:
        worker.ask(kind, seconds)
    return [worker.answer() for worker in workers]


def _rates(rounds: list[list[Block]]) -> list[float]:
    """Lifecycles a second of all workers together, one figure a round."""
    return [sum(block.count / block.seconds for block in blocks) for blocks in rounds]


def _drift(rounds: list[list[Block]]) -> dict[str, float]:
    """Last third against the first."""

    def ends(of: str) -> tuple[float, float]:
        return thirds([fmean(float(getattr(block, of)) for block in blocks) for blocks in rounds])

    time_first, time_last = ends("p50_ms")
    engine_first, engine_last = ends("engine_mib")
    spawner_first, spawner_last = ends("spawner_mib")
    open_first, open_last = ends("descriptors")
    return {
        "drift_time_ratio": ratio(time_last, time_first),
        "drift_engine_mib": engine_last - engine_first,
        "drift_spawner_mib": spawner_last - spawner_first,
        "drift_memory_mib": engine_last + spawner_last - engine_first - spawner_first,
        "drift_descriptors": open_last - open_first,
    }


def _findings(n: int, ours: list[list[Block]], theirs: list[list[Block]], problem: str) -> Findings:
    rates = _rates(ours)
    flat = [block for blocks in ours for block in blocks]
    lines = [
        series("container, two workers: lifecycles", rates, unit="/s"),
        series("  p50 of each block", [block.p50_ms for block in flat]),
        series("  p99 of each block", [block.p99_ms for block in flat]),
        series("  resident memory of an engine", [block.engine_mib for block in flat], unit="MiB"),
        series("  … of its spawners", [block.spawner_mib for block in flat], unit="MiB"),
        series("  open descriptors, both", [float(block.descriptors) for block in flat], unit=""),
    ]
    figures = {"per_second": fmean(rates), "lifecycles": float(sum(block.count for block in flat))}
    figures |= _drift(ours)
    if problem:
        return Findings(samples=n, series=tuple(lines), figures=figures, unavailable={"bwrap": problem})
    peer = _rates(theirs)
    lines.append(series("bwrap, the same two workers", peer, unit="/s", peer=True))
    figures["ratio_bwrap"] = ratio(fmean(rates), fmean(peer))
    return Findings(samples=n, series=tuple(lines), figures=figures)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=int, dest="n", metavar="N", default=argparse.SUPPRESS, help="the same as --n"
    )
    parser.add_argument(
        "--block", type=float, default=10.0, metavar="SECONDS", help="length of a block (default 10)"
    )


SCRIPT = Script(
    name="sustained",
    claim="sustained: two workers, create + exec /bin/true + destroy without a pause",
    n=60,
    n_help="seconds of DSec, and as many of bwrap",
    measure=measure,
    options=_options,
)

if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main(SCRIPT)
