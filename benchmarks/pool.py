"""With a pool of ready sandboxes: claim one and exec ``/bin/true`` in it.

Between two claims the pool has time to become full again (``--pause``); without a pause it runs dry, and what is then
measured is creation.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from time import perf_counter_ns
from typing import Any

from benchmarks.common import TRUE, Findings, Script, main, warm_up
from benchmarks.figures import milliseconds
from benchmarks.lifecycles import Times, lifecycle
from dsec import Dsec, Settings

LEVEL = "container"
FIELD = "pool"
READY = 8


def measure(options: argparse.Namespace) -> Findings:
    """Claim, exec, destroy, wait."""
    if FIELD not in {field.name for field in fields(Settings)}:
        return Findings(
            samples=0, series=(), figures={}, unavailable={"pool": "Settings has no pool in this version"}
        )
    settings: dict[str, Any] = {FIELD: options.ready}
    times = Times()
    both: list[int] = []
    with Dsec(settings=Settings(**settings)) as dsec:
        for _ in range(warm_up(options.n)):
            lifecycle(dsec, LEVEL, Times())
        for _ in range(options.n):
            time.sleep(options.pause)
            begun = perf_counter_ns()
            sandbox = dsec.sandboxes.create(level=LEVEL)
            claimed = perf_counter_ns()
            result = sandbox.exec(TRUE)
            ran = perf_counter_ns()
            if result.exit_code != 0:
                raise AssertionError(f"/bin/true ended with {result.exit_code}: {result.stderr!r}")
            sandbox.destroy()
            times.create.append(claimed - begun)
            times.exec.append(ran - claimed)
            both.append(ran - begun)
    line = milliseconds("claim + exec /bin/true", both)
    parts = (milliseconds("  claim", times.create), milliseconds("  exec /bin/true", times.exec))
    return Findings(
        samples=options.n, series=(line, *parts), figures={"p50_ms": line.p50, "p99_ms": line.p99}
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ready", type=int, default=READY, help=f"sandboxes kept ready (default {READY})")
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
