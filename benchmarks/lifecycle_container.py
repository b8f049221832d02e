"""Level ``container``: create, exec ``/bin/true``, destroy; beside ``bwrap --unshare-all … /bin/true``, in turns of blocks.

Both SDKs, each with an engine of its own; the bars are held against the slower one.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from benchmarks.blocks import in_turn, timed_into
from benchmarks.common import Findings, Script, main, warm_up
from benchmarks.figures import milliseconds, ratio, slower
from benchmarks.lifecycles import Times, async_engine, async_lifecycles, engine, lifecycles
from benchmarks.peers import BARE_TRUE, BWRAP_TRUE, bwrap_problem, timed

LEVEL = "container"


def measure(options: argparse.Namespace) -> Findings:
    """In turns; without bwrap ours alone."""
    problem = bwrap_problem()
    blocking, awaited = Times(), Times()
    bwrap: list[int] = []
    bare: list[int] = []
    with ExitStack() as stack:
        dsec = stack.enter_context(engine())
        opened = stack.enter_context(async_engine())
        peers = [timed_into(bare, lambda: timed(BARE_TRUE))]
        if not problem:
            peers.append(timed_into(bwrap, lambda: timed(BWRAP_TRUE)))
        in_turn(
            warm_up(options.n), [lifecycles(dsec, LEVEL, Times()), async_lifecycles(opened, LEVEL, Times())]
        )
        in_turn(
            options.n,
            [lifecycles(dsec, LEVEL, blocking), async_lifecycles(opened, LEVEL, awaited), *peers],
        )
    return _findings(options.n, (blocking, awaited), bare, bwrap, problem)


def _findings(n: int, ours: tuple[Times, Times], bare: list[int], bwrap: list[int], problem: str) -> Findings:
    blocking, awaited = (
        each.lines(f"{name}, {LEVEL}") for name, each in zip(("Dsec", "AsyncDsec"), ours, strict=True)
    )
    figures = slower(blocking[0], awaited[0])
    lines = (*blocking, *awaited, milliseconds("fork + exec /bin/true, no sandbox", bare, peer=True))
    if problem:
        return Findings(samples=n, series=lines, figures=figures, unavailable={"bwrap": problem})
    peer = milliseconds("bwrap --unshare-all /bin/true", bwrap, peer=True)
    figures["ratio_bwrap"] = ratio(figures["p50_ms"], peer.p50)
    return Findings(samples=n, series=(*lines, peer), figures=figures)


SCRIPT = Script(
    name="lifecycle_container",
    claim="container: create + exec /bin/true + destroy through both SDKs, one at a time",
    n=500,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
