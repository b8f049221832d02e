"""As :mod:`dsec.stores.tailing`, of a journal in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsec.model.journal import Record
from dsec.stores.postgres import sql
from dsec.stores.postgres.look import Session
from dsec.stores.retention import ACT, ENGINE, drops_of
from dsec.stores.rows import record_of

_OF_CHAIN: Final = """
    SELECT r.position, c.name, r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM chain c JOIN record r ON r.chain = c.number WHERE c.name = $1 AND r.position > $2 ORDER BY r.seq LIMIT $3
"""
_DROPS: Final = """
    SELECT r.payload FROM chain c JOIN record r ON r.chain = c.number
    WHERE c.name = $1 AND r.act = $2 AND r.position > $3 ORDER BY r.seq
"""
_BEFORE: Final = "SELECT min(position) FROM record WHERE at >= $1"


class PostgresTail:
    """The same questions as :class:`~dsec.stores.tailing.JournalTail`.

    Raises:
        RuntimeUnavailable: it cannot be reached. NotFound, Denied, StoreDamaged.
    """

    def __init__(self, url: str) -> None:
        self._session = Session(url)

    def tail(self, after: int, limit: int, chain: str = "") -> tuple[tuple[int, Record], ...]:
        """Records with a position above ``after``, of one chain or of all."""
        if chain:
            rows = self._session.fetch(_OF_CHAIN, chain, max(after, 0), limit)
        else:
            rows = self._session.fetch(sql.TAIL, max(after, 0), limit)
        return tuple([(row[0], record_of(row[1], tuple(row[2:]))) for row in rows])

    def lost(self, after: int, before: int) -> dict[str, int]:
        """Chains that were dropped and whose last record was between these positions, with its number."""
        return {name: seq for name, seq, position in self._drops(after) if after < position < before}

    def ended(self, chain: str) -> tuple[int, int] | None:
        """Position (0 = it is not known) and number of the last record of a chain that was dropped."""
        found = [(position, seq) for name, seq, position in self._drops(0) if name == chain]
        return found[-1] if found else None

    def _drops(self, after: int) -> Iterator[tuple[str, int, int]]:
        for (payload,) in self._session.fetch(_DROPS, ENGINE, ACT, after):
            yield from drops_of(payload)

    def position_at(self, since: float) -> int:
        """The position before the first record that is not older (seconds since the epoch)."""
        found = self._session.fetch(_BEFORE, int(since * 1_000_000))[0][0]
        return int(found) - 1 if found is not None else int(self._session.fetch(sql.LAST)[0][0])

    def replaced(self) -> bool:
        """Never: a database that is another one by now ends the connection."""
        return False

    def close(self) -> None:
        """Let go of it."""
        self._session.__exit__(None, None, None)
