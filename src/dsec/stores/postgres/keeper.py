"""What the journal in PostgreSQL needs done beside its writer: signing heads, asking the server to write down what it acknowledged, and keeping the bound."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from dsec.errors import DsecError
from dsec.model.sandbox import State
from dsec.stores.chain import prepare
from dsec.stores.checkpoints import CheckpointFile
from dsec.stores.keeper import Pace
from dsec.stores.postgres import sql
from dsec.stores.postgres.book import Book, Extra, Sheet
from dsec.stores.postgres.faults import REFUSALS, is_gone, is_read_only, translate, unreachable
from dsec.stores.postgres.line import connect
from dsec.stores.postgres.writer import Job, Writer
from dsec.stores.retention import ENGINE, drop_note

_LOG: Final = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 5.0
_FLUSH_SECONDS: Final = 0.2
_ROOM_SECONDS: Final = 10.0
_AT_ONCE: Final = 400  # chains that one record names: below the bound of a payload
_STEP: Final = 2000  # records deleted in one transaction
_REST_SECONDS: Final = 600.0  # a sandbox may get late records for some time after its end


class Flusher:
    """Of a database that acknowledges before it has written: a commit that waits, on a connection of its own, brings all before it to the disk."""

    def __init__(self, url: str, book: Book, writer: Writer) -> None:
        self._url = url
        self._book = book
        self._writer = writer
        self._connection: Any = None
        self._lock = asyncio.Lock()

    async def flush(self) -> None:
        """Everything that is stored now is on the server's disk.  Raises: RuntimeUnavailable, StorageFull."""
        if not self._writer.kept:
            return
        async with self._lock:
            position = self._book.position
            try:
                if self._connection is None or self._connection.is_closed():
                    self._connection = await connect(self._url, writes=True, synchronous_commit="on")
                status = await self._connection.execute(sql.FLUSH, position)
            except REFUSALS as error:
                if is_gone(error) or is_read_only(error):
                    await self.close()
                raise translate(error) from error
            if status != "UPDATE 1":
                raise unreachable("it was restarted just now")  # the writer stores what was lost again
            self._writer.flushed(position)

    async def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


class Keeper:
    """A task of its own beside the writer's."""

    def __init__(
        self, book: Book, writer: Writer, flusher: Flusher, file: CheckpointFile, *, pace: Pace
    ) -> None:
        self._book = book
        self._writer = writer
        self._flusher = flusher
        self._file = file
        self._pace = pace
        self._wake = asyncio.Event()
        self._signed = asyncio.Event()
        self._signing = asyncio.Lock()
        self._closing = False
        self._promised = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._work()), loop.create_task(self._flush())]

    def committed(self) -> None:
        """Told after each commit."""
        if self._book.unsigned_records >= self._pace.records or self._writer.crowded:
            self._wake.set()

    async def close(self) -> None:
        """Sign what is unsigned, and end.  Raises: StorageFull, RuntimeUnavailable: it could not be signed; it will be after the next start."""
        self._closing = True
        self._wake.set()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.sign()

    async def take_room(self, chains: int) -> int:
        """Wait until so many more chains may come to wait for a signature, or it takes too long.

        Returns:
            What to :meth:`give_room` when they are stored, or were not: nobody else is promised it meanwhile.
        """
        try:
            async with asyncio.timeout(_ROOM_SECONDS):
                while self._book.room - self._book.reserve < self._promised + chains:
                    self._signed.clear()
                    self._book.unsigned_records = max(self._book.unsigned_records, self._pace.records)
                    self._wake.set()
                    await self._signed.wait()
        except TimeoutError:
            return 0
        self._promised += chains
        return chains

    def give_room(self, chains: int) -> None:
        """What was taken is used, or not needed."""
        self._promised -= chains

    async def sign(self) -> None:
        """Sign every unsigned head now.  Raises: StorageFull, RuntimeUnavailable."""
        async with self._signing:
            await self._sign()

    async def _sign(self) -> None:
        position, heads, size = self._book.position, dict(self._book.unsigned), self._book.bytes
        self._book.unsigned_records = 0
        await self._flusher.flush()  # what is signed must not be lost by the server
        if not heads:
            return
        place = await asyncio.to_thread(self._file.append, heads, self._book.now())
        # The file first, synced; then the note in the database: the file is never behind the note.
        marks = (
            ("checkpoint", place.n, place.digest),
            ("signed", position, b""),
            ("bytes", size, b""),
            ("counted", position, b""),
        )
        extra: list[Extra] = [(sql.MARK, mark, 1) for mark in marks]
        await self._writer.run(Job(lambda sheet, _: sheet.extra.extend(extra)))
        for name, head in heads.items():
            if self._book.unsigned.get(name) == head:
                del self._book.unsigned[name]
        self._signed.set()

    # Keeping the bound: see dsec.stores.retention

    async def retain(self) -> None:
        """Drop what is too much."""
        while not self._closing and self._book.bytes > self._pace.keep_bytes:
            victims = await self.name()
            if not victims:
                return  # all that is left is of sandboxes that live, or ended just now
            await self.sign()
            await self.drop(victims)

    async def name(self) -> list[tuple[int, str, int]]:
        """Record which chains are dropped next: number, name and last record of each. To be signed before :meth:`drop`."""
        most = _AT_ONCE + len(self._book.unsigned)
        before = self._book.now() - _REST_SECONDS

        def apply(sheet: Sheet, rows: list[Any]) -> list[tuple[int, str, int]]:
            signed = [row for row in rows if row[1] not in self._book.unsigned][:_AT_ONCE]
            if signed:
                sheet.append(prepare(drop_note([tuple(row)[1:] for row in signed])))
            return [(row[0], row[1], row[2]) for row in signed]

        return await self._writer.run(Job(apply, names=(ENGINE,), probe=(sql.VICTIMS, (before, most))))

    async def drop(self, victims: list[tuple[int, str, int]]) -> None:
        """Delete them, in steps."""
        step: list[tuple[int, str, int]] = []
        for victim in victims:
            for last in range(_STEP, victim[2], _STEP):  # a long one is shortened first
                await self._delete([(victim[0], victim[1], last)], whole=False)
            step.append(victim)
            if sum(seq % _STEP for _, _, seq in step) >= _STEP:
                await self._delete(step, whole=True)
                step = []
        await self._delete(step, whole=True)

    async def _delete(self, victims: list[tuple[int, str, int]], *, whole: bool) -> None:
        """One step. A chain that got a record after all is left alone."""
        numbers = [number for number, _, _ in victims]

        def apply(sheet: Sheet, rows: list[Any]) -> list[tuple[int, str, int]]:
            newest = dict(rows)
            left = [
                victim
                for victim in victims
                if victim[1] not in self._book.unsigned
                and (not whole or newest.get(victim[0], victim[2]) == victim[2])
            ]
            sheet.extra.append((sql.DELETE, ([v[0] for v in left], [v[2] for v in left]), -1))
            if whole:
                sheet.extra.append((sql.FORGET, ([victim[0] for victim in left],), -1))
            return left

        if not victims:
            return
        details = await self._writer.run(Job(lambda _, rows: rows, probe=(sql.DROPPING, (numbers,))))
        size = sum(
            row[0]
            for row in await self._writer.run(
                Job(lambda _, rows: rows, probe=(_SIZES, (numbers, [v[2] for v in victims])))
            )
        )
        dropped = {victim[1] for victim in await self._writer.run(Job(apply, probe=(sql.NEWEST, (numbers,))))}
        self._book.bytes = max(0, self._book.bytes - size)
        specs = set()
        for _, name, project, state, spec in details if whole else ():
            if name in dropped:
                specs.add(spec)
                self._book.tally.stage(project, State(state), None)
        self._book.tally.settle()
        for name in dropped:
            self._book.drop(name)
        if specs:
            await self._writer.run(drop_specs(self._book, specs))

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.seconds):
                    await self._wake.wait()
            try:
                if self._book.unsigned:
                    await self.sign()
                await self.retain()
            except DsecError as exc:
                _LOG.error("the journal's keeper: %s", exc)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            with contextlib.suppress(DsecError):  # the writer finds out by itself, and what is kept stays
                await self._flusher.flush()


_SIZES: Final = """
    SELECT coalesce(sum(octet_length(payload) + 250), 0)::bigint FROM record, unnest($1::bigint[], $2::bigint[]) AS v (number, last)
    WHERE record.chain = v.number AND record.seq <= v.last
"""


def drop_specs(book: Book, numbers: set[int]) -> Job[None]:
    """Those of these that no sandbox has any more. What memory knows of their numbers is forgotten before: no sheet uses one meanwhile."""

    def apply(sheet: Sheet, rows: list[Any]) -> None:
        del rows
        book.spec_numbers.clear()
        sheet.extra.append((sql.DROP_SPECS, (sorted(numbers),), -1))

    return Job(apply, probe=("SELECT 1", ()))
