"""Level ``process``: create, exec ``/bin/true``, destroy; beside bwrap and a bare fork and exec, alternating.

bwrap isolates more than this level does: it is there to compare by, no bar asks for it.
"""

from __future__ import annotations

import argparse

from benchmarks.common import Findings, Script, main, warm_up
from benchmarks.figures import milliseconds, ratio
from benchmarks.lifecycles import Times, engine, lifecycle
from benchmarks.peers import BARE_TRUE, BWRAP_TRUE, bwrap_problem, timed

LEVEL = "process"


def measure(options: argparse.Namespace) -> Findings:
    """Alternate."""
    problem = bwrap_problem()
    times = Times()
    bwrap: list[int] = []
    bare: list[int] = []
    with engine() as dsec:
        for _ in range(warm_up(options.n)):
            lifecycle(dsec, LEVEL, Times())
            timed(BARE_TRUE)
        for _ in range(options.n):
            lifecycle(dsec, LEVEL, times)
            bare.append(timed(BARE_TRUE))
            if not problem:
                bwrap.append(timed(BWRAP_TRUE))
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
