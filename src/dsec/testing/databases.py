"""Suites that run on SQLite and on PostgreSQL: the same tests, with another place for journal, keys and answered calls.

A test that makes a home asks for ``database_url``, a fixture of a module for ``new_database``, and both give what the setting ``database`` takes:
"" = SQLite in the home. By default tests run on SQLite, those marked ``both_databases`` on PostgreSQL as well, and those marked ``in_postgresql`` there alone.
``--database`` chooses: all tests that have a database in them run on that one, or on both, and nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import pytest

from dsec.testing.postgres import database

SQLITE: Final = "sqlite"
POSTGRESQL: Final = "postgresql"
BOTH: Final = "both"
MARK: Final = "both_databases"
ALONE: Final = "in_postgresql"
_FIXTURE: Final = "database_kind"
_OPTION: Final = "--database"

NewDatabase = Callable[[], AbstractContextManager[str]]
"""Makes an empty one; what the setting ``database`` takes, good until the context ends."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _OPTION,
        choices=(SQLITE, POSTGRESQL, BOTH),
        default=None,
        help="run the suites that have a database in them, on this one alone or on both, and nothing else",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _FIXTURE in metafunc.fixturenames:
        asked = metafunc.config.getoption(_OPTION)
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        kinds: tuple[str, ...] = (
            (SQLITE, POSTGRESQL) if asked == BOTH or (asked is None and MARK in marks) else (asked or SQLITE,)
        )
        if ALONE in marks:
            kinds = (POSTGRESQL,) if asked is None else ()  # what it does, others do there, too
        metafunc.parametrize(_FIXTURE, kinds, indirect=True, scope="module")


def keep_asked(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where one was chosen, leave out what has none."""
    if config.getoption(_OPTION) is None:
        return
    kept = [item for item in items if _FIXTURE in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.fixture(scope="session")
def _server_first(request: pytest.FixtureRequest) -> None:
    """A server of PostgreSQL begins before anything is counted, where any test of the run needs it."""
    for item in request.session.items:
        call = getattr(item, "callspec", None)
        if call is not None and call.params.get(_FIXTURE) == POSTGRESQL:
            request.getfixturevalue("postgres_server")
            return


@pytest.fixture(scope="module")
def database_kind(request: pytest.FixtureRequest, _server_first: None) -> str:
    """``sqlite`` or ``postgresql``."""
    return str(request.param)


@pytest.fixture(scope="module")
def new_database(request: pytest.FixtureRequest, database_kind: str) -> NewDatabase:
    """For what outlives a test."""
    if database_kind == SQLITE:
        return lambda: nullcontext("")
    address: str = request.getfixturevalue("postgres_server")
    return lambda: database(address)


@pytest.fixture
def database_url(new_database: NewDatabase) -> Iterator[str]:
    """Of one test."""
    with new_database() as url:
        yield url
