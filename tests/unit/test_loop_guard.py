"""The guard of conftest.py: blocking calls made by our code inside the event loop fail, the allowed ones do not."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from blockbuster import BlockingError

import dsec

pytestmark = pytest.mark.anyio


def _in_file(name: str, call: Callable[[], object]) -> Callable[[], object]:
    """A function that seems to be written in ``name`` below src/dsec, and makes ``call``."""
    scope: dict[str, Callable[[], object]] = {"call": call}
    file = str(Path(dsec.__file__).parent / name)
    exec(compile("def made(): return call()", file, "exec"), scope)
    return scope["made"]


async def test_blocking_in_the_loop_fails() -> None:
    with pytest.raises(BlockingError):
        _in_file("node/anything.py", lambda: time.sleep(0))()


async def test_blocking_in_a_thread_is_fine() -> None:
    await anyio.to_thread.run_sync(_in_file("node/anything.py", lambda: time.sleep(0)))


async def test_a_test_itself_may_block() -> None:
    time.sleep(0)  # noqa: ASYNC251 - the point


async def test_only_the_journal_may_write_inline() -> None:
    db = sqlite3.connect(":memory:")
    try:
        _in_file("stores/journal.py", lambda: db.execute("SELECT 1"))()
        with pytest.raises(BlockingError):
            _in_file("node/anything.py", lambda: db.execute("SELECT 1"))()
        with pytest.raises(BlockingError):
            _in_file("stores/journal.py", lambda: time.sleep(0))()
    finally:
        db.close()
