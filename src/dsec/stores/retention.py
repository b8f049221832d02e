"""The bound of a journal: chains of sandboxes that are gone are dropped, oldest first, and a signed record says which.

A chain is dropped whole, and only when its end is signed. First a record in the chain ``engine`` names it with its last
number and digest; then that record is signed; only then rows are deleted, in small steps. Whoever dies in between leaves
nothing that the audit cannot tell from damage, and the next one goes on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Final, NamedTuple

from dsec.model.journal import Draft, Json, Phase
from dsec.stores.chain import prepare
from dsec.stores.ledger import Ledger
from dsec.stores.schema import SEQ_BITS, SEQ_MAX, transaction, translated
from dsec.stores.writer import Writer

ENGINE: Final = "engine"
ACT: Final = "journal.drop"
_AT_ONCE: Final = 400  # chains that one record names: below the bound of a payload
_STEP: Final = 100  # records deleted while the writer is kept waiting
_REST_SECONDS: Final = 600.0  # a sandbox may get late records for some time after its end

_VICTIMS: Final = """
    SELECT number, name, (SELECT seq FROM record WHERE id BETWEEN number << 32 AND (number << 32) + 4294967295
                          ORDER BY id DESC LIMIT 1)
    FROM chain WHERE NOT unsigned AND name <> 'engine'
        AND (state IS NULL OR (state IN ('gone', 'failed') AND ended < ?))
    ORDER BY number LIMIT ?
"""
_DIGEST: Final = "SELECT digest FROM record WHERE id = ?"
_DELETE: Final = """
    DELETE FROM record WHERE id IN (SELECT id FROM record WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?)
"""
_LATER: Final = "SELECT 1 FROM record WHERE id BETWEEN ? AND ? LIMIT 1"
_FORGET: Final = "DELETE FROM chain WHERE number = ? AND NOT unsigned"


class Victim(NamedTuple):
    """A chain that may be dropped, with its newest record."""

    number: int
    name: str
    seq: int
    digest: bytes


class Retention:
    """Used by the keeper's thread.

    Args:
        db: the keeper's connection, for reading.
        keep_bytes: what the database may hold.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        writer: Writer,
        ledger: Ledger,
        *,
        keep_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self._db = db
        self._writer = writer
        self._ledger = ledger
        self._keep = keep_bytes
        self._now = now

    def due(self) -> bool:
        """Whether the database holds more than it may."""
        with translated():
            size, pages, free = (
                int(self._db.execute(f"PRAGMA {name}").fetchone()[0])
                for name in ("page_size", "page_count", "freelist_count")
            )
        return (pages - free) * size > self._keep

    def name(self) -> list[Victim]:
        """Record which chains are dropped next; none are left when it is empty. To be signed before :meth:`drop`."""
        with translated():
            rows = self._db.execute(_VICTIMS, (self._now() - _REST_SECONDS, _AT_ONCE)).fetchall()
            victims = [
                Victim(number, name, seq, self._digest(number, seq)) for number, name, seq in rows if seq
            ]
        if victims:
            chains: dict[str, Json] = {one.name: [one.seq, one.digest.hex()] for one in victims}
            draft = Draft(chain=ENGINE, act=ACT, phase=Phase.NOTE, payload={"chains": chains})
            note = prepare(draft)
            self._writer.transact(lambda: self._ledger.append(note))
        return victims

    def drop(self, victims: list[Victim]) -> None:
        """Delete them."""
        for one in victims:
            while self._delete(one) == _STEP:
                pass

    def _digest(self, number: int, seq: int) -> bytes:
        digest: bytes = self._db.execute(_DIGEST, (number << SEQ_BITS | seq,)).fetchone()[0]
        return digest

    def _delete(self, victim: Victim) -> int:
        """One step; how many records it took. A chain that got a record after all is left alone."""
        with self._writer.alone() as db, translated():
            first = victim.number << SEQ_BITS
            # Signed or not: what came after the record that names the chain is not what was said to be dropped.
            later = db.execute(_LATER, (first + victim.seq + 1, first + SEQ_MAX)).fetchone()
            if later is not None or victim.name in self._ledger.unsigned:
                return 0
            with transaction(db):
                deleted = db.execute(_DELETE, (first, first + SEQ_MAX, _STEP)).rowcount
                if deleted < _STEP:
                    db.execute(_FORGET, (victim.number,))
            self._ledger.drop(victim.name)
        return deleted
