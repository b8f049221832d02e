"""What a journal needs done beside its writer: signing heads, and keeping the write-ahead log short."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dsec.errors import DsecError
from dsec.stores.checkpoints import CheckpointFile
from dsec.stores.ledger import Ledger
from dsec.stores.retention import Retention
from dsec.stores.schema import begin_log, transaction, translated
from dsec.stores.writer import Writer

_LOG: Final = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 5.0
PATIENCE: Final = 10.0
_COMMIT_BYTES: Final = 3 * 4120  # what a commit writes to the log, roughly, and its payload
_QUIET_SECONDS: Final = 0.01
_QUIET_TRIES: Final = 50
_OVERDUE: Final = 3  # times as much as the log should hold
_NOTED: Final = "UPDATE mark SET number = ?, digest = ? WHERE name = 'checkpoint'"
_SIGNED: Final = "UPDATE mark SET number = ? WHERE name = 'signed'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When the keeper acts.

    Attributes:
        records: sign after so many records …
        seconds: … or so long after the first unsigned one.
        wal_bytes: begin the write-ahead log anew when it is longer, roughly, and nobody appends; always at four times this.
        keep_bytes: drop the oldest chains of sandboxes that are gone when the database holds more.
    """

    records: int = 1000
    seconds: float = 30.0
    wal_bytes: int = 16 * 2**20
    keep_bytes: int = 512 * 2**20


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
        pace: Pace,
        now: Callable[[], float],
    ) -> None:
        self._db = db
        self._writer = writer
        self._ledger = ledger
        self._file = file
        self._retention = Retention(db, writer, ledger, keep_bytes=pace.keep_bytes, now=now)
        self._pace = pace
        self._now = now
        self._commits = 0
        self._begun_at = 0
        self._look_at = pace.wal_bytes
        self._signed_at = time.monotonic()
        self._nudged = False
        self._closing = False
        self._room = threading.Event()  # set when heads were signed
        self._promises = threading.Lock()
        self._promised = 0
        self._wake = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._work, name="dsec-journal-keeper", daemon=True)
        self._db.execute("PRAGMA busy_timeout = 0")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def committed(self) -> None:
        """Told after each commit, by the thread that committed; costs next to nothing."""
        self._commits += 1
        if not self._nudged and self._due():
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
        with self._writer.alone():
            position, heads = self._ledger.position, dict(self._ledger.unsigned)
            self._ledger.unsigned_records = 0
            self._signed_at = time.monotonic()
        if not heads:
            return
        place = self._file.append(heads, self._now())
        # The file first, synced; then the note in the journal: the file is never behind the note.
        with self._writer.alone() as db, translated():
            with transaction(db):
                db.execute(_NOTED, (place.n, place.digest))
                db.execute(_SIGNED, (position,))
            for chain in self._ledger.unmoved(heads):
                del self._ledger.unsigned[chain]
        self._room.set()

    def take_room(self, chains: int) -> int:
        """Wait until so many more chains may come to wait for a signature, or it takes too long. Blocks.

        Returns:
            What to :meth:`give_room` when they are stored, or were not: nobody else is promised it meanwhile.
        """
        deadline = time.monotonic() + PATIENCE
        while not self._promise(chains):
            left = deadline - time.monotonic()
            if left <= 0:
                return 0
            self._room.clear()
            self._nudge()
            self._room.wait(min(left, 1.0))
        return chains

    def give_room(self, chains: int) -> None:
        """What was taken is used, or not needed."""
        with self._promises:
            self._promised -= chains

    def _promise(self, chains: int) -> bool:
        with self._promises:
            if self._ledger.room - self._ledger.reserve < self._promised + chains:
                return False
            self._promised += chains
            return True

    def shorten(self) -> None:
        """Move the write-ahead log into the database, and begin the log anew when nobody appends just now, or it is overdue.

        The bulk is moved while appends go on. For the rest they have to wait, and the commit that begins the log waits for
        the disk: it is made here, on this thread.
        """
        self._look_at = self._log_bytes() + self._pace.wal_bytes
        with translated():
            self._move()
            if not self._now_or_never():
                return
            self._move()  # little is left
            with self._writer.alone() as db:
                self._writer.release()
                try:
                    busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
                    if not busy:  # else somebody reads an older state
                        begin_log(db)
                        self._begun_at = self._log_bytes()
                finally:
                    self._writer.hold()

    def _move(self) -> None:
        with self._writer.alone():
            self._writer.hold()  # as of now: what was written before can be moved
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _now_or_never(self) -> bool:
        """Wait a little for a moment in which nobody appends; True also when there is no time for that any more."""
        for _ in range(_QUIET_TRIES):
            before = self._commits
            with self._wake:
                self._wake.wait_for(lambda: self._closing, _QUIET_SECONDS)
            overdue = self._log_bytes() - self._begun_at > _OVERDUE * self._pace.wal_bytes
            if self._closing or overdue or self._commits == before:
                return True
        return False

    def _retain(self) -> None:
        """Drop what is too much."""
        while not self._closing and self._retention.due():
            victims = self._retention.name()
            if not victims:
                return  # all that is left is of sandboxes that live, or ended just now
            self.sign()
            self._retention.drop(victims)

    def _nudge(self) -> None:
        # Called under the writer's lock; the keeper never waits for that lock while it holds this one.
        with self._wake:
            self._nudged = True
            self._wake.notify()

    def _work(self) -> None:
        while self._wait():
            try:
                if self._log_bytes() > self._look_at:
                    self.shorten()
                if self._signing_due():
                    self.sign()
                self._retain()
            except Exception as exc:  # noqa: BLE001 - whatever it is: without a keeper nothing is signed any more
                _LOG.error("the journal's keeper: %s", exc, exc_info=not isinstance(exc, DsecError))
                if self._pause():
                    return

    def _wait(self) -> bool:
        """Until there is something to do; False: the end."""
        with self._wake:
            self._nudged = False
            if not (self._closing or self._due()):
                self._wake.wait(self._pace.seconds)
            return not self._closing

    def _due(self) -> bool:
        return self._log_bytes() > self._look_at or self._ledger.unsigned_records >= self._pace.records

    def _log_bytes(self) -> int:
        """What was written to the log since it was begun: an estimate, as asking the disk takes a system call."""
        return self._commits * _COMMIT_BYTES + self._ledger.bytes

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
