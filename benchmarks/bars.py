"""The bars: what each benchmark must reach on a machine with two processors. Data, and one question about it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Sign = Literal["<=", ">="]

_HOLDS: Final[dict[Sign, Callable[[float, float], bool]]] = {"<=": operator.le, ">=": operator.ge}
_MANY: Final = 100
_MILLIONS: Final = {"environments": 3_000_000.0, "live": 1000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One demand.

    Attributes:
        result: the file of results it is compared with, without ``.json``.
        figure: the name of the number in it.
        least: samples that it takes to say anything.
        requires: other figures that must be at least this large, such as the size of a file.
    """

    what: str
    result: str
    figure: str
    sign: Sign
    bound: float
    unit: str
    least: int = _MANY
    requires: Mapping[str, float] = field(default_factory=dict)

    def met(self, measured: float) -> bool:
        """Whether this figure reaches the bar."""
        return _HOLDS[self.sign](measured, self.bound)


_CONTAINER: Final = "container: create + exec + destroy"
_EXEC: Final = "exec in a running sandbox"
_SUSTAINED: Final = "two workers, sustained"
_HELD: Final = "1,000 held at once"
_FILES: Final = "1 GiB to and from a file, slowest of four ways"
_OUTPUT: Final = "100 MB of stdout, slower of two ways"
_GIB: Final = {"file_size_mib": 1024.0}
_WHOLE: Final = {"percent": 100.0}
_SECONDS: Final = 60
_THOUSAND: Final = 1000
_FEW: Final = 3  # transfers of this size take seconds each

BARS: Final = (
    Bar(
        what=f"{_CONTAINER}: p50",
        result="lifecycle_container",
        figure="p50_ms",
        sign="<=",
        bound=6.0,
        unit="ms",
    ),
    Bar(
        what=f"{_CONTAINER}: p50 against bwrap",
        result="lifecycle_container",
        figure="ratio_bwrap",
        sign="<=",
        bound=0.65,
        unit="×",
    ),
    Bar(
        what=f"{_CONTAINER}: p99",
        result="lifecycle_container",
        figure="p99_ms",
        sign="<=",
        bound=25.0,
        unit="ms",
    ),
    Bar(what="pool on: claim + exec: p50", result="pool", figure="p50_ms", sign="<=", bound=2.5, unit="ms"),
    Bar(what=f"{_EXEC}: p50", result="exec", figure="p50_ms", sign="<=", bound=1.3, unit="ms"),
    Bar(what=f"{_EXEC}: p99", result="exec", figure="p99_ms", sign="<=", bound=4.0, unit="ms"),
    Bar(
        what=f"{_EXEC}: p50 against crun exec",
        result="exec",
        figure="ratio_crun",
        sign="<=",
        bound=0.15,
        unit="×",
    ),
    Bar(
        what=f"{_SUSTAINED}: rate against bwrap",
        result="sustained",
        figure="ratio_bwrap",
        sign=">=",
        bound=1.5,
        unit="×",
        least=_SECONDS,
    ),
    Bar(
        what=f"{_SUSTAINED}: time, last third against first",
        result="sustained",
        figure="drift_time_ratio",
        sign="<=",
        bound=1.1,
        unit="×",
        least=_SECONDS,
    ),
    Bar(
        what=f"{_SUSTAINED}: memory, last third less first",
        result="sustained",
        figure="drift_memory_mib",
        sign="<=",
        bound=2.0,
        unit="MiB",
        least=_SECONDS,
    ),
    Bar(
        what=f"{_SUSTAINED}: descriptors, last third less first",
        result="sustained",
        figure="drift_descriptors",
        sign="<=",
        bound=0.0,
        unit="",
        least=_SECONDS,
    ),
    Bar(
        what="process: create + exec + destroy: p50",
        result="lifecycle_process",
        figure="p50_ms",
        sign="<=",
        bound=3.5,
        unit="ms",
    ),
    Bar(
        what="resume a paused sandbox and exec: p50",
        result="pause_resume",
        figure="p50_ms",
        sign="<=",
        bound=2.0,
        unit="ms",
    ),
    Bar(
        what="snapshot, 10 MB, 1 GB or 50,000 files changed: the sandbox stands still, p50 of the slowest",
        result="snapshots",
        figure="paused_ms",
        sign="<=",
        bound=25.0,
        unit="ms",
        least=10,
        requires=_WHOLE,
    ),
    Bar(
        what="100 forks of a sandbox with 100 MB of changed files, together: p50",
        result="snapshots",
        figure="forks_s",
        sign="<=",
        bound=2.0,
        unit="s",
        least=10,
        requires=_WHOLE,
    ),
    Bar(
        what=f"{_HELD}: creation, last against first",
        result="held",
        figure="creation_ratio",
        sign="<=",
        bound=1.5,
        unit="×",
        least=_THOUSAND,
    ),
    Bar(
        what=f"{_HELD}: memory of each, all included",
        result="held",
        figure="memory_mib",
        sign="<=",
        bound=0.8,
        unit="MiB",
        least=_THOUSAND,
    ),
    Bar(
        what="template with 200 MB of dependencies, first and hundredth holder: create and command, against the plain base",
        result="templates",
        figure="holder_ratio",
        sign="<=",
        bound=1.2,
        unit="×",
        least=_FEW,
        requires={"holders": 100.0, "percent": 100.0},
    ),
    Bar(
        what="the example's template: build when nothing changed",
        result="templates",
        figure="again_s",
        sign="<=",
        bound=0.5,
        unit="s",
        least=_FEW,
    ),
    Bar(
        what=f"{_FILES}: speed",
        result="transfer",
        figure="file_slowest_mb_s",
        sign=">=",
        bound=400.0,
        unit="MB/s",
        least=_FEW,
        requires=_GIB,
    ),
    Bar(
        what=f"{_FILES}: extra memory, the most",
        result="transfer",
        figure="file_extra_mib",
        sign="<=",
        bound=64.0,
        unit="MiB",
        least=_FEW,
        requires=_GIB,
    ),
    Bar(
        what=f"{_OUTPUT}: speed",
        result="transfer",
        figure="stdout_slowest_mb_s",
        sign=">=",
        bound=200.0,
        unit="MB/s",
        least=_FEW,
        requires={"stdout_size_mb": 100.0},
    ),
    Bar(
        what="files and stdout byte-exact (1 = yes)",
        result="transfer",
        figure="exact",
        sign=">=",
        bound=1.0,
        unit="",
        least=_FEW,
    ),
    Bar(
        what="over HTTP: exec /bin/true: p50",
        result="served",
        figure="exec_p50_ms",
        sign="<=",
        bound=2.8,
        unit="ms",
    ),
    Bar(
        what="over HTTP: exec /bin/true: p99",
        result="served",
        figure="exec_p99_ms",
        sign="<=",
        bound=10.0,
        unit="ms",
    ),
    Bar(
        what="over HTTP: create + exec + destroy, no pool: p50",
        result="served",
        figure="lifecycle_p50_ms",
        sign="<=",
        bound=11.0,
        unit="ms",
    ),
    Bar(
        what="over HTTP: create + exec + destroy, pool: p50",
        result="served",
        figure="pooled_p50_ms",
        sign="<=",
        bound=6.0,
        unit="ms",
    ),
    Bar(
        what="over HTTP: lifecycles sustained",
        result="served",
        figure="sustained_per_s",
        sign=">=",
        bound=100.0,
        unit="/s",
        requires={"sustained_s": 60.0},
    ),
    Bar(
        what="over HTTP: errors among those",
        result="served",
        figure="sustained_errors",
        sign="<=",
        bound=0.0,
        unit="",
    ),
    Bar(
        what="journal's share of a command, process: p50",
        result="journal_share",
        figure="process_p50_ms",
        sign="<=",
        bound=0.3,
        unit="ms",
    ),
    Bar(
        what="journal's share of a command, disk, 32 at once: p50",
        result="journal_share",
        figure="disk_p50_ms",
        sign="<=",
        bound=2.5,
        unit="ms",
    ),
    Bar(
        what="3,000,000 environments, SQLite: recorded",
        result="environments",
        figure="create_per_s",
        sign=">=",
        bound=3000.0,
        unit="/s",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, SQLite: get: p99",
        result="environments",
        figure="get_p99_ms",
        sign="<=",
        bound=10.0,
        unit="ms",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, SQLite: a page of a list: p99",
        result="environments",
        figure="page_p99_ms",
        sign="<=",
        bound=30.0,
        unit="ms",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, SQLite: first command in a cold one: p50",
        result="environments",
        figure="wake_p50_ms",
        sign="<=",
        bound=30.0,
        unit="ms",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, SQLite: a sweep of the reaper that ends 1,000",
        result="environments",
        figure="sweep_s",
        sign="<=",
        bound=2.0,
        unit="s",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, SQLite: server started again",
        result="environments",
        figure="restart_s",
        sign="<=",
        bound=10.0,
        unit="s",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, SQLite: memory of the server",
        result="environments",
        figure="server_mib",
        sign="<=",
        bound=500.0,
        unit="MiB",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, PostgreSQL: recorded",
        result="environments_postgres",
        figure="create_per_s",
        sign=">=",
        bound=3000.0,
        unit="/s",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, PostgreSQL: get: p99",
        result="environments_postgres",
        figure="get_p99_ms",
        sign="<=",
        bound=10.0,
        unit="ms",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, PostgreSQL: a page of a list: p99",
        result="environments_postgres",
        figure="page_p99_ms",
        sign="<=",
        bound=30.0,
        unit="ms",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, PostgreSQL: first command in a cold one: p50",
        result="environments_postgres",
        figure="wake_p50_ms",
        sign="<=",
        bound=30.0,
        unit="ms",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, PostgreSQL: a sweep of the reaper that ends 1,000",
        result="environments_postgres",
        figure="sweep_s",
        sign="<=",
        bound=2.0,
        unit="s",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, PostgreSQL: server started again",
        result="environments_postgres",
        figure="restart_s",
        sign="<=",
        bound=10.0,
        unit="s",
        requires=_MILLIONS,
    ),
    Bar(
        what="3,000,000 environments, PostgreSQL: memory of the server",
        result="environments_postgres",
        figure="server_mib",
        sign="<=",
        bound=500.0,
        unit="MiB",
        requires=_MILLIONS,
    ),
)
