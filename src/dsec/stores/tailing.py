"""The records of all chains in the order in which they were stored, read beside the journal's owner."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.errors import NotFound
from dsec.model.journal import Record
from dsec.stores import journal_sql as sql
from dsec.stores import schema
from dsec.stores.retention import ACT, ENGINE, drops_of
from dsec.stores.rows import record_of
from dsec.stores.schema import translated

# Keys of records: see schema.py. 4294967295 is the last number that a record of a chain can have.
_OF_CHAIN: Final = """
    SELECT r.position, c.name, r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM chain c JOIN record r ON r.id > c.number << 32 AND r.id <= (c.number << 32) + 4294967295
    WHERE c.name = ? AND r.position > ? ORDER BY r.id LIMIT ?
"""
_DROPS: Final = """
    SELECT r.payload FROM chain c JOIN record r ON r.id > c.number << 32 AND r.id <= (c.number << 32) + 4294967295
    WHERE c.name = ? AND r.act = ? AND r.position > ? ORDER BY r.id
"""
_BEFORE: Final = "SELECT min(position) FROM record WHERE at >= ?"
_LAST: Final = "SELECT max(position) FROM record"


class JournalTail:
    """An open journal, read in order. Blocking; used by one thread at a time.

    Args:
        directory: of the journal.

    Raises:
        NotFound: there is no journal. StoreDamaged: it cannot be read, or its owner has not brought it up to this version yet.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / schema.DATABASE
        if not self._path.exists():
            raise NotFound(f"there is no journal in {directory}", hint="`dsec create` makes a first sandbox")
        self._file = _identity(self._path)
        self._db: sqlite3.Connection = schema.connect(self._path, read_only=True)

    def tail(self, after: int, limit: int, chain: str = "") -> tuple[tuple[int, Record], ...]:
        """Records with a position above ``after``, of one chain or of all."""
        with translated():
            if chain:
                rows = self._db.execute(_OF_CHAIN, (chain, max(after, 0), limit)).fetchall()
            else:
                rows = self._db.execute(sql.TAIL, (max(after, 0), limit)).fetchall()
        return tuple((row[0], record_of(row[1], row[2:])) for row in rows)

    def lost(self, after: int, before: int) -> dict[str, int]:
        """Chains that were dropped and whose last record was between these positions, with its number."""
        return {
            name: seq for name, seq, position in self._drops(after) if position and after < position < before
        }

    def ended(self, chain: str) -> tuple[int, int] | None:
        """Position (0 = it is not known) and number of the last record of a chain that was dropped."""
        found = [(position, seq) for name, seq, position in self._drops(0) if name == chain]
        return found[-1] if found else None

    def _drops(self, after: int) -> Iterator[tuple[str, int, int]]:
        """Name, number and position of the last record of each chain that was dropped: see retention.py."""
        with translated():
            rows = self._db.execute(_DROPS, (ENGINE, ACT, after)).fetchall()
        for (payload,) in rows:
            yield from drops_of(payload)

    def position_at(self, since: float) -> int:
        """The position before the first record that is not older (seconds since the epoch)."""
        with translated():
            found = self._db.execute(_BEFORE, (int(since * 1_000_000),)).fetchone()[0]
            if found is not None:
                return int(found) - 1
            return int(self._db.execute(_LAST).fetchone()[0] or 0)

    def replaced(self) -> bool:
        """Whether the file is another one by now."""
        return _identity(self._path) != self._file

    def close(self) -> None:
        """Let go of it."""
        self._db.close()


def _identity(path: Path) -> tuple[int, int]:
    try:
        info = os.stat(path)
    except OSError:
        return (0, 0)
    return (info.st_dev, info.st_ino)
