"""One lifecycle and one exec through each of the two SDKs. Nothing but the clock is read within what is timed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

from benchmarks.blocks import Side, on_loop, repeated
from benchmarks.common import TRUE
from benchmarks.figures import Series, milliseconds
from dsec import AsyncDsec, Dsec
from dsec.client import aio, sync
from dsec.model.execs import ExecResult


@dataclass(slots=True)
class Times:
    """Nanoseconds of many lifecycles."""

    create: list[int] = field(default_factory=list)
    exec: list[int] = field(default_factory=list)
    destroy: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)

    def keep(self, begun: int, created: int, ran: int, ended: int) -> None:
        """One more, by its four moments."""
        self.create.append(created - begun)
        self.exec.append(ran - created)
        self.destroy.append(ended - ran)
        self.whole.append(ended - begun)

    def lines(self, name: str) -> tuple[Series, ...]:
        """The whole and its three parts."""
        return (
            milliseconds(f"{name}: create + exec + destroy", self.whole),
            milliseconds("  create", self.create),
            milliseconds("  exec /bin/true", self.exec),
            milliseconds("  destroy", self.destroy),
        )


def engine(*, pool: int = 0) -> sync.Dsec:
    """A private engine with its defaults, but without ready sandboxes unless asked for: creating is creating."""
    return Dsec(pool=pool)


@contextmanager
def async_engine() -> Iterator[tuple[asyncio.Runner, aio.AsyncDsec]]:
    """The same for the asynchronous SDK, on asyncio's own loop in this thread, as a program gets it from ``asyncio.run``."""
    with asyncio.Runner() as runner:
        dsec = AsyncDsec(pool=0)
        runner.run(dsec.open())
        try:
            yield runner, dsec
        finally:
            runner.run(dsec.close())


def succeeded(result: ExecResult) -> None:
    """Raises: AssertionError: what was timed did not happen."""
    if result.exit_code != 0:
        raise AssertionError(f"/bin/true ended with {result.exit_code}: {result.stderr!r}")


def lifecycle(dsec: sync.Dsec, level: str, times: Times) -> None:
    """Create, exec ``/bin/true``, destroy."""
    begun = perf_counter_ns()
    sandbox = dsec.sandboxes.create(level=level)
    created = perf_counter_ns()
    result = sandbox.exec(TRUE)
    ran = perf_counter_ns()
    sandbox.destroy()
    ended = perf_counter_ns()
    succeeded(result)
    times.keep(begun, created, ran, ended)


async def async_lifecycle(dsec: aio.AsyncDsec, level: str, times: Times) -> None:
    """The same, awaited."""
    begun = perf_counter_ns()
    sandbox = await dsec.sandboxes.create(level=level)
    created = perf_counter_ns()
    result = await sandbox.exec(TRUE)
    ran = perf_counter_ns()
    await sandbox.destroy()
    ended = perf_counter_ns()
    succeeded(result)
    times.keep(begun, created, ran, ended)


def lifecycles(dsec: sync.Dsec, level: str, times: Times) -> Side:
    """A side of lifecycles through the blocking SDK."""
    return repeated(lambda: lifecycle(dsec, level, times))


def async_lifecycles(opened: tuple[asyncio.Runner, aio.AsyncDsec], level: str, times: Times) -> Side:
    """A side of lifecycles through the asynchronous SDK."""
    runner, dsec = opened
    return on_loop(runner, lambda: async_lifecycle(dsec, level, times))


def exec_true(sandbox: sync.Sandbox) -> int:
    """Nanoseconds of ``/bin/true`` in a running sandbox."""
    begun = perf_counter_ns()
    result = sandbox.exec(TRUE)
    took = perf_counter_ns() - begun
    succeeded(result)
    return took


async def async_exec_true(sandbox: aio.AsyncSandbox, times: list[int]) -> None:
    """The same, awaited."""
    begun = perf_counter_ns()
    result = await sandbox.exec(TRUE)
    times.append(perf_counter_ns() - begun)
    succeeded(result)
