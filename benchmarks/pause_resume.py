"""Resume a paused sandbox and exec ``/bin/true`` in it; beside ``crun resume`` and ``crun exec``, in turns of blocks."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns

from benchmarks.blocks import in_turn, repeated, timed_into
from benchmarks.common import TRUE, Findings, Script, main, warm_up
from benchmarks.figures import milliseconds, ratio
from benchmarks.lifecycles import engine, succeeded
from benchmarks.peers import Crun, PeerFailedError
from dsec.client.sync import Sandbox


@dataclass(slots=True)
class Times:
    """Nanoseconds of many rounds."""

    pause: list[int] = field(default_factory=list)
    resume: list[int] = field(default_factory=list)
    exec: list[int] = field(default_factory=list)
    both: list[int] = field(default_factory=list)


def _round(sandbox: Sandbox, times: Times) -> None:
    start = perf_counter_ns()
    sandbox.pause()
    paused = perf_counter_ns()
    sandbox.resume()
    resumed = perf_counter_ns()
    result = sandbox.exec(TRUE)
    ended = perf_counter_ns()
    succeeded(result)
    times.pause.append(paused - start)
    times.resume.append(resumed - paused)
    times.exec.append(ended - resumed)
    times.both.append(ended - paused)


def _peer_round(crun: Crun) -> int:
    crun.pause()
    return crun.resume() + crun.exec_true()


def measure(options: argparse.Namespace) -> Findings:
    """In turns; without crun ours alone."""
    times = Times()
    theirs: list[int] = []
    problem = ""
    with ExitStack() as stack:
        dsec = stack.enter_context(engine())
        sandbox = stack.enter_context(dsec.sandboxes.create(level="container"))
        crun: Crun | None = None
        try:
            crun = stack.enter_context(Crun())
            _peer_round(crun)
        except (PeerFailedError, OSError) as error:
            crun, problem = None, str(error)
        sides = [repeated(lambda: _round(sandbox, times))]
        if crun is not None:
            sides.append(timed_into(theirs, partial(_peer_round, crun)))
        in_turn(warm_up(options.n), [repeated(lambda: _round(sandbox, Times()))])
        in_turn(options.n, sides)
    return _findings(options.n, times, theirs, problem)


def _findings(n: int, times: Times, theirs: list[int], problem: str) -> Findings:
    both = milliseconds("resume + exec /bin/true", times.both)
    lines = (
        both,
        milliseconds("  resume", times.resume),
        milliseconds("  exec /bin/true", times.exec),
        milliseconds("pause", times.pause),
    )
    figures = {"p50_ms": both.p50, "p99_ms": both.p99}
    if problem:
        return Findings(samples=n, series=lines, figures=figures, unavailable={"crun": problem})
    peer = milliseconds("crun resume + crun exec", theirs, peer=True)
    figures["ratio_crun"] = ratio(both.p50, peer.p50)
    return Findings(samples=n, series=(*lines, peer), figures=figures)


SCRIPT = Script(
    name="pause_resume",
    claim="resume a paused sandbox and exec /bin/true in it",
    n=500,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
