"""With ready sandboxes: claim one and exec ``/bin/true`` in it.

Between two claims the pool has time to become full again (``--pause``). Without a pause it runs dry, and creating is
partly waited for: that is measured too, as whole lifecycles back to back.
"""

from __future__ import annotations

import argparse
import time
from time import perf_counter_ns

from benchmarks.common import TRUE, Findings, Script, main, warm_up
from benchmarks.figures import milliseconds
from benchmarks.lifecycles import Times, engine, lifecycle, succeeded
from dsec import Settings

LEVEL = "container"


def measure(options: argparse.Namespace) -> Findings:
    """Claim, exec, destroy, wait; then without waiting."""
    times, dry = Times(), Times()
    both: list[int] = []
    with engine(pool=options.ready) as dsec:
        for _ in range(warm_up(options.n)):
            lifecycle(dsec, LEVEL, Times())
        for _ in range(options.n):
            time.sleep(options.pause)
            begun = perf_counter_ns()
            sandbox = dsec.sandboxes.create(level=LEVEL)
            claimed = perf_counter_ns()
            result = sandbox.exec(TRUE)
            ran = perf_counter_ns()
            succeeded(result)
            sandbox.destroy()
            times.create.append(claimed - begun)
            times.exec.append(ran - claimed)
            both.append(ran - begun)
        for _ in range(options.n):
            lifecycle(dsec, LEVEL, dry)
    line = milliseconds("claim + exec /bin/true", both)
    lines = (
        line,
        milliseconds("  claim", times.create),
        milliseconds("  exec /bin/true", times.exec),
        *dry.lines("back to back, the pool never full"),
    )
    return Findings(samples=options.n, series=lines, figures={"p50_ms": line.p50, "p99_ms": line.p99})


def _options(parser: argparse.ArgumentParser) -> None:
    ready = Settings().pool or 2
    parser.add_argument("--ready", type=int, default=ready, help=f"sandboxes kept ready (default {ready})")
    parser.add_argument(
        "--pause", type=float, default=0.02, metavar="SECONDS", help="before each claim (default 0.02)"
    )


SCRIPT = Script(
    name="pool",
    claim="with the pool on: claim a ready sandbox and exec /bin/true in it",
    n=500,
    measure=measure,
    options=_options,
)

if __name__ == "__main__":
    main(SCRIPT)
