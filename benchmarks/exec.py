"""Exec ``/bin/true`` in a running sandbox of level ``container``; beside ``crun exec``, alternating."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from time import perf_counter_ns

from benchmarks.common import TRUE, Findings, Script, main, warm_up
from benchmarks.figures import milliseconds, ratio
from benchmarks.lifecycles import engine
from benchmarks.peers import BARE_TRUE, Crun, PeerFailedError, timed


def measure(options: argparse.Namespace) -> Findings:
    """Alternate; without crun ours alone."""
    ours: list[int] = []
    theirs: list[int] = []
    bare: list[int] = []
    with ExitStack() as stack:
        dsec = stack.enter_context(engine())
        sandbox = stack.enter_context(dsec.sandboxes.create(level="container"))
        crun, problem = _crun(stack)
        rounds = warm_up(options.n) + options.n
        for _ in range(rounds):
            begun = perf_counter_ns()
            result = sandbox.exec(TRUE)
            ours.append(perf_counter_ns() - begun)
            if result.exit_code != 0:
                raise AssertionError(f"/bin/true ended with {result.exit_code}: {result.stderr!r}")
            bare.append(timed(BARE_TRUE))
            if crun is not None:
                theirs.append(crun.exec_true())
    line = milliseconds("exec /bin/true in a running sandbox", ours[-options.n :])
    floor = milliseconds("fork + exec /bin/true, no sandbox", bare[-options.n :], peer=True)
    figures = {"p50_ms": line.p50, "p99_ms": line.p99}
    if problem:
        return Findings(
            samples=options.n, series=(line, floor), figures=figures, unavailable={"crun": problem}
        )
    peer = milliseconds("crun exec /bin/true", theirs[-options.n :], peer=True)
    figures["ratio_crun"] = ratio(line.p50, peer.p50)
    return Findings(samples=options.n, series=(line, floor, peer), figures=figures)


def _crun(stack: ExitStack) -> tuple[Crun | None, str]:
    """A running container, or why there is none."""
    try:
        crun = stack.enter_context(Crun())
        crun.exec_true()
    except (PeerFailedError, OSError) as problem:
        return None, str(problem)
    return crun, ""


SCRIPT = Script(
    name="exec",
    claim="exec /bin/true in a running sandbox, through the SDK",
    n=1000,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
