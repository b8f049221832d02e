"""Exec ``/bin/true`` in a running sandbox of level ``container``; beside ``crun exec``, in turns of blocks.

Both SDKs, each with an engine of its own; the bars are held against the slower one.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from benchmarks.blocks import Side, in_turn, on_loop, timed_into
from benchmarks.common import Findings, Script, main, warm_up
from benchmarks.figures import Series, milliseconds, ratio, slower
from benchmarks.lifecycles import async_engine, async_exec_true, engine, exec_true
from benchmarks.peers import BARE_TRUE, Crun, PeerFailedError, timed

WHAT = "exec /bin/true in a running sandbox"


def measure(options: argparse.Namespace) -> Findings:
    """In turns; without crun ours alone."""
    blocking: list[int] = []
    awaited: list[int] = []
    bare: list[int] = []
    theirs: list[int] = []
    every = (blocking, awaited, bare, theirs)
    with ExitStack() as stack:
        sides = [
            _blocking(stack, blocking),
            _awaited(stack, awaited),
            timed_into(bare, lambda: timed(BARE_TRUE)),
        ]
        crun, problem = _crun(stack)
        if crun is not None:
            sides.append(timed_into(theirs, crun.exec_true))
        in_turn(warm_up(options.n), sides)
        for each in every:
            each.clear()
        in_turn(options.n, sides)
    ours = (milliseconds(f"Dsec: {WHAT}", blocking), milliseconds(f"AsyncDsec: {WHAT}", awaited))
    floor = milliseconds("fork + exec /bin/true, no sandbox", bare, peer=True)
    peer = milliseconds("crun exec /bin/true", theirs, peer=True) if theirs else None
    return _findings(options.n, ours, floor, peer, problem)


def _blocking(stack: ExitStack, times: list[int]) -> Side:
    dsec = stack.enter_context(engine())
    sandbox = stack.enter_context(dsec.sandboxes.create(level="container"))
    return timed_into(times, lambda: exec_true(sandbox))


def _awaited(stack: ExitStack, times: list[int]) -> Side:
    runner, dsec = stack.enter_context(async_engine())
    sandbox = runner.run(dsec.sandboxes.create(level="container"))
    return on_loop(runner, lambda: async_exec_true(sandbox, times))


def _crun(stack: ExitStack) -> tuple[Crun | None, str]:
    """A running container, or why there is none."""
    try:
        crun = stack.enter_context(Crun())
        crun.exec_true()
    except (PeerFailedError, OSError) as problem:
        return None, str(problem)
    return crun, ""


def _findings(
    n: int, ours: tuple[Series, Series], floor: Series, peer: Series | None, problem: str
) -> Findings:
    figures = slower(*ours)
    if peer is None:
        return Findings(samples=n, series=(*ours, floor), figures=figures, unavailable={"crun": problem})
    figures["ratio_crun"] = ratio(figures["p50_ms"], peer.p50)
    return Findings(samples=n, series=(*ours, floor, peer), figures=figures)


SCRIPT = Script(
    name="exec",
    claim="exec /bin/true in a running sandbox, through both SDKs",
    n=1000,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
