"""Appending to chains inside a transaction, and the heads of chains in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from itertools import chain as chained
from typing import Any, Final, NamedTuple

from dsec.errors import StorageFull, StoreDamaged
from dsec.stores.chain import GENESIS, Prepared, link_fields
from dsec.stores.journal_sql import INSERT, insert_many
from dsec.stores.schema import SEQ_BITS, SEQ_MAX

_CHAIN: Final = "SELECT number FROM chain WHERE name = ?"
_NEW_CHAIN: Final = "INSERT INTO chain (name) VALUES (?)"
# A chain that was dropped goes on where it ended: a record of the chain "engine" says where. See retention.py.
_DROPPED_AT: Final = """
    SELECT json_extract(j.value, '$[0]'), json_extract(j.value, '$[1]')
    FROM chain c JOIN record r ON r.id > c.number << 32 AND r.id <= (c.number << 32) + 4294967295
        JOIN json_each(CAST(r.payload AS TEXT), '$.chains') j
    WHERE c.name = 'engine' AND r.act = 'journal.drop' AND j.key = ? ORDER BY r.id DESC LIMIT 1
"""
_HEAD: Final = "SELECT seq, digest FROM record WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
_POSITION: Final = "SELECT coalesce(max(position), 0) FROM record"
_RECOVER: Final = """
    SELECT c.name, c.number, r.seq, r.digest
    FROM (SELECT max(id) AS id FROM record WHERE position > ? GROUP BY chain) newest
        JOIN record r ON r.id = newest.id JOIN chain c ON c.number = r.chain
    ORDER BY r.position
"""
_SIGNED: Final = "SELECT number FROM mark WHERE name = 'signed'"


class Head(NamedTuple):
    """The newest record of a chain; seq 0 when there is none yet. ``at``: microseconds since the epoch."""

    number: int
    seq: int
    digest: bytes
    at: int = 0


class Ledger:
    """Heads as of the last commit, and those of the transaction under way. Used by one thread at a time.

    Args:
        now: seconds since the epoch.
        cached: how many heads are kept in memory.
        unsigned_max: chains that may wait for a signature before appends are refused.

    Attributes:
        unsigned: heads that no checkpoint covers. position: of the newest record that is committed.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        now: Callable[[], float],
        *,
        cached: int = 4096,
        unsigned_max: int = 65536,
    ) -> None:
        self._db = db
        self._now = now
        self._cached = cached
        self._unsigned_max = unsigned_max
        self._heads: dict[str, Head] = {}
        self._staged: dict[str, Head] = {}
        self._cold: dict[str, Head] = {}
        self._undo: list[tuple[str, Head | None]] = []
        self.unsigned: dict[str, Head] = {}
        self.unsigned_records = 0
        self.bytes = 0
        self.position = 0
        self._position = 0

    def recover(self) -> None:
        """Find where the journal ends, and the chains whose heads were not signed when the last owner ended.

        Raises:
            StoreDamaged: the note of what was signed is missing.
        """
        signed = self._db.execute(_SIGNED).fetchone()
        if signed is None:
            raise StoreDamaged("the journal's note of what was signed is missing", hint="restore a copy")
        self.position = self._position = self._db.execute(_POSITION).fetchone()[0]
        for name, number, seq, digest in self._db.execute(_RECOVER, (signed[0],)):
            self.unsigned[name] = Head(number, seq, digest)
        self.unsigned_records = len(self.unsigned)

    def is_bare(self, chain: str) -> bool:
        """Whether the next append to ``chain`` is a single INSERT."""
        return chain in self._heads

    @property
    def room(self) -> int:
        """How many more chains may come to wait for a signature."""
        return self._unsigned_max - len(self.unsigned) - len(self._staged) - len(self._cold)

    @property
    def reserve(self) -> int:
        """What of that is for those who come one at a time, and do not wait."""
        return self._unsigned_max // 4

    def born(self, chain: str, number: int) -> None:
        """The caller inserted the row of a new chain in this transaction; its first record follows.

        Raises:
            StorageFull: as :meth:`append`.
        """
        self._need_room()
        self._undo.append((chain, None))
        self._staged[chain] = Head(number, 0, GENESIS)

    def append(self, prepared: Prepared) -> Head:
        """Insert one record; it counts once the transaction is committed and :meth:`settle` was called.

        Raises:
            StorageFull: signed checkpoints could not be written for too long, or the chain has no number left.
        """
        head, row = self.stage(prepared)
        self._db.execute(INSERT, row)
        return head

    def insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Of records that were staged, in few statements."""
        start, count = 0, 1 << 7
        while start < len(rows):
            while count > len(rows) - start:
                count >>= 1  # of few lengths: those statements are kept
            self._db.execute(insert_many(count), list(chained.from_iterable(rows[start : start + count])))
            start += count

    def stage(self, prepared: Prepared) -> tuple[Head, tuple[Any, ...]]:
        """As :meth:`append`; the row is for the caller to :meth:`insert`.  Raises: as :meth:`append`, and then nothing was staged."""
        chain = prepared.draft.chain
        before = self._staged.get(chain)
        head = before or self._heads.get(chain) or self._find(chain)
        if head.seq >= SEQ_MAX:
            raise StorageFull(f"{chain} holds as many records as a chain can")
        if before is None and chain not in self.unsigned:
            self._need_room()
        head, row = self._next(head, prepared)
        self._undo.append((chain, before))
        self._staged[chain] = head
        return head, row

    def first(self, number: int, prepared: Prepared) -> tuple[Any, ...]:
        """The row of the first record of a new chain: the caller inserts both in this transaction.

        For chains of which many are born at once: nobody acts in them soon, and their heads are not kept at hand.

        Raises:
            StorageFull: as :meth:`append`.
        """
        self._need_room()
        self._cold[prepared.draft.chain], row = self._next(Head(number, 0, GENESIS), prepared)
        return row

    def _next(self, head: Head, prepared: Prepared) -> tuple[Head, tuple[Any, ...]]:
        """The head after one more record, and the row of that."""
        draft, payload, payload_digest = prepared
        number, seq, at = head.number, head.seq + 1, int(self._now() * 1_000_000)
        fields = (draft.chain, seq, at, draft.act, draft.phase.value, draft.ref, draft.actor)
        digest = link_fields(fields, payload_digest=payload_digest, previous=head.digest)
        self._position += 1
        self.bytes += len(payload)
        row = (number << SEQ_BITS | seq, *fields[2:], payload, digest, self._position)
        return Head(number, seq, digest, at), row

    def mark(self) -> tuple[int, int, int]:
        """A point to go :meth:`back` to, with a savepoint."""
        return len(self._undo), self._position, len(self._cold)

    def back(self, mark: tuple[int, int, int]) -> None:
        """Forget what was staged since ``mark``. Positions are given again: where one is missing, a record was dropped."""
        staged, self._position, cold = mark
        while len(self._cold) > cold:
            self._cold.popitem()
        while len(self._undo) > staged:
            chain, before = self._undo.pop()
            if before is None:
                del self._staged[chain]
            else:
                self._staged[chain] = before

    def settle(self) -> None:
        """The transaction was committed."""
        self.unsigned_records += len(self._undo) + len(self._cold)
        self.position = self._position
        if self._cold:
            self.unsigned.update(self._cold)
            self._cold.clear()
        self._heads.update(self._staged)
        self.unsigned.update(self._staged)
        while len(self._heads) > self._cached:
            del self._heads[next(iter(self._heads))]
        self._staged.clear()
        self._undo.clear()

    def forget(self) -> None:
        """The transaction was rolled back, or its fate is unknown: read those heads again."""
        self._position = self.position
        for chain in self._staged:
            self._heads.pop(chain, None)
        self._cold.clear()
        self._staged.clear()
        self._undo.clear()

    def unmoved(self, heads: dict[str, Head]) -> list[str]:
        """Which of these chains have had no record since these were their heads."""
        return [chain for chain, head in heads.items() if self.unsigned.get(chain) == head]

    def drop(self, chain: str) -> None:
        """Its records were deleted."""
        self._heads.pop(chain, None)

    def _need_room(self) -> None:
        if self.room <= 0:
            raise StorageFull(
                f"{len(self.unsigned)} chains wait for a signed checkpoint, the bound is {self._unsigned_max}",
                hint="checkpoints cannot be written; look at the file system that holds them",
            )

    def _find(self, chain: str) -> Head:
        """The head of a chain that is not in memory."""
        row = self._db.execute(_CHAIN, (chain,)).fetchone()
        number = row[0] if row is not None else self._db.execute(_NEW_CHAIN, (chain,)).lastrowid
        assert number is not None
        head = self._stored_head(number)
        if head.seq:
            return head
        dropped = self._db.execute(_DROPPED_AT, (chain,)).fetchone()
        return Head(number, dropped[0], bytes.fromhex(dropped[1])) if dropped else head

    def _stored_head(self, number: int) -> Head:
        first = number << SEQ_BITS
        row = self._db.execute(_HEAD, (first, first + SEQ_MAX)).fetchone()
        return Head(number, *row) if row else Head(number, 0, GENESIS)
