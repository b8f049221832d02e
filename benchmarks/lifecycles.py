"""One lifecycle through the SDK, and its parts. Nothing but the clock is read within what is timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns

from benchmarks.common import TRUE
from benchmarks.figures import Series, milliseconds
from dsec import Dsec
from dsec.client import sync


@dataclass(slots=True)
class Times:
    """Nanoseconds of many lifecycles."""

    create: list[int] = field(default_factory=list)
    exec: list[int] = field(default_factory=list)
    destroy: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)

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


def lifecycle(dsec: sync.Dsec, level: str, times: Times) -> None:
    """Create, exec ``/bin/true``, destroy."""
    begun = perf_counter_ns()
    sandbox = dsec.sandboxes.create(level=level)
    created = perf_counter_ns()
    result = sandbox.exec(TRUE)
    ran = perf_counter_ns()
    sandbox.destroy()
    ended = perf_counter_ns()
    if result.exit_code != 0:
        raise AssertionError(f"/bin/true ended with {result.exit_code}: {result.stderr!r}")
    times.create.append(created - begun)
    times.exec.append(ran - created)
    times.destroy.append(ended - ran)
    times.whole.append(ended - begun)
