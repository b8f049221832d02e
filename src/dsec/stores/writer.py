"""One writer: jobs become transactions, on the caller's thread when nothing is in the way, else many at a time.

Why both: see ``docs/adr/0003-journal-writer.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from dsec.errors import Busy, Conflict, DsecError, StoreDamaged
from dsec.failpoints import reach
from dsec.stores.chain import Prepared
from dsec.stores.ledger import Head, Ledger
from dsec.stores.memory import Memory
from dsec.stores.schema import translate

T = TypeVar("T")
Job = Callable[[], T]

_BATCH: Final = 256
_BOUND: Final = 4096
_BOUND_BYTES: Final = 64 * 2**20


@dataclass(slots=True)
class _Waiting:
    job: Job[Any]
    size: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    record: Prepared | None = None
    value: Any = None
    error: BaseException | None = None


class Writer:
    """Runs jobs in transactions, one after the other, in the order they came.

    Args:
        inline: run a job on the caller's thread when nothing waits; only where a commit does not sync.
    """

    def __init__(self, db: sqlite3.Connection, ledger: Ledger, memory: Memory, *, inline: bool) -> None:
        self._db = db
        self._ledger = ledger
        self.memory = memory
        self._inline = inline
        self._committed: Callable[[], None] = _nothing
        self._lock = threading.Lock()  # whoever holds it owns the connection and the ledger
        self._turn = (
            threading.Lock()
        )  # held while waiting for that lock: a queue that is never empty keeps nobody out
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._wake = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken: DsecError | None = None
        self._held: sqlite3.Cursor | None = None

    async def append(self, record: Prepared) -> Head:
        """Append one record, as :meth:`run` does: where that is one statement, the statement is the transaction; many that wait are few statements."""
        return await self.run(partial(self._ledger.append, record), size=len(record.payload), record=record)

    async def run(
        self, job: Job[T], *, size: int = 0, record: Prepared | None = None, long: bool = False
    ) -> T:
        """Run ``job`` in a transaction; when this returns, the transaction is as durable as was asked for.

        ``record``: the job does nothing but append it. ``long``: it takes so long that the caller's thread must not run it. A job that
        raises leaves no trace. When the caller is cancelled, the job is done wholly or not at all.

        Raises:
            Busy: too many jobs wait.
            Conflict: the store is closed.
            StorageFull, StoreDamaged: the transaction was not committed.
        """
        if self._inline and not long and not self._queue and self._lock.acquire(blocking=False):
            try:
                # The writer thread takes jobs only while it holds the lock: an empty queue now means nobody is before us.
                if not self._queue:
                    return self._bare(job) if self._is_bare(record) else self._alone(job)
            finally:
                self._lock.release()
        return await self._enqueue(job, size, record)

    def _is_bare(self, record: Prepared | None) -> bool:
        """Whether it is one INSERT."""
        return record is not None and self._ledger.is_bare(record.draft.chain)

    @contextlib.contextmanager
    def alone(self) -> Iterator[sqlite3.Connection]:
        """Own the connection from another thread for a moment; jobs queue up meanwhile."""
        with self._owned():
            yield self._db

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        """The connection and the ledger, one thread after the other: whoever has just had them lets those in who wait."""
        with self._turn:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def hold(self) -> None:
        """Keep a read of the database open, as it is now; under the lock, or before anybody else has it.

        A commit then takes two locks of the file instead of six. And none begins the write-ahead log anew, which waits for
        the disk: while a read is open the log only grows. Whoever shortens it must :meth:`release` that read.
        """
        self.release()
        self._held = self._db.execute("SELECT name FROM mark")  # of two rows one is never fetched

    def release(self) -> None:
        """End the open read; under the lock."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def tell(self, committed: Callable[[], None]) -> None:
        """Call this after every commit from now on, on the thread that committed."""
        self._committed = committed

    def transact(self, job: Job[T]) -> T:
        """Run ``job`` in a transaction on this (background) thread."""
        with self._owned():
            return self._alone(job)

    def close(self) -> None:
        """Do what is queued and refuse the rest. Blocks."""
        with self._wake:
            self._closing = True
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _alone(self, job: Job[T]) -> T:
        return self._bare(partial(self._enclosed, job))

    def _enclosed(self, job: Job[T]) -> T:
        self._db.execute("BEGIN IMMEDIATE")
        value = job()
        reach("journal.written")
        self._db.execute("COMMIT")
        return value

    def _bare(self, job: Job[T]) -> T:
        """Run what is its own transaction."""
        if self._broken is not None or self._closing:
            self._check()
        reach("journal.begin")
        try:
            value = job()
        except BaseException as exc:
            error = self._abort(exc)
            if error is exc:
                raise
            raise error from exc
        reach("journal.committed")
        self._ledger.settle()
        self.memory.settle()
        self._committed()
        return value

    def _check(self) -> None:
        if self._broken is not None:
            raise StoreDamaged(f"the journal failed before: {self._broken.message}", hint="open it again")
        if self._closing:
            raise Conflict("the journal is closed")

    def _abort(self, exc: BaseException) -> BaseException:
        """Undo the transaction; what to raise."""
        self._ledger.forget()
        self.memory.forget()
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error as failed:
            self._broken = translate(failed)
        if not isinstance(exc, sqlite3.Error):
            return exc
        error = translate(exc)
        if getattr(exc, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_FSYNC:
            self._broken = (
                error  # after a failed sync nobody knows what is on disk; a later one may succeed and lie
            )
        return error

    async def _enqueue(self, job: Job[T], size: int, record: Prepared | None) -> T:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(job, size, loop, loop.create_future(), record)
        with self._wake:
            if self._closing:
                raise Conflict("the journal is closed")
            if len(self._queue) >= _BOUND or self._queued_bytes + size > _BOUND_BYTES:
                raise Busy(f"{len(self._queue)} appends wait, the bound is {_BOUND}", queued=len(self._queue))
            self._queue.append(waiting)
            self._queued_bytes += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dsec-journal", daemon=True)
                self._thread.start()
            self._wake.notify()
        value: T = await waiting.future
        return value

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    return
            with self._owned():
                batch = self._take()
                self._together(batch)
            _tell(batch)

    def _take(self) -> list[_Waiting]:
        with self._wake:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            self._queued_bytes -= sum(waiting.size for waiting in batch)
        return batch

    def _together(self, batch: list[_Waiting]) -> None:
        """One transaction for all; a job that fails takes only itself back."""
        try:
            if self._broken is not None:
                self._check()
            reach("journal.begin")
            self._db.execute("BEGIN IMMEDIATE")
            self._steps(batch)
            reach("journal.written")
            self._db.execute("COMMIT")
            reach("journal.committed")
        except BaseException as exc:  # noqa: BLE001 - every waiter must be told, whatever happened
            error = self._abort(exc)
            for waiting in batch:
                waiting.error = waiting.error or _own(error)
            return
        self._ledger.settle()
        self.memory.settle()
        self._committed()

    def _steps(self, batch: list[_Waiting]) -> None:
        """Each in its turn; records that follow one another are stored together."""
        rows: list[tuple[Any, ...]] = []
        for waiting in batch:
            record = waiting.record
            if record is None or not self._is_bare(record):
                self._ledger.insert(rows)
                rows = []
                self._step(waiting)
                continue
            try:
                waiting.value, row = self._ledger.stage(record)
            except DsecError as exc:
                waiting.error = exc
            else:
                rows.append(row)
        self._ledger.insert(rows)

    def _step(self, waiting: _Waiting) -> None:
        mark = self._ledger.mark()
        self._db.execute("SAVEPOINT job")
        try:
            waiting.value = waiting.job()
        except sqlite3.Error:
            raise  # the transaction may be gone: all of it fails
        except Exception as exc:  # noqa: BLE001 - it is told to the one who waits
            waiting.error = exc
            self._ledger.back(mark)
            self.memory.back()
            self._db.execute("ROLLBACK TO job")
        self._db.execute("RELEASE job")


def _nothing() -> None:
    """Nobody is there yet who wants to know of a commit."""


def _own(error: BaseException) -> BaseException:
    """A copy for one waiter: tracebacks of several must not grow on one exception."""
    return (
        type(error)(error.message, hint=error.hint, **error.facts) if isinstance(error, DsecError) else error
    )


def _tell(batch: list[_Waiting]) -> None:
    """Wake the waiters, once per loop."""
    loops: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
    for waiting in batch:
        loops.setdefault(waiting.loop, []).append(waiting)
    for loop, group in loops.items():
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(_resolve, group)


def _resolve(group: list[_Waiting]) -> None:
    for waiting in group:
        if waiting.future.done():
            continue  # cancelled meanwhile
        if waiting.error is not None:
            waiting.future.set_exception(waiting.error)
        else:
            waiting.future.set_result(waiting.value)
