"""The writer's connection: the only one that changes anything, made again when it is lost.

Whoever has it holds an advisory lock of the database. PostgreSQL lets go of it when the session has ended, and with it whatever statement was under
way: so whoever has the lock again reads what became of that statement, and need not guess.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import asyncpg  # type: ignore[import-untyped]

from dsec.errors import Conflict, DsecError, RuntimeUnavailable
from dsec.stores.postgres.faults import REFUSALS, WHAT, is_gone, is_read_only, translate, unreachable
from dsec.stores.postgres.tables import SCHEMA

T = TypeVar("T")
Use = Callable[[Any], Awaitable[T]]

LOCK: Final = 0x447365634A6E6C  # "DsecJnl"
CONNECT_SECONDS: Final = 5.0
STATEMENT_SECONDS: Final = 60.0
_USES: Final = 5  # of what is done again and again, by connections that are lost each time
_FIRST_WAIT: Final = 0.05  # seconds; doubles up to the longest
_LONGEST_WAIT: Final = 2.0
# The session that has the lock is not ended for being idle, whatever is usual there.
_STAY: Final = """
    SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN ('idle_session_timeout', 'idle_in_transaction_session_timeout')
"""
_END_OURS: Final = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid = $1 AND application_name = 'dsec-journal' AND datname = current_database() AND usename = current_user
"""
_OWNER: Final = "SELECT number FROM mark WHERE name = 'owner'"
_LOG: Final = logging.getLogger(__name__)
# A server drops clients that vanished without a word, and with them the lock.
_SETTINGS: Final = {
    "search_path": SCHEMA,
    "application_name": "dsec-journal",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "jit": "off",
}


async def connect(url: str, *, writes: bool = False, **settings: str) -> Any:
    """A connection of ours, to the one of its hosts that takes changes: what another has may be late.  Raises: what asyncpg raises."""
    return await asyncpg.connect(
        url,
        target_session_attrs="read-write" if writes else "primary",
        timeout=CONNECT_SECONDS,
        command_timeout=STATEMENT_SECONDS,
        server_settings=_SETTINGS | settings,
    )


class Line:
    """Used by one task at a time.

    Args:
        settings: of the session.
        patience: seconds for which a lost connection is tried to be made again, before whoever waits is told.
        lock_patience: seconds for which the lock is waited for: a session whose client died holds it for a moment.

    Attributes:
        owner: number of the mark that this engine made in the database.
    """

    def __init__(self, url: str, *, settings: dict[str, str], patience: float, lock_patience: float) -> None:
        self._url = url
        self._settings = settings
        self._patience = patience
        self._lock_patience = lock_patience
        self._connection: Any = None
        self._pid = 0
        self._again: Use[None] | None = None
        self.owner = 0
        self.broken: DsecError | None = None
        self.whole = asyncio.Event()

    async def open(self, again: Use[None]) -> None:
        """Connect, and have ``again`` done now and after each time that the connection was made anew.

        Raises:
            Conflict: another engine has the database. RuntimeUnavailable, Denied, StoreDamaged.
        """
        try:
            await self._make()
        except REFUSALS as error:
            raise translate(error) from error
        self._again = again
        await self._use_first(again)

    async def _use_first(self, again: Use[None]) -> None:
        try:
            await again(self._connection)
        except REFUSALS as error:
            await self.close()
            raise translate(error) from error
        except BaseException:
            await self.close()
            raise
        self.whole.set()

    async def ready(self, *, patience: float | None = None) -> Any:
        """The connection, made again where it was lost.

        Args:
            patience: instead of the usual; 0 = it is tried once.

        Raises:
            RuntimeUnavailable: that took too long. Conflict, StoreDamaged: it never will be: open the journal again.
        """
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        self.lost()
        await self._make_again(self._patience if patience is None else patience)
        return self._connection

    def lost(self) -> None:
        """It is not to be used any more."""
        self.whole.clear()
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def use(self, work: Use[T]) -> T:
        """Of what may be done twice: done again where the connection was lost meanwhile.  Raises: as :meth:`ready`; what the statement raises."""
        for left in reversed(range(_USES)):
            connection = await self.ready()
            try:
                return await work(connection)
            except REFUSALS as error:
                if is_gone(error) or is_read_only(error):
                    self.lost()
                if not (is_gone(error) and left):
                    raise
        raise AssertionError

    async def close(self) -> None:
        """Let go of the database."""
        self.whole.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*REFUSALS):
                await connection.close(timeout=CONNECT_SECONDS)

    async def _make_again(self, patience: float) -> None:
        wait, deadline = _FIRST_WAIT, asyncio.get_running_loop().time() + patience
        while True:
            if self.broken is not None:
                raise _copy(self.broken)
            try:
                await self._try_again()
            except REFUSALS as error:
                self.lost()
                said: BaseException = error
            except RuntimeUnavailable as error:
                self.lost()
                said = error
            except DsecError as error:
                self.lost()
                self.broken = error
                raise
            else:
                _LOG.warning("%s is reached again", WHAT)
                return
            if asyncio.get_running_loop().time() + wait > deadline:
                raise unreachable(str(said) or type(said).__name__) from said
            await asyncio.sleep(wait)
            wait = min(wait * 2, _LONGEST_WAIT)

    async def _try_again(self) -> None:
        await self._make()
        assert self._again is not None
        await self._again(self._connection)
        self.whole.set()

    async def _make(self) -> None:
        connection = await connect(self._url, writes=True, **self._settings)
        try:
            await connection.execute(_STAY)
            await self._lock(connection)
        except BaseException:
            connection.terminate()
            raise
        self._connection, self._pid = connection, connection.get_server_pid()

    async def _lock(self, connection: Any) -> None:
        """Raises: Conflict: another engine has it. RuntimeUnavailable: a session of ours has not ended yet."""
        deadline = asyncio.get_running_loop().time() + self._lock_patience
        if self._pid:  # our own earlier session may not know yet that we left it
            await connection.execute(_END_OURS, self._pid)
        while not await connection.fetchval("SELECT pg_try_advisory_lock($1)", LOCK):
            if asyncio.get_running_loop().time() > deadline:
                if self._pid and await connection.fetchval(_OWNER) == self.owner:
                    raise unreachable("the session that was lost has not ended there")
                raise Conflict(
                    "another engine has this database",
                    hint="one engine at a time: close the other one, or name another database",
                )
            await asyncio.sleep(_FIRST_WAIT)


def _copy(error: DsecError) -> DsecError:
    return type(error)(error.message, hint=error.hint, **error.facts)
