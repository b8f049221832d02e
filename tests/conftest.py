"""What every test gets: asyncio as anyio's back-end, a guard against blocking the event loop, and the census."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster
from hypothesis import settings

from dsec.testing import census
from dsec.testing.databases import (
    _server_first,
    database_kind,
    database_url,
    keep_asked,
    new_database,
    pytest_addoption,
    pytest_generate_tests,
)
from dsec.testing.postgres import postgres_server, postgres_url

__all__ = [  # fixtures and hooks
    "_server_first",
    "database_kind",
    "database_url",
    "new_database",
    "postgres_server",
    "postgres_url",
    "pytest_addoption",
    "pytest_generate_tests",
]

MAY_BLOCK = (
    # Writes of a few microseconds to a local database; a thread would cost more than it saves.
    ("dsec/stores/journal.py", "sqlite3."),
    ("dsec/stores/volume_records.py", "sqlite3."),
    ("dsec/stores/snapshot_records.py", "sqlite3."),
    # Names of sockets in /run, which is memory: a few microseconds.
    ("dsec/runtimes/spawned.py", "os.unlink"),
    # One directory, and two files of sysfs, of a layer that was in use within the last minute.
    ("dsec/stores/slots.py", "os.stat"),
    ("dsec/stores/btrfs.py", "os.read"),
    # Three empty directories at the end of a sandbox of level `process`.
    ("dsec/runtimes/homes.py", "os.rmdir"),
    # Whether there is a file of passwords, when a connection to PostgreSQL is made.
    ("asyncpg/connect_utils.py", ""),
    # The steps of a migration, once a version, before anything is served.
    ("dsec/stores/control/upgrade.py", ""),
    # And those of the journal, in a loop of their own in a thread.
    ("dsec/stores/postgres/identity.py", ""),
)
"""(file, prefix of the blocking call): any function of that file may make such calls inside the event loop."""

COUNTED_TIERS = ("integration", "e2e")
SETTLE_SECONDS = 3.0


settings.register_profile("dsec", deadline=None)  # no test asserts that something was fast
settings.load_profile("dsec")


def pytest_configure(config: pytest.Config) -> None:
    """Give this run a temporary directory of its own, so that what it leaves behind can be told from others'."""
    top = Path(tempfile.mkdtemp(prefix="dt-"))  # short: socket paths below it must fit in 107 bytes
    os.environ["TMPDIR"] = str(top)
    tempfile.tempdir = None
    config.stash[_TOP] = top
    _heed_signals()


def _heed_signals() -> None:
    """Whoever runs us may ignore signals (`nohup`, a job in the background): what we start is to begin without that.

    A new program inherits what is ignored but no handler, so a handler that does nothing is ignoring for us alone.
    """
    for signo in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(signo) is signal.SIG_IGN:
            signal.signal(signo, lambda *_: None)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_FAILED] = exitstatus != 0


def pytest_unconfigure(config: pytest.Config) -> None:
    """Failures keep their files; a mount that was left is never deleted through."""
    top = config.stash[_TOP]
    mounted = str(top) in Path("/proc/self/mountinfo").read_text()
    if not mounted and not config.stash.get(_FAILED, False):
        shutil.rmtree(top, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_asked(config, items)
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root: it makes namespaces, mounts or cgroups")
    for item in items:
        if item.get_closest_marker("needs_root"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In an async test, a blocking call below a function of ours raises `BlockingError` where it is made."""
    if request.node.get_closest_marker("anyio") is None:
        yield
        return
    guard = BlockBuster("dsec", excluded_modules=["dsec.testing"])
    for file, prefix in MAY_BLOCK:
        for name, function in guard.functions.items():
            if name.startswith(prefix):
                function.can_block_in(file, _AnyFunction())
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()


@pytest.fixture(scope="session")
def census_root(request: pytest.FixtureRequest) -> Path | None:
    """What the census looks at: this run's own traces, or with DSEC_TEST_CENSUS=machine everybody's."""
    if os.environ.get("DSEC_TEST_CENSUS", "own") == "machine":
        return None
    return request.config.stash[_TOP]


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest, census_root: Path | None) -> Iterator[None]:
    yield from _leaves_nothing(request, census_root)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, census_root: Path | None) -> Iterator[None]:
    # An engine that outlives the test keeps what it has mounted: the census of the module counts that.
    yield from _leaves_nothing(
        request, census_root, passing=lambda line: line.startswith("loops: ") and ".erofs" in line
    )


def _leaves_nothing(
    request: pytest.FixtureRequest,
    root: Path | None,
    passing: Callable[[str], bool] = lambda _: False,
) -> Iterator[None]:
    if request.path.relative_to(Path(__file__).parent).parts[0] not in COUNTED_TIERS:
        yield
        return
    before = census.take(root)
    yield
    left = census.settle(before, root=root, seconds=SETTLE_SECONDS, passing=passing)
    assert not left, "left behind:\n  " + "\n  ".join(left)


class _AnyFunction:
    """A set of function names that holds every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())


_TOP = pytest.StashKey[Path]()
_FAILED = pytest.StashKey[bool]()
