"""What a store knows without asking its database, as of the last commit."""

from __future__ import annotations

import sqlite3
from typing import Final

from dsec.model.sandbox import SandboxInfo, State
from dsec.stores.living import Living
from dsec.stores.specs import Decoder, Specs
from dsec.stores.tally import Tally

# A class that is not `live` is a state: those are counted from the index alone.
_COUNTS: Final = """
    SELECT project, class, count(*) FROM chain WHERE project IS NOT NULL AND class <> 'live' GROUP BY project, class
    UNION ALL
    SELECT project, state, count(*) FROM chain WHERE class = 'live' GROUP BY project, state
"""


class Memory:
    """Living sandboxes, counts and numbers of specifications. Used by one thread at a time, as the ledger is."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.living = Living()
        self.tally = Tally()
        self.specs = Specs(db)
        self.decode = Decoder()
        self._db = db

    def recover(self) -> None:
        """Count what is stored. Some tenths of a second for millions."""
        self.tally.load(self._db.execute(_COUNTS))

    def stage(self, number: int, before: State | None, info: SandboxInfo) -> None:
        """A sandbox was written in this transaction: the last thing that a job does, as nothing may fail after it."""
        self.living.stage(number, info)
        self.tally.stage(info.spec.project, before, info.state)

    def settle(self) -> None:
        """The transaction was committed."""
        self.living.settle()
        self.tally.settle()

    def back(self) -> None:
        """A job failed before it staged anything, and was undone."""
        self.specs.forget()

    def forget(self) -> None:
        """The transaction was rolled back, or its fate is unknown: what it touched is read again."""
        self.living.forget()
        self.tally.forget()
        self.specs.forget()
