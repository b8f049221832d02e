"""What errors of SQLite mean to a caller."""

from __future__ import annotations

import sqlite3

import pytest

from dsec.errors import Busy, Denied, DsecError, StorageFull, StoreDamaged
from dsec.stores.schema import translate


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (sqlite3.SQLITE_FULL, StorageFull),
        (sqlite3.SQLITE_IOERR_WRITE, StorageFull),
        (sqlite3.SQLITE_BUSY, Busy),
        (sqlite3.SQLITE_LOCKED, Busy),
        (sqlite3.SQLITE_CANTOPEN, Denied),
        (sqlite3.SQLITE_READONLY, Denied),
        (sqlite3.SQLITE_CORRUPT, StoreDamaged),
        (sqlite3.SQLITE_IOERR_READ, StoreDamaged),
    ],
)
def test_errors_of_sqlite(code: int, meaning: type[DsecError]) -> None:
    error = sqlite3.OperationalError("it says so")
    error.sqlite_errorcode, error.sqlite_errorname = code, "SQLITE_X"
    found = translate(error)
    assert type(found) is meaning
    assert found.hint
    assert "it says so" in found.message
