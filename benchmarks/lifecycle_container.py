"""Level ``container``: create, exec ``/bin/true``, destroy; beside ``bwrap --unshare-all … /bin/true``.

The two alternate, so that noise hits both. What the engine does after a destroy has been answered (emptying the
writable layer) then overlaps with the peer; so both also run back to back, alone.
"""

from __future__ import annotations

import argparse

from benchmarks.common import Findings, Script, main, warm_up
from benchmarks.figures import milliseconds, ratio
from benchmarks.lifecycles import Times, engine, lifecycle
from benchmarks.peers import BARE_TRUE, BWRAP_TRUE, bwrap_problem, timed

LEVEL = "container"


def measure(options: argparse.Namespace) -> Findings:
    """Alternate, then each alone."""
    problem = bwrap_problem()
    mixed, alone = Times(), Times()
    bwrap: list[int] = []
    bwrap_alone: list[int] = []
    bare: list[int] = []
    with engine() as dsec:
        for _ in range(warm_up(options.n)):
            lifecycle(dsec, LEVEL, Times())
            timed(BARE_TRUE if problem else BWRAP_TRUE)
        for _ in range(options.n):
            lifecycle(dsec, LEVEL, mixed)
            if not problem:
                bwrap.append(timed(BWRAP_TRUE))
            bare.append(timed(BARE_TRUE))
        for _ in range(options.n):
            lifecycle(dsec, LEVEL, alone)
        if not problem:
            bwrap_alone.extend(timed(BWRAP_TRUE) for _ in range(options.n))
    ours, back = milliseconds("container, back to back: all", alone.whole), mixed.lines(LEVEL)
    figures = {"p50_ms": back[0].p50, "p99_ms": back[0].p99, "back_to_back_p50_ms": ours.p50}
    lines = [*back, ours, milliseconds("fork + exec /bin/true, no sandbox", bare, peer=True)]
    if problem:
        return Findings(
            samples=options.n, series=tuple(lines), figures=figures, unavailable={"bwrap": problem}
        )
    peer = milliseconds("bwrap --unshare-all /bin/true", bwrap, peer=True)
    peer_alone = milliseconds("bwrap, back to back", bwrap_alone, peer=True)
    figures["ratio_bwrap"] = ratio(back[0].p50, peer.p50)
    figures["back_to_back_ratio_bwrap"] = ratio(ours.p50, peer_alone.p50)
    return Findings(samples=options.n, series=(*lines, peer, peer_alone), figures=figures)


SCRIPT = Script(
    name="lifecycle_container",
    claim="container: create + exec /bin/true + destroy through the SDK, one at a time",
    n=500,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
