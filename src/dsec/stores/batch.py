"""Many sandboxes at once: what is stored of each, and the few statements that store them.

A statement lets other threads run meanwhile, and then has to wait for them: one for each row would wait that often.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from dsec.errors import Conflict
from dsec.model.journal import Draft
from dsec.model.sandbox import SandboxInfo
from dsec.stores import journal_sql as sql
from dsec.stores.chain import Prepared
from dsec.stores.ledger import Ledger
from dsec.stores.memory import Memory
from dsec.stores.rows import of_chain
from dsec.stores.sandbox_codec import Row, class_of, to_rows

_STEP: Final = 100  # rows of a statement


class One(NamedTuple):
    """Of the sandboxes of a batch."""

    info: SandboxInfo
    row: Row
    prepared: Prepared


def prepared(infos: Sequence[SandboxInfo], drafts: Sequence[Draft]) -> list[One]:
    """Each as it will be stored.  Raises: BadRequest, TooLarge."""
    rows = to_rows(infos)
    return [
        One(info, row, of_chain(info.id, draft)) for info, row, draft in zip(infos, rows, drafts, strict=True)
    ]


class Batch:
    """Stores batches, in the transaction under way. Used by one thread at a time, as the ledger is."""

    def __init__(self, db: sqlite3.Connection, ledger: Ledger, memory: Memory) -> None:
        self._db = db
        self._ledger = ledger
        self._memory = memory

    def add(self, batch: Sequence[One]) -> None:
        """The row and the first record of each.  Raises: Conflict: one exists. StorageFull."""
        number = int(self._db.execute(sql.LAST_CHAIN).fetchone()[0])
        for start in range(0, len(batch), _STEP):
            self._step(number + start + 1, batch[start : start + _STEP])
        tally = self._memory.tally
        for info, _, _ in batch:
            tally.stage(info.spec.project, None, info.state)

    def _step(self, first: int, batch: Sequence[One]) -> None:
        number_of = self._memory.specs.number
        chains: list[Any] = []
        records: list[Any] = []
        for number, (info, row, one) in enumerate(batch, first):
            chains += (number, *row[:-1], class_of(info.state), info.spec.project, number_of(row[-1]))
            records += self._ledger.first(number, one)
        if self._db.execute(sql.add_many(len(batch)), chains).rowcount != len(batch):
            raise self._conflict(first, batch)
        self._db.execute(sql.insert_many(len(batch)), records)

    def _conflict(self, first: int, batch: Sequence[One]) -> Conflict:
        """Some of them were there."""
        for number, one in enumerate(batch, first):
            if self._db.execute(sql.NUMBER, (one.info.id,)).fetchone() != (number,):
                return Conflict(f"sandbox {one.info.id} exists already", id=one.info.id)
        return Conflict("one of these sandboxes exists already")
