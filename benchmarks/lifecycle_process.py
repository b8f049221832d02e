"""Level ``process``: create, exec ``/bin/true``, destroy; beside bwrap and a bare fork and exec, in turns of blocks.

bwrap isolates more than this level does: it is there to compare by, no bar asks for it.
"""

from __future__ import annotations

import argparse

from benchmarks.blocks import in_turn, timed_into
from benchmarks.common import Findings, Script, main, warm_up
from benchmarks.figures import milliseconds, ratio
from benchmarks.lifecycles import Times, engine, lifecycles
from benchmarks.peers import BARE_TRUE, BWRAP_TRUE, bwrap_problem, timed

LEVEL = "process"


def measure(options: argparse.Namespace) -> Findings:
    """In turns; without bwrap without it."""
    problem = bwrap_problem()
    times = Times()
    bwrap: list[int] = []
    bare: list[int] = []
    peers = [timed_into(bare, lambda: timed(BARE_TRUE))]
    if not problem:
        peers.append(timed_into(bwrap, lambda: timed(BWRAP_TRUE)))
    with engine() as dsec:
        in_turn(warm_up(options.n), [lifecycles(dsec, LEVEL, Times())])
        in_turn(options.n, [lifecycles(dsec, LEVEL, times), *peers])
    lines = [*times.lines(LEVEL), milliseconds("fork + exec /bin/true, no sandbox", bare, peer=True)]
    figures = {"p50_ms": lines[0].p50, "p99_ms": lines[0].p99}
    if problem:
        return Findings(
            samples=options.n, series=tuple(lines), figures=figures, unavailable={"bwrap": problem}
        )
    lines.append(milliseconds("bwrap --unshare-all /bin/true", bwrap, peer=True))
    figures["ratio_bwrap"] = ratio(lines[0].p50, lines[-1].p50)
    return Findings(samples=options.n, series=tuple(lines), figures=figures)


SCRIPT = Script(
    name="lifecycle_process",
    claim="process: create + exec /bin/true + destroy through the SDK, one at a time",
    n=500,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
