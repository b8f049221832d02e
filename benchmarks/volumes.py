"""What a volume costs: making and removing one, and creating a sandbox with one beside creating one without."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter_ns

from benchmarks.common import Findings, Script, main
from benchmarks.figures import milliseconds
from dsec import Dsec, Settings

GIB = 2**30


def _timed(act: Callable[[], object], times: list[int]) -> None:
    begun = perf_counter_ns()
    act()
    times.append(perf_counter_ns() - begun)


def measure(options: argparse.Namespace) -> Findings:
    """One after the other, the kinds by turns, nothing made ahead."""
    made: list[int] = []
    removed: list[int] = []
    plain: list[int] = []
    shown: list[int] = []
    with Dsec(settings=Settings(pool=0, pool_bytes=GIB)) as dsec:
        dsec.sandboxes.create().destroy()
        for _ in range(options.n):
            _timed(lambda: dsec.volumes.create("data", size_mib=64), made)
            for times, volumes in ((plain, ()), (shown, ("data:/data",))):
                begun = perf_counter_ns()
                sandbox = dsec.sandboxes.create(volumes=volumes)
                times.append(perf_counter_ns() - begun)
                sandbox.destroy()
            _timed(lambda: dsec.volumes.remove("data"), removed)
    series = (
        milliseconds("make a volume", made),
        milliseconds("create a sandbox without one", plain),
        milliseconds("create a sandbox with one", shown),
        milliseconds("remove a volume", removed),
    )
    figures = {"create_ms": series[0].p50, "more_ms": series[2].p50 - series[1].p50}
    return Findings(samples=options.n, series=series, figures=figures)


SCRIPT = Script(
    name="volumes",
    claim="a volume adds a few milliseconds to the creation of a sandbox",
    n=100,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
