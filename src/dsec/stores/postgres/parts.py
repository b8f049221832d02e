"""Everything behind an open journal in PostgreSQL, put together and taken apart."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import asyncpg  # type: ignore[import-untyped]
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dsec.errors import StorageFull, StoreDamaged
from dsec.model.journal import Draft, Json, Phase
from dsec.stores import checkpoints
from dsec.stores.chain import prepare
from dsec.stores.keeper import Pace
from dsec.stores.ledger import Head
from dsec.stores.parts import CHECKPOINTS
from dsec.stores.postgres import identity, sql
from dsec.stores.postgres.book import Book, Sheet, marks_of
from dsec.stores.postgres.faults import REFUSALS, is_gone, translate
from dsec.stores.postgres.keeper import Flusher, Keeper
from dsec.stores.postgres.line import Line, connect
from dsec.stores.postgres.tables import HEAD
from dsec.stores.postgres.writer import Job, Writer
from dsec.stores.schema import DATABASE, Durability

READERS: Final = 4  # connections
_TRIES: Final = 3
_LOG: Final = logging.getLogger(__name__)
_MINE: Final = "SELECT digest FROM mark WHERE name = 'key'"
_CLAIM: Final = "INSERT INTO mark VALUES ('key', 0, $1)"


class Parts:
    """Made by :meth:`open`."""

    url: str
    file_path: Path
    public: Ed25519PublicKey
    book: Book
    line: Line
    writer: Writer
    keeper: Keeper
    _flusher: Flusher
    _file: checkpoints.CheckpointFile
    _pool: Any

    @classmethod
    async def open(
        cls,
        url: str,
        directory: Path,
        key: Path,
        *,
        engine_id: str,
        durability: Durability,
        pace: Pace,
        now: Callable[[], float],
        patience: float,
        lock_patience: float,
    ) -> Parts:
        """Raises: see :meth:`~dsec.stores.postgres.store.PostgresStore.open`."""
        self = cls()
        self.url = identity.check_url(url)
        self.file_path = directory / CHECKPOINTS
        settings = {"synchronous_commit": "on" if durability == "disk" else "off"}
        self.line = Line(self.url, settings=settings, patience=patience, lock_patience=lock_patience)
        self.book = Book(now)
        async with contextlib.AsyncExitStack() as stack:
            owner = (0, engine_id.encode())

            async def claim(connection: Any) -> None:
                nonlocal owner
                owner = await self._claim(connection, directory, key, engine_id)
                self.line.owner = owner[0]

            async def again(connection: Any) -> None:
                await (self.writer.recover(connection) if hasattr(self, "writer") else claim(connection))

            await self.line.open(again)
            stack.push_async_callback(self.line.close)
            self.writer = Writer(self.line, self.book, keep=durability == "process", owner=owner)
            place, torn = await self._recover()
            self._file = await asyncio.to_thread(
                checkpoints.CheckpointFile, self.file_path, self._key, engine_id, place
            )
            stack.callback(self._file.close)
            self._pool = await self._make_pool()
            stack.push_async_callback(self._end_pool)
            self._flusher = Flusher(self.url, self.book, self.writer)
            stack.push_async_callback(self._flusher.close)
            self.keeper = Keeper(self.book, self.writer, self._flusher, self._file, pace=pace)
            self.writer.committed = self.keeper.committed
            self.writer.start()
            stack.push_async_callback(self.writer.close)
            if torn:
                await self._cut(torn)
            self.keeper.start()
            self._stack = stack.pop_all()
        return self

    _key: Ed25519PrivateKey
    _stack: contextlib.AsyncExitStack

    async def close(self) -> None:
        """Raises: StorageFull, RuntimeUnavailable: the last heads could not be signed; they will be after the next start."""
        async with self._stack:
            await self.keeper.close()

    async def query(self, text: str, *values: Any) -> list[Any]:
        """Rows, from one of the readers; asked again when the server went meanwhile.  Raises: RuntimeUnavailable, StoreDamaged."""
        for left in reversed(range(_TRIES)):
            try:
                rows: list[Any] = await self._pool.fetch(text, *values)
            except REFUSALS as error:
                if not is_gone(error) or not left:
                    raise translate(error) from error
                await self._reached()
            else:
                return rows
        raise AssertionError

    async def _reached(self) -> None:
        """The server is there again, and so is all that it acknowledged."""
        await self.writer.run(Job(lambda _, rows: rows, probe=("SELECT 1", ())))

    async def _claim(self, connection: Any, directory: Path, key: Path, engine_id: str) -> tuple[int, bytes]:
        """Recognise the database, make it where it is empty, and mark it as this engine's; the mark."""
        made = await identity.is_there(connection)
        self._key = await asyncio.to_thread(_key_of, directory, key, made)
        self.public = self._key.public_key()
        if not made or await identity.written(connection) != HEAD:
            await identity.bring_up(self.url)
        await identity.check_tables(connection)
        mine = hashlib.sha256(self.public.public_bytes_raw()).digest()
        async with connection.transaction():
            await connection.execute("SET LOCAL synchronous_commit = on")  # whose it is outlives the server
            marks = marks_of([tuple(row) for row in await connection.fetch(sql.MARKS)])
            known = await connection.fetchval(_MINE)
            if known is None and marks["checkpoint"][0] == 0:
                await connection.execute(_CLAIM, mine)
            elif known != mine:
                raise StoreDamaged(
                    "the database belongs to another engine's home: it was signed with another key",
                    hint="name a database of its own, or restore the key",
                )
            owner = (marks["owner"][0] + 1, engine_id.encode())
            await connection.execute(sql.MARK, "owner", *owner)
        return owner

    async def _recover(self) -> tuple[checkpoints.Place, int]:
        """Fill the book; where the file of checkpoints ends."""
        connection, book = await self.line.ready(), self.book
        try:
            marks = marks_of([tuple(row) for row in await connection.fetch(sql.MARKS)])
            book.position = await connection.fetchval(sql.LAST)
            book.chains, book.specs = await connection.fetchrow(sql.NUMBERS)
            book.bytes = marks["bytes"][0] + await connection.fetchval(sql.SIZE, marks["counted"][0])
            for name, number, seq, digest in await connection.fetch(sql.UNSIGNED, marks["signed"][0]):
                book.unsigned[name] = Head(number, seq, digest)
            book.tally.load([tuple(row) for row in await connection.fetch(sql.COUNTS, timeout=120.0)])
        except REFUSALS as error:
            raise translate(error) from error
        except ValueError as error:
            raise StoreDamaged(f"a stored state cannot be read: {error}", hint="restore a copy") from error
        book.unsigned_records = len(book.unsigned)
        place, torn = await asyncio.to_thread(checkpoints.last, self.file_path, self.public)
        checkpoints.check_place(place, marks["checkpoint"], self.file_path)
        return place, torn

    async def _make_pool(self) -> Any:
        try:
            return await asyncpg.create_pool(
                connect=lambda *_, **__: connect(self.url, default_transaction_read_only="on"),
                min_size=0,
                max_size=READERS,
                max_inactive_connection_lifetime=0,
            )
        except REFUSALS as error:
            raise translate(error) from error

    async def _end_pool(self) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self._pool.close()
        except (TimeoutError, *REFUSALS):
            self._pool.terminate()

    async def _cut(self, torn: int) -> None:
        """Drop an unfinished last line, and say so in the journal first."""
        payload: dict[str, Json] = {"bytes": torn}
        note = prepare(Draft(chain="engine", act="journal.checkpoint_cut", phase=Phase.NOTE, payload=payload))

        def apply(sheet: Sheet, rows: list[Any]) -> None:
            del rows
            sheet.append(note)

        await self.writer.run(Job(apply, names=("engine",)))
        await asyncio.to_thread(lambda: os.truncate(self.file_path, self.file_path.stat().st_size - torn))


def _key_of(directory: Path, key: Path, made: bool) -> Ed25519PrivateKey:
    """The signing key; made where there is no journal yet.  Raises: StoreDamaged, StorageFull."""
    if (directory / DATABASE).exists():
        raise StoreDamaged(
            f"the journal of this home is {directory / DATABASE}, not in PostgreSQL",
            hint="leave the setting `database` empty, or name another home",
        )
    if made:
        return checkpoints.load_key(key)
    if (directory / CHECKPOINTS).exists():
        raise StoreDamaged(
            f"the database is empty, but {directory / CHECKPOINTS} is there",
            hint="restore the database from a copy",
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return checkpoints.load_key(key) if key.exists() else checkpoints.make_key(key)
    except OSError as exc:
        raise StorageFull(f"the journal cannot be made: {exc}") from exc
