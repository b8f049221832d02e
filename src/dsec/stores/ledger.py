"""Appending to chains inside a transaction, and the heads of chains in memory."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dsec.errors import StorageFull
from dsec.model.journal import Record
from dsec.stores.chain import GENESIS, Prepared, link_fields

_INSERT: Final = "INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_CHAIN: Final = "SELECT number FROM chain WHERE name = ?"
_NEW_CHAIN: Final = "INSERT INTO chain (name) VALUES (?)"
_HEAD: Final = "SELECT seq, digest FROM record WHERE chain = ? ORDER BY seq DESC LIMIT 1"
_UNSIGNED: Final = "INSERT OR IGNORE INTO unsigned VALUES (?)"
_RECOVER: Final = "SELECT c.name, c.number FROM unsigned u JOIN chain c ON c.number = u.chain"


@dataclass(frozen=True, slots=True)
class Head:
    """The newest record of a chain; seq 0 when there is none yet."""

    number: int
    seq: int
    digest: bytes


class Ledger:
    """Heads as of the last commit, and those of the transaction under way. Used by one thread at a time.

    Args:
        now: seconds since the epoch.
        cached: how many heads are kept in memory.
        unsigned_max: chains that may wait for a signature before appends are refused.
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
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self._staged: dict[str, Head] = {}
        self._undo: list[tuple[str, Head | None]] = []
        self.unsigned: dict[str, Head] = {}
        self.unsigned_records = 0

    def recover(self) -> None:
        """Find the chains whose heads were not signed when the last owner ended."""
        for name, number in self._db.execute(_RECOVER).fetchall():
            self.unsigned[name] = self._stored_head(number)
        self.unsigned_records = len(self.unsigned)

    def is_bare(self, chain: str) -> bool:
        """Whether the next append to ``chain`` is a single INSERT."""
        return chain in self._heads and chain in self.unsigned

    def append(self, prepared: Prepared) -> Record:
        """Insert one record; it counts once the transaction is committed and :meth:`settle` was called.

        Raises:
            StorageFull: signed checkpoints could not be written for too long.
        """
        draft, payload, payload_digest = prepared
        chain, staged = draft.chain, self._staged
        before = staged.get(chain) if staged else None
        head = before or self._heads.get(chain) or self._find(chain)
        if chain not in self.unsigned and before is None:
            self._mark_unsigned(head.number)
        seq, at, phase = head.seq + 1, int(self._now() * 1_000_000), str(draft.phase)
        fields = (chain, seq, at, draft.act, phase, draft.ref, draft.actor)
        digest = link_fields(fields, payload_digest=payload_digest, previous=head.digest)
        self._db.execute(_INSERT, (head.number, *fields[1:], payload, payload_digest, digest))
        self._undo.append((chain, before))
        staged[chain] = Head(head.number, seq, digest)
        return Record(
            chain=chain,
            seq=seq,
            at=at / 1_000_000,
            act=draft.act,
            phase=draft.phase,
            ref=draft.ref,
            actor=draft.actor,
            payload=draft.payload,
            digest=digest.hex(),
        )

    def mark(self) -> int:
        """A point to go :meth:`back` to, with a savepoint."""
        return len(self._undo)

    def back(self, mark: int) -> None:
        """Forget what was staged since ``mark``."""
        while len(self._undo) > mark:
            chain, before = self._undo.pop()
            if before is None:
                del self._staged[chain]
            else:
                self._staged[chain] = before

    def settle(self) -> None:
        """The transaction was committed."""
        self.unsigned_records += len(self._undo)
        for chain, head in self._staged.items():
            self._heads[chain] = self.unsigned[chain] = head
            self._heads.move_to_end(chain)
        while len(self._heads) > self._cached:
            self._heads.popitem(last=False)
        self._staged, self._undo = {}, []

    def forget(self) -> None:
        """The transaction was rolled back, or its fate is unknown: read those heads again."""
        for chain in self._staged:
            self._heads.pop(chain, None)
        self._staged.clear()
        self._undo.clear()

    def signed(self, heads: dict[str, Head]) -> list[int]:
        """``heads`` are signed; the numbers of the chains that have not moved since."""
        done = [chain for chain, head in heads.items() if self.unsigned.get(chain) == head]
        return [self.unsigned.pop(chain).number for chain in done]

    def _mark_unsigned(self, number: int) -> None:
        if len(self.unsigned) + len(self._staged) >= self._unsigned_max:
            raise StorageFull(
                f"{len(self.unsigned)} chains wait for a signed checkpoint, the bound is {self._unsigned_max}",
                hint="checkpoints cannot be written; look at the file system that holds them",
            )
        self._db.execute(_UNSIGNED, (number,))

    def _find(self, chain: str) -> Head:
        """The head of a chain that is not in memory."""
        row = self._db.execute(_CHAIN, (chain,)).fetchone()
        if row is not None:
            return self._stored_head(row[0])
        number = self._db.execute(_NEW_CHAIN, (chain,)).lastrowid
        assert number is not None
        return Head(number, 0, GENESIS)

    def _stored_head(self, number: int) -> Head:
        row = self._db.execute(_HEAD, (number,)).fetchone()
        return Head(number, *row) if row else Head(number, 0, GENESIS)
