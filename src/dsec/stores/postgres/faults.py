"""What errors of PostgreSQL and of the way to it mean to a caller."""

from __future__ import annotations

import asyncio
from typing import Final

import asyncpg  # type: ignore[import-untyped]

from dsec.errors import (
    BadRequest,
    Busy,
    Denied,
    DsecError,
    RuntimeUnavailable,
    StorageFull,
    StoreDamaged,
)

WHAT: Final = "the journal's database"
_FULL: Final = ("53100", "53200")  # disk, memory
# Shut down, crashed, starting up, idle too long, too many.
_GONE: Final = ("57P01", "57P02", "57P03", "57P05", "53300")
_DENIED: Final = ("42501", "28000", "28P01", "3D000")
_READ_ONLY: Final = "25006"
# Of a connection that is closed, or that broke in the middle of something.
_CLIENT: Final = (asyncpg.InterfaceError, asyncpg.InternalClientError)
# What was given is wrong, and would be the next time, too.
_WRONG: Final = (asyncpg.DataError, asyncpg.ClientConfigurationError)
REFUSALS: Final = (asyncpg.PostgresError, *_CLIENT, OSError, asyncio.TimeoutError)
"""Everything that a statement, or a connection, may raise."""


def is_gone(error: BaseException) -> bool:
    """Whether the connection is, so that nobody was told what became of the statement under way."""
    if isinstance(error, asyncpg.PostgresConnectionError | OSError | asyncio.TimeoutError):
        return True
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate) in _GONE
    return isinstance(error, _CLIENT) and not isinstance(error, _WRONG)


def is_read_only(error: BaseException) -> bool:
    """Whether the server takes no changes any more: another one has its place, and is found by connecting again."""
    return isinstance(error, asyncpg.PostgresError) and error.sqlstate == _READ_ONLY


def translate(error: BaseException) -> DsecError:
    """By what the server calls it."""
    if isinstance(error, DsecError):
        return error
    state = str(getattr(error, "sqlstate", None) or "")
    said = f"{error} ({state or type(error).__name__})"
    if state in _FULL:
        return StorageFull(
            f"{WHAT} cannot grow: {said}", hint="free space on the disk of PostgreSQL", sqlstate=state
        )
    if is_gone(error):
        return unreachable(said)
    if isinstance(error, _WRONG):
        return BadRequest(f"{WHAT} cannot be asked that: {said}", hint="see the URL of the database")
    if is_read_only(error):
        return unreachable(f"it takes no changes: {said}")
    if state in _DENIED:
        return Denied(
            f"{WHAT} cannot be opened: {said}",
            hint="the role of its URL must own the schema `dsec`",
            sqlstate=state,
        )
    if state in ("55P03", "40P01", "57014"):
        return Busy(f"{WHAT} is locked by another session: {said}", hint="try again", sqlstate=state)
    return StoreDamaged(
        f"{WHAT} cannot be used: {said}", hint="run `dsec audit verify`; restore a copy", sqlstate=state
    )


def unreachable(said: str) -> RuntimeUnavailable:
    """The answer while there is no connection."""
    return RuntimeUnavailable(
        f"{WHAT} cannot be reached: {said}",
        hint="look whether PostgreSQL runs; nothing needs to be restarted here",
    )
