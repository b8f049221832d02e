"""Where the journal of a home is: in the home, or in a database of PostgreSQL whose URL the home remembers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.errors import BadRequest, Conflict, Unsupported
from dsec.model.ids import new_engine_id
from dsec.stores.journal import SqliteStore
from dsec.stores.keeper import Pace
from dsec.stores.schema import DATABASE, sync_directory
from dsec.wiring.settings import Settings

if TYPE_CHECKING:
    from dsec.stores.postgres.store import PostgresStore

REMEMBERED: Final = "database"
"""A file in the directory of the journal, for its owner only: the URL may hold a password."""
_LONGEST: Final = 4096


def remembered(directory: Path) -> str:
    """The URL of the database in which a journal is kept, "" = it is in its directory. Blocking."""
    try:
        with (directory / REMEMBERED).open(encoding="utf-8") as file:
            return file.read(_LONGEST).strip()
    except FileNotFoundError:
        return ""


def remember(directory: Path, url: str) -> None:
    """From now on, whoever opens the home finds its journal there. Blocking."""
    half = directory / f".{REMEMBERED}"
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(url + "\n")
        file.flush()
        os.fsync(file.fileno())
    half.rename(directory / REMEMBERED)
    sync_directory(directory)


async def open_in(directory: Path, key: Path, settings: Settings, known: str) -> SqliteStore | PostgresStore:
    """The journal of a home.

    Args:
        known: what :func:`remembered` says.

    Raises:
        Conflict: it is in use. Unsupported: what PostgreSQL needs is not installed. StoreDamaged, StorageFull, RuntimeUnavailable.
    """
    pace = Pace(keep_bytes=settings.journal_bytes)
    url = settings.database or known
    if not url:
        return await SqliteStore.open(
            directory, key=key, engine_id=new_engine_id(), durability=settings.durability, pace=pace
        )
    if settings.home is None:
        raise BadRequest(
            "settings.database: a private engine keeps its journal to itself", hint="name a home"
        )
    if await asyncio.to_thread((directory / DATABASE).exists):
        raise Conflict(
            f"the journal of this home is {directory / DATABASE}, not in PostgreSQL",
            hint="leave the setting `database` empty, or name another home",
        )
    try:
        from dsec.stores.postgres.store import PostgresStore
    except ImportError as error:
        raise Unsupported(
            f"PostgreSQL cannot be used: {error}", hint="pip install 'dsec-engine[postgres]'"
        ) from error
    return await PostgresStore.open(
        url,
        directory,
        key=key,
        engine_id=new_engine_id(),
        durability=settings.durability,
        pace=pace,
        lock_patience=settings.wait,
    )
