"""What errors of the control database mean to a caller."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, InterfaceError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from dsec.errors import Busy, Denied, DsecError, RuntimeUnavailable, StorageFull, StoreDamaged

WHAT: Final = "the control database"
_RESTORE: Final = "restore it from a copy, or see docs/how-to: what to do when it is lost"
_FULL: Final = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
_LOCKED: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_CLOSED: Final = (
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM),
    *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH),
)
READ_ONLY: Final = "25006"
_DAMAGED_STATES: Final = (
    "XX",
    "58030",
    "42P01",
    "42703",
    "42P07",
)  # internal, I/O, a table or column that is not there or is


@contextmanager
def translated() -> Iterator[None]:
    """Turn errors of either database into ours."""
    try:
        yield
    except PoolTimeout as error:
        raise Busy(f"{WHAT} is asked for too much at once", hint="try again", retry_after=1) from error
    except DBAPIError as error:
        raise translate(error) from error
    except SQLAlchemyError as error:
        raise StoreDamaged(f"{WHAT} cannot be used: {error}", hint=_RESTORE) from error
    except (OSError, TimeoutError) as error:  # while connecting
        raise _away(error) from error


def translate(error: DBAPIError) -> DsecError:
    """Of one statement."""
    said = error.orig
    if isinstance(said, sqlite3.Error):
        return _of_sqlite(said)
    gone = error.connection_invalidated or isinstance(error, InterfaceError)
    return of_postgres(said or error, gone=gone)


def of_postgres(said: BaseException, *, gone: bool = False) -> DsecError:
    """By what the server calls it. ``gone``: the connection is."""
    state = str(getattr(said, "sqlstate", None) or getattr(said, "pgcode", None) or "")
    if state in ("53100", "53200"):
        return StorageFull(
            f"{WHAT} cannot grow: {said}", hint="make room on the machine of PostgreSQL", sqlstate=state
        )
    if state.startswith(_DAMAGED_STATES):
        return StoreDamaged(f"{WHAT} cannot be used: {said}", hint=_RESTORE, sqlstate=state)
    if state.startswith(("28", "3D", "42501")):
        return Denied(
            f"{WHAT} does not let us in: {said}",
            hint="see the user and the database of the URL",
            sqlstate=state,
        )
    if state.startswith(("40", "55P03")):
        return Busy(f"{WHAT} is busy: {said}", hint="try again", sqlstate=state)
    if gone or not state or state.startswith(("08", "53", "57", READ_ONLY)):
        return _away(said, state)
    return StoreDamaged(f"{WHAT} refused a statement: {said}", hint=_RESTORE, sqlstate=state)


def _away(error: BaseException, state: str = "") -> RuntimeUnavailable:
    return RuntimeUnavailable(
        f"{WHAT} does not answer: {str(error) or type(error).__name__}",
        hint="start PostgreSQL, or mend the URL",
        **({"sqlstate": state} if state else {}),
    )


def _of_sqlite(error: sqlite3.Error) -> DsecError:
    code = getattr(error, "sqlite_errorcode", 0)
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if code & 0xFF == sqlite3.SQLITE_FULL or code in _FULL:
        return StorageFull(
            f"{WHAT} cannot grow: {error} ({name})", hint="free space under the state directory", sqlite=name
        )
    if code & 0xFF in _LOCKED:
        return Busy(f"{WHAT} is locked by another process: {error} ({name})", hint="try again", sqlite=name)
    if code & 0xFF in _CLOSED:
        return Denied(
            f"{WHAT} cannot be opened: {error} ({name})",
            hint="its files and their directory must belong to whoever runs this",
            sqlite=name,
        )
    return StoreDamaged(f"{WHAT} cannot be used: {error} ({name})", hint=_RESTORE, sqlite=name)
