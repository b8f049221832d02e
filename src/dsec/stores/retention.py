"""The bound of a journal: chains of sandboxes that are gone are dropped, oldest first, and a signed record says which.

A chain is dropped whole, and only when its end is signed. First a record in the chain ``engine`` names it with its last
number and digest; then that record is signed; only then rows are deleted, in small steps. Whoever dies in between leaves
nothing that the audit cannot tell from damage, and the next one goes on.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import State
from dsec.stores.chain import decode, prepare
from dsec.stores.ledger import Ledger
from dsec.stores.schema import SEQ_BITS, SEQ_MAX, transaction, translated
from dsec.stores.writer import Writer

ENGINE: Final = "engine"
ACT: Final = "journal.drop"
_AT_ONCE: Final = 400  # chains that one record names: below the bound of a payload
_STEP: Final = 100  # records deleted while the writer is kept waiting
_REST_SECONDS: Final = 600.0  # a sandbox may get late records for some time after its end

# Each part is in the order of the index on `class`. Some of what is found may wait for a signature: hence more than is named.
_VICTIMS: Final = """
    SELECT number, name, (SELECT seq FROM record WHERE id BETWEEN number << 32 AND (number << 32) + 4294967295
                          ORDER BY id DESC LIMIT 1)
    FROM (SELECT number, name FROM (SELECT number, name FROM chain WHERE class IS NULL AND name <> 'engine' ORDER BY number LIMIT :most)
          UNION ALL
          SELECT number, name FROM (SELECT number, name FROM chain WHERE class = 'gone' AND ended < :before ORDER BY number LIMIT :most)
          UNION ALL
          SELECT number, name FROM (SELECT number, name FROM chain WHERE class = 'failed' AND ended < :before ORDER BY number LIMIT :most))
    ORDER BY number LIMIT :most
"""
_NEWEST: Final = "SELECT digest, position FROM record WHERE id = ?"
_DELETE: Final = """
    DELETE FROM record WHERE id IN (SELECT id FROM record WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?)
"""
_LATER: Final = "SELECT 1 FROM record WHERE id BETWEEN ? AND ? LIMIT 1"
_FORGET: Final = "DELETE FROM chain WHERE number = ? RETURNING project, state, spec_number"


class Victim(NamedTuple):
    """A chain that may be dropped, with its newest record."""

    number: int
    name: str
    seq: int
    digest: bytes
    position: int


def drop_note(last: Sequence[tuple[str, int, bytes, int]]) -> Draft:
    """The record that names chains which are dropped: name, and number, digest and position of the last record of each."""
    chains: dict[str, Json] = {name: [seq, digest.hex()] for name, seq, digest, _ in last}
    # In the order of the names, as the chains are once they are stored: whoever exports finds what it never saw.
    positions: list[Json] = [position for _, _, _, position in sorted(last)]
    payload: dict[str, Json] = {"chains": chains, "positions": positions}
    return Draft(chain=ENGINE, act=ACT, phase=Phase.NOTE, payload=payload)


def drops_of(payload: bytes) -> Iterator[tuple[str, int, int]]:
    """What such a record says: name, number and position of the last record (0: it is of an earlier version)."""
    facts: Any = decode(payload)
    positions = facts.get("positions") or [0] * len(facts["chains"])
    for (name, (seq, _)), position in zip(facts["chains"].items(), positions, strict=True):
        yield name, seq, position


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
        with self._writer.alone():
            unsigned = frozenset(self._ledger.unsigned)
        with translated():
            rows = self._db.execute(
                _VICTIMS, {"before": self._now() - _REST_SECONDS, "most": _AT_ONCE + len(unsigned)}
            ).fetchall()
            signed = [row for row in rows if row[1] not in unsigned][:_AT_ONCE]
            victims = [
                Victim(number, name, seq, *self._newest(number, seq)) for number, name, seq in signed if seq
            ]
        if victims:
            note = prepare(drop_note([(one.name, one.seq, one.digest, one.position) for one in victims]))
            self._writer.transact(lambda: self._ledger.append(note))
        return victims

    def drop(self, victims: list[Victim]) -> None:
        """Delete them."""
        for one in victims:
            while self._delete(one) == _STEP:
                pass

    def _newest(self, number: int, seq: int) -> tuple[bytes, int]:
        digest, position = self._db.execute(_NEWEST, (number << SEQ_BITS | seq,)).fetchone()
        return digest, position

    def _delete(self, victim: Victim) -> int:
        """One step; how many records it took. A chain that got a record after all is left alone."""
        with self._writer.alone() as db, translated():
            first = victim.number << SEQ_BITS
            # Signed or not: what came after the record that names the chain is not what was said to be dropped.
            later = db.execute(_LATER, (first + victim.seq + 1, first + SEQ_MAX)).fetchone()
            if later is not None or victim.name in self._ledger.unsigned:
                return 0
            with self._undone(), transaction(db):
                deleted = db.execute(_DELETE, (first, first + SEQ_MAX, _STEP)).rowcount
                if deleted < _STEP:
                    self._forget(db, victim)
            self._writer.memory.settle()
            self._ledger.drop(victim.name)
        return deleted

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """What was remembered of a transaction that failed is forgotten."""
        try:
            yield
        except BaseException:
            self._writer.memory.forget()
            raise

    def _forget(self, db: sqlite3.Connection, victim: Victim) -> None:
        """The row of the chain, in the transaction under way: nothing is left but what the record in the chain of the engine says."""
        memory = self._writer.memory
        for project, state, spec in db.execute(_FORGET, (victim.number,)).fetchall():
            if spec is not None:
                memory.specs.drop([spec])
                memory.tally.stage(project, State(state), None)
