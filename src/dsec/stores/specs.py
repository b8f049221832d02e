"""What sandboxes were asked to be, each kept once: in the database, and decoded in memory."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from dsec.model.sandbox import SandboxSpec
from dsec.stores.sandbox_codec import spec_from_json

_FIND: Final = "SELECT number FROM spec WHERE digest = ?"
_ADD: Final = "INSERT INTO spec (digest, text) VALUES (?, ?)"
_DROP: Final = """
    DELETE FROM spec WHERE number IN (SELECT value FROM json_each(?))
        AND NOT EXISTS (SELECT 1 FROM chain WHERE spec_number = spec.number)
    RETURNING number
"""
MAX_KEPT: Final = 8192  # characters: longer ones are not kept in memory
MOST_KEPT: Final = 512


class Specs:
    """The numbers of specifications. Used by one thread at a time, as the ledger is."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Of this one, in the transaction under way; a new row where there is none."""
        known = self._numbers.get(text)
        if known is not None:
            return known
        digest = sha256(text.encode("ascii")).digest()
        row = self._db.execute(_FIND, (digest,)).fetchone()
        number = row[0] if row is not None else self._db.execute(_ADD, (digest, text)).lastrowid
        assert number is not None
        if len(text) <= MAX_KEPT:
            if len(self._numbers) >= MOST_KEPT:
                del self._numbers[next(iter(self._numbers))]
            self._numbers[text] = number
        return int(number)

    def drop(self, numbers: Iterable[int]) -> None:
        """Those of these that no sandbox has any more, in the transaction under way."""
        wanted = json.dumps(sorted(set(numbers)))
        if self._db.execute(_DROP, (wanted,)).fetchall():
            self.forget()

    def forget(self) -> None:
        """Something was undone: rows that were seen may not be there."""
        self._numbers.clear()


class Decoder:
    """Specifications from their JSON. The same text is decoded once, as long as it is among the latest. Safe from any thread."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._known: dict[str, SandboxSpec] = {}

    def __call__(self, text: str) -> SandboxSpec:
        """Raises: StoreDamaged: it is not a specification."""
        known = self._known.get(text)
        if known is None:
            known = spec_from_json(text)
            if len(text) <= MAX_KEPT:
                if len(self._known) >= self._most:
                    self._known = {}  # another thread may be reading: nothing is taken from under it
                self._known[text] = known
        return known
