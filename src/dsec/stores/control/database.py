"""One way to ask either database: a function of a connection, run in a transaction of its own.

SQLite is asked on one thread, PostgreSQL over asyncpg; what is asked is the same code.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Connection, Engine, StaticPool, create_engine, event

from dsec.errors import BadRequest, Busy, Conflict, Denied, RuntimeUnavailable, Unsupported
from dsec.stores.control.faults import READ_ONLY, WHAT, of_postgres, translated
from dsec.stores.control.tables import SCHEMA

T = TypeVar("T")
Work = Callable[[Connection], T]

MOST_WAITING: Final = 1000
_TOGETHER: Final = 64  # questions of one transaction
CONNECTIONS: Final = 4  # to PostgreSQL
_CONNECT_SECONDS: Final = 10.0
_STATEMENT_SECONDS: Final = 30.0
_LOCK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, and where its answer goes."""

    work: Work[Any]
    answer: asyncio.Future[Any]


_Outcome = tuple[Any, Exception | None]


class Database(ABC):
    """An open one. At most a thousand questions wait at once."""

    def __init__(self) -> None:
        self._asked: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def run(self, work: Work[T]) -> T:
        """What ``work`` returns, when all it did is committed. Whoever is cancelled meanwhile has it done wholly or not at all.

        Raises:
            Busy: too many wait. Conflict: it is closed. StorageFull, StoreDamaged, Denied: nothing was done.
            RuntimeUnavailable: nothing, or all of it, where the connection was lost with the answer.
        """
        if self._closed:
            raise Conflict(f"{WHAT} is closed")
        if len(self._asked) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} questions to {WHAT} wait already", hint="try again", retry_after=1)
        task = asyncio.get_running_loop().create_task(self._ask(work))
        self._asked.add(task)
        task.add_done_callback(self._answered)
        return await asyncio.shield(task)

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have gone

    async def close(self) -> None:
        """When all that was asked is answered; twice is no error."""
        if self._closed:
            return
        self._closed = True
        if self._asked:
            await asyncio.wait(set(self._asked))
        await self._end()

    @abstractmethod
    async def _ask(self, work: Work[T]) -> T: ...

    @abstractmethod
    async def _end(self) -> None: ...


class SqliteDatabase(Database):
    """A file, which is there (see :func:`make_file`), opened when it is first asked.

    What is asked while the thread is busy is committed together. When one of them fails each is done again alone, so a ``work``
    changes nothing but what it is given.

    Args:
        synced: every commit survives a loss of power, and not only of this process.
    """

    def __init__(self, path: Path, *, synced: bool) -> None:
        super().__init__()
        self._engine = _sqlite_engine(path, synced=synced)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsec-control")
        self._waiting: list[_Asked] = []
        self._busy = False

    async def _ask(self, work: Work[T]) -> T:
        asked = _Asked(work, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if not self._busy:
            self._next()
        return cast("T", await asked.answer)

    def _next(self) -> None:
        """Give the thread all that waits."""
        together, self._waiting = self._waiting[:_TOGETHER], self._waiting[_TOGETHER:]
        self._busy = bool(together)
        if together:
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._do, together)
            done.add_done_callback(lambda done: self._answer(together, done))

    def _answer(self, together: list[_Asked], done: asyncio.Future[list[_Outcome]]) -> None:
        for asked, (result, error) in zip(together, done.result(), strict=True):
            if asked.answer.cancelled():
                continue
            if error is None:
                asked.answer.set_result(result)
            else:
                asked.answer.set_exception(error)
        self._next()

    def _do(self, together: list[_Asked]) -> list[_Outcome]:
        """In the thread. Never raises."""
        if len(together) > 1:
            with suppress(Exception):  # then it is told to whom it belongs
                return self._committed(together)
        return [self._alone(asked) for asked in together]

    def _alone(self, asked: _Asked) -> _Outcome:
        try:
            return self._committed([asked])[0]
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            return None, error

    def _committed(self, together: list[_Asked]) -> list[_Outcome]:
        with translated(), self._engine.begin() as connection:
            return [(asked.work(connection), None) for asked in together]

    async def _end(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
        self._thread.shutdown(wait=False)


def _sqlite_engine(path: Path, *, synced: bool) -> Engine:
    # `rw` never makes a file; transactions are begun by hand, so that changes of tables are in them, too.
    engine = create_engine(
        f"sqlite:///{path.absolute().as_uri()}?mode=rw&uri=true",
        poolclass=StaticPool,
        connect_args={"isolation_level": None, "check_same_thread": False, "timeout": _LOCK_SECONDS},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        del record
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        connection.execute("PRAGMA trusted_schema = OFF")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def make_file(path: Path) -> None:
    """An empty one that only its owner reads, or the one that is there.  Raises: Denied: it is no file of ours."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Denied(f"{path}: {error.strerror}", hint="it must be a file of whoever runs this") from error
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


class PostgresDatabase(Database):
    """A database of a PostgreSQL server; what is ours is in its schema ``dsec``."""

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            import asyncpg  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
            from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415
        except ImportError as error:
            raise Unsupported(
                f"PostgreSQL cannot be used: {error}", hint="pip install 'dsec-engine[postgres]'"
            ) from error
        self._refusals = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
        self._engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=partial(  # the URL means here what it means to the journal
                asyncpg.connect,
                _checked(url),
                timeout=_CONNECT_SECONDS,
                command_timeout=_STATEMENT_SECONDS,
                target_session_attrs="read-write",  # of several hosts
                server_settings={"search_path": SCHEMA, "application_name": "dsec"},
            ),
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=_STATEMENT_SECONDS,
            pool_pre_ping=True,
        )

    async def _ask(self, work: Work[T]) -> T:
        try:
            with translated():
                return await self._do(work)
        except RuntimeUnavailable as error:
            if (
                error.facts.get("sqlstate") == READ_ONLY
            ):  # another server has its place: it is looked for anew
                await self._engine.dispose()
            raise

    async def _do(self, work: Work[T]) -> T:
        try:
            async with self._engine.begin() as connection:
                return await connection.run_sync(work)
        except self._refusals as error:  # of a connection that was never made
            raise of_postgres(error) from error

    async def _end(self) -> None:
        await self._engine.dispose()


def _checked(url: str) -> str:
    """As asyncpg takes it.  Raises: BadRequest: no URL of PostgreSQL."""
    scheme, found, rest = url.partition("://")
    if not found or scheme not in ("postgresql", "postgres", "postgresql+asyncpg"):
        raise BadRequest("database: this is no URL of a database that can be used", hint=_FORM)
    return f"postgresql://{rest}"


_FORM: Final = "postgresql://USER:PASSWORD@HOST/DATABASE"
