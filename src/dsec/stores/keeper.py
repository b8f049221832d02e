"""What a journal needs done beside its writer: signing heads, and keeping the write-ahead log short."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from dsec.errors import DsecError
from dsec.stores.checkpoints import MAX_HEADS, CheckpointFile
from dsec.stores.ledger import Head, Ledger
from dsec.stores.schema import translated
from dsec.stores.writer import Writer

_LOG: Final = logging.getLogger(__name__)
_LOOK_EVERY: Final = 256  # commits between two looks at the size of the log
_RETRY_SECONDS: Final = 5.0
_LOCKED_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When the keeper acts.

    Attributes:
        records: sign after so many records …
        seconds: … or so long after the first unsigned one.
        wal_bytes: shorten the write-ahead log when it is longer.
    """

    records: int = 1000
    seconds: float = 30.0
    wal_bytes: int = 16 * 2**20


class Keeper:
    """A background thread of its own, so that its syncs delay no append.

    Args:
        db: a connection of its own.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        writer: Writer,
        ledger: Ledger,
        file: CheckpointFile,
        *,
        wal: Path,
        pace: Pace,
        now: Callable[[], float],
    ) -> None:
        self._db = db
        self._writer = writer
        self._ledger = ledger
        self._file = file
        self._wal = wal
        self._pace = pace
        self._now = now
        self._commits = 0
        self._signed_at = time.monotonic()
        self._look = False
        self._closing = False
        self._wake = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._work, name="dsec-journal-keeper", daemon=True)
        self._db.execute(f"PRAGMA busy_timeout = {int(_LOCKED_SECONDS * 1000)}")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def committed(self) -> None:
        """Told after each commit, by the thread that committed; costs next to nothing."""
        self._commits += 1
        if self._commits % _LOOK_EVERY == 0:
            self._look = (
                True  # the keeper looks: this thread may be the event loop's and asks the disk nothing
            )
            self._nudge()
        elif self._ledger.unsigned_records >= self._pace.records:
            self._nudge()

    def close(self) -> None:
        """Sign what is unsigned and end. Blocks.  Raises: StorageFull: it could not be signed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self.sign()

    def sign(self) -> None:
        """Sign every unsigned head now.  Raises: StorageFull."""
        while True:
            with self._writer.alone():
                heads = dict(islice(self._ledger.unsigned.items(), MAX_HEADS))
                self._ledger.unsigned_records = 0
                self._signed_at = time.monotonic()
            if not heads:
                return
            place = self._file.append(heads, self._now())
            # The file first, synced; then the note in the journal: the file is never behind the note.
            with self._writer.alone() as db, translated():
                self._note(db, heads, place.n, place.digest)
            if len(heads) < MAX_HEADS:
                return

    def shorten(self) -> None:
        """Move the write-ahead log into the database and cut it."""
        with translated():
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()  # the bulk, while appends go on
            with self._writer.alone() as db:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                # The first commit into an empty log syncs its header: better here than in an append.
                db.execute("UPDATE mark SET number = number + 1 WHERE name = 'wal'")

    def _note(self, db: sqlite3.Connection, heads: dict[str, Head], n: int, digest: bytes) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            db.execute("UPDATE mark SET number = ?, digest = ? WHERE name = 'checkpoint'", (n, digest))
            unmoved = [
                (head.number,) for chain, head in heads.items() if self._ledger.unsigned.get(chain) == head
            ]
            db.executemany("DELETE FROM unsigned WHERE chain = ?", unmoved)
            db.execute("COMMIT")
        except sqlite3.Error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        self._ledger.signed(heads)

    def _nudge(self) -> None:
        # Called under the writer's lock; the keeper never waits for that lock while it holds this one.
        with self._wake:
            self._wake.notify()

    def _work(self) -> None:
        while self._wait():
            try:
                self._look = False
                if self._wal_size() > self._pace.wal_bytes:
                    self.shorten()
                if self._signing_due():
                    self.sign()
            except DsecError as exc:
                _LOG.error("the journal's keeper: %s", exc)
                if self._pause():
                    return

    def _wait(self) -> bool:
        """Until there is something to do; False: the end."""
        with self._wake:
            if not (self._closing or self._due()):
                self._wake.wait(self._pace.seconds)
            return not self._closing

    def _due(self) -> bool:
        return self._look or self._ledger.unsigned_records >= self._pace.records

    def _signing_due(self) -> bool:
        if not self._ledger.unsigned:
            self._signed_at = time.monotonic()
            return False
        late = time.monotonic() - self._signed_at >= self._pace.seconds
        return late or self._ledger.unsigned_records >= self._pace.records

    def _pause(self) -> bool:
        """Wait before the next try; True: the end."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing, _RETRY_SECONDS)
            return self._closing

    def _wal_size(self) -> int:
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0
