"""One writer: jobs become sheets, many at a time, and a sheet is one transaction.

A statement whose answer was lost with its connection is looked for before anything else is done: it is there, or it is sent again, or, when the
database stays away for too long, whoever waits is told that nobody knows yet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from dsec.errors import Busy, Conflict, DsecError, StoreDamaged
from dsec.failpoints import reach
from dsec.ports.journal import Unsettled
from dsec.stores.ledger import Head
from dsec.stores.postgres import sql
from dsec.stores.postgres.book import Book, Found, LivingRow, Sheet, arguments_of, spec_digest
from dsec.stores.postgres.faults import REFUSALS, is_gone, is_read_only, translate
from dsec.stores.postgres.line import Line
from dsec.stores.sandbox_codec import from_row

T = TypeVar("T")

_BATCH: Final = 256
_BOUND: Final = 4096
_BOUND_BYTES: Final = 64 * 2**20
_KEPT_BYTES: Final = 16 * 2**20
_LARGE: Final = 100  # chains: such a job is a transaction of its own
_SENDS: Final = 5  # of one sheet, by connections that are lost again and again
_LOOK_SECONDS: Final = (
    1.0  # between two looks for what became of a sheet, while nobody asks for anything else
)


@dataclass(slots=True)
class Job(Generic[T]):
    """What is decided on a sheet.

    Attributes:
        apply: stages everything, or raises; given the rows that ``probe`` found.
        names: chains that it touches. rows: also the sandboxes that they are of. new: they should not be there. specs: that it may need.
        probe: what else must be read first; such a job is alone on its sheet. size: bytes, roughly.
    """

    apply: Callable[[Sheet, list[Any]], T]
    names: tuple[str, ...] = ()
    rows: bool = False
    new: bool = False
    specs: tuple[str, ...] = ()
    probe: tuple[str, tuple[Any, ...]] | None = None
    size: int = 0


@dataclass(slots=True)
class _Waiting:
    job: Job[Any]
    future: asyncio.Future[Any]
    value: Any = None
    probed: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class _Doubt:
    """A sheet of which nobody knows whether it was stored, and the fates of its jobs: (what they give, who wants to know)."""

    sheet: Sheet
    fates: list[tuple[Any, asyncio.Future[Any]]] = field(default_factory=list)

    def end(self, *, stored: bool) -> None:
        """It is known."""
        for value, fate in self.fates:
            if fate.done():
                continue
            if stored:
                fate.set_result(value)
            else:
                fate.cancel()


class Writer:
    """Runs jobs in the order in which they came.

    Args:
        keep: sheets are kept until :meth:`flushed` says that the server has them on its disk: it may acknowledge before.
        owner: the mark of this engine in the database.
    """

    def __init__(self, line: Line, book: Book, *, keep: bool, owner: tuple[int, bytes]) -> None:
        self._line = line
        self._book = book
        self._keep = keep
        self._owner = owner
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._doubt: _Doubt | None = None
        self.kept: deque[Sheet] = deque()
        self.kept_bytes = 0
        self.committed: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def run(self, job: Job[T]) -> T:
        """When this returns, what the job staged is stored. Cancelled, it is done wholly or not at all.

        Raises:
            Busy: too many jobs wait. Conflict: the store is closed.
            Unsettled: the database is away, and nobody knows yet whether this was stored. RuntimeUnavailable: it was not.
            StorageFull, StoreDamaged: nothing was stored.
        """
        if self._closing:
            raise Conflict("the journal is closed")
        if len(self._queue) >= _BOUND or self._queued_bytes + job.size > _BOUND_BYTES:
            raise Busy(f"{len(self._queue)} appends wait, the bound is {_BOUND}", queued=len(self._queue))
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._queued_bytes += job.size
        self._wake.set()
        value: T = await waiting.future
        return value

    async def close(self) -> None:
        """Do what is queued, and refuse the rest."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        if self._doubt is not None:
            self._doubt.end(stored=False)

    def flushed(self, position: int) -> None:
        """The server has all records up to that position on its disk."""
        while self.kept and self.kept[0].position <= position:
            self.kept_bytes -= _bytes_of(self.kept.popleft())

    async def recover(self, connection: Any) -> None:
        """The connection was made again: what the server acknowledged and lost is stored again.

        Raises:
            Conflict: another engine has written meanwhile. StoreDamaged: records are missing.
        """
        marks = {row[0]: (row[1], row[2]) for row in await connection.fetch(sql.MARKS)}
        if marks.get("owner") != self._owner:
            raise Conflict(
                "another engine has had this database meanwhile",
                hint="one engine at a time: open this one again",
            )
        last = await connection.fetchval(sql.LAST)
        for sheet in self.kept:
            if sheet.position > last:
                await _send(connection, sheet)
                last = sheet.position
        if last < self._book.position:
            raise StoreDamaged(
                f"the database lost records: it has {last}, and has acknowledged {self._book.position}",
                hint="run `dsec audit verify`; is `fsync` off there?",
            )

    async def _work(self) -> None:
        while True:
            while not self._queue:
                if self._closing:
                    return
                self._wake.clear()
                await self._woken()
            batch = self._take()
            try:
                await self._together(batch)
            except Exception as exc:  # noqa: BLE001 - every waiter must be told, whatever happened
                error = translate(exc)
                for waiting in batch:
                    _tell(waiting, error)

    async def _woken(self) -> None:
        """Somebody asks for something. Until then it is looked what became of a sheet in doubt."""
        while self._doubt is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._wake.wait()
                    return
            with suppress(DsecError, *REFUSALS):
                await self._find_out(await self._line.ready(patience=0.0))
        await self._wake.wait()

    def _take(self) -> list[_Waiting]:
        """Those that go into one transaction: a job that reads or is large is alone."""
        batch: list[_Waiting] = []
        while self._queue and len(batch) < _BATCH:
            alone = self._queue[0].job.probe is not None or len(self._queue[0].job.names) > _LARGE
            if alone and batch:
                break
            batch.append(self._queue.popleft())
            self._queued_bytes -= batch[-1].job.size
            if alone:
                break
        return batch

    async def _together(self, batch: list[_Waiting]) -> None:
        found = await self._line.use(lambda connection: self._look(connection, batch))
        sheet, done = Sheet(self._book, found), []
        for waiting in batch:
            own = Sheet(self._book, found, sheet)
            try:
                waiting.value = waiting.job.apply(own, waiting.probed)
            except Exception as exc:  # noqa: BLE001 - it is told to the one who waits
                _tell(waiting, exc)
            else:
                sheet.take(own)
                done.append(waiting)
        if not sheet.empty:
            try:
                await self._store(sheet)
            except (DsecError, *REFUSALS) as error:
                self._leave_open(sheet, done, translate(error))
                raise
        for waiting in done:
            if not waiting.future.done():
                waiting.future.set_result(waiting.value)
        self.committed()

    async def _look(self, connection: Any, batch: list[_Waiting]) -> Found:
        """Read what the jobs need and memory does not hold."""
        await self._find_out(connection)
        found = Found({}, {}, {})
        names: dict[str, None] = {}
        for waiting in batch:
            job = waiting.job
            known = self._book.rows if job.rows else self._book.heads
            names |= dict.fromkeys(n for n in job.names if n not in self._book.heads or n not in known)
            texts = [text for text in job.specs if text not in self._book.spec_numbers]
            if texts:
                found.specs |= dict(
                    await connection.fetch(sql.SPECS, [spec_digest(text) for text in set(texts)])
                )
            if job.probe is not None:
                waiting.probed = await connection.fetch(job.probe[0], *job.probe[1])
        if names:
            await self._read_heads(connection, list(names), found)
            fresh = {name for waiting in batch if waiting.job.new for name in waiting.job.names}
            for name in names:
                if name not in found.heads and name not in fresh:
                    await self._find_dropped(connection, name, found)
        return found

    async def _read_heads(self, connection: Any, names: list[str], found: Found) -> None:
        for row in await connection.fetch(sql.HEADS, names):
            name, number, seq, digest = row[:4]
            if seq is None:
                await self._find_dropped(connection, name, found)
                before = found.heads.get(name)
                found.heads[name] = Head(number, *((before.seq, before.digest) if before else (0, bytes(32))))
            else:
                found.heads[name] = Head(number, seq, digest)
            if row[6] is not None:
                found.rows[name] = _row_of(number, row, self._book)

    async def _find_dropped(self, connection: Any, name: str, found: Found) -> None:
        row = await connection.fetchrow(sql.DROPPED_AT, name)
        if row is not None:
            found.heads[name] = Head(0, int(row[0]), bytes.fromhex(row[1]))

    def _leave_open(self, sheet: Sheet, jobs: list[_Waiting], error: DsecError) -> None:
        """If nobody knows whether that sheet was stored, tell those of its jobs so, and let them hear of it when it is known."""
        if self._doubt is None or self._doubt.sheet is not sheet:
            return
        loop = asyncio.get_running_loop()
        for waiting in jobs:
            fate: asyncio.Future[Any] = loop.create_future()
            self._doubt.fates.append((waiting.value, fate))
            if not waiting.future.done():
                words = f"{error.message}; whether this was stored is found out when it can be"
                waiting.future.set_exception(Unsettled(words, hint=error.hint, fate=fate))

    async def _store(self, sheet: Sheet) -> None:
        """Raises: RuntimeUnavailable: it was not stored, or is in doubt. StorageFull, StoreDamaged: it was not."""
        for left in reversed(range(_SENDS)):
            connection = await self._line.ready()
            reach("journal.begin")
            asyncio.get_running_loop().call_soon(reach, "journal.written")  # while the answer is awaited
            try:
                await _send(connection, sheet)
            except REFUSALS as error:
                if is_read_only(error):
                    self._line.lost()
                if not is_gone(error):
                    raise
                self._doubt = _Doubt(sheet)
                self._line.lost()
                if not await self._is_there(await self._line.ready(), sheet):
                    self._doubt = None
                    if not left:  # it may be what the server dies of
                        raise
                    continue
            reach("journal.committed")
            self._doubt = None
            self._settled(sheet)
            return

    async def _find_out(self, connection: Any) -> None:
        """What became of a sheet whose fate could not be told."""
        doubt = self._doubt
        if doubt is not None:
            there = await self._is_there(connection, doubt.sheet)
            self._doubt = None
            if there:
                self._settled(doubt.sheet)
            doubt.end(stored=there)

    async def _is_there(self, connection: Any, sheet: Sheet) -> bool:
        if not sheet.records:
            return False  # it may be done twice
        try:
            digest = await connection.fetchval(sql.AT, sheet.position)
        except REFUSALS as error:
            if is_gone(error):
                self._line.lost()
                return await self._is_there(await self._line.ready(), sheet)
            raise
        if digest is not None and digest != sheet.records[-1][9]:
            raise StoreDamaged("the database was written to by somebody else", hint="run `dsec audit verify`")
        return digest is not None

    def _settled(self, sheet: Sheet) -> None:
        self._book.settle(sheet)
        if self._keep and sheet.records:
            self.kept.append(sheet)
            self.kept_bytes += _bytes_of(sheet)

    @property
    def crowded(self) -> bool:
        """Whether more is kept than should be: the server must be asked to write it down."""
        return self.kept_bytes > _KEPT_BYTES


async def _send(connection: Any, sheet: Sheet) -> None:
    """One transaction."""
    if not sheet.extra:
        if len(sheet.records) == 1 and not sheet.new_chains and not sheet.changes:
            await connection.execute(sql.INSERT, *sheet.records[0])
        else:
            await connection.execute(sql.STORE, *arguments_of(sheet))
        return
    async with connection.transaction():
        if sheet.records:
            await connection.execute(sql.STORE, *arguments_of(sheet))
        for statement, arguments, rows in sheet.extra:
            status = await connection.execute(statement, *arguments)
            if rows >= 0 and int(status.rpartition(" ")[2]) != rows:
                raise StoreDamaged("a row was changed by somebody else", hint="run `dsec audit verify`")


def _row_of(number: int, row: Any, book: Book) -> LivingRow:
    return number, from_row(tuple(row[5:]), book.decode)


def _bytes_of(sheet: Sheet) -> int:
    return sum(len(record[8]) + 1000 for record in sheet.records)


def _tell(waiting: _Waiting, error: BaseException) -> None:
    """A copy for each: tracebacks of several must not grow on one exception."""
    if waiting.future.done():
        return
    if isinstance(error, DsecError):
        error = type(error)(error.message, hint=error.hint, **error.facts)
    waiting.future.set_exception(error)
