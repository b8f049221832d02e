"""Copies of a journal and a control database that fit together, made while a server writes to them."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from dsec.errors import StoreDamaged
from dsec.stores import journal_sql as sql
from dsec.stores.checkpoints import MAX_LINE
from dsec.stores.schema import sync_directory, translated

_PRIVATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def copy_database(source: Path, target: Path) -> None:
    """A whole copy of an SQLite database as it is at one moment, synced; ``target`` is new. Writers are not held up.

    Raises:
        StoreDamaged, StorageFull, Busy: as SQLite says of either.
    """
    os.close(os.open(target, _PRIVATE, 0o600))
    with (
        translated(),
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True)) as found,
        closing(sqlite3.connect(target)) as copy,
    ):
        found.execute("PRAGMA query_only = ON")
        found.backup(copy)
    _synced(target)


def copy_checkpoints(source: Path, target: Path, journal: Path) -> None:
    """As many checkpoints as ``journal``, a copy that was made before, knows of: later ones sign what it does not hold.

    Raises:
        StoreDamaged: there are fewer, or the copy is no journal.
    """
    with translated(), closing(sqlite3.connect(journal)) as db:
        row = db.execute(sql.CHECKPOINT).fetchone()
    if row is None:
        raise StoreDamaged(f"{journal} does not say how many checkpoints there are")
    with source.open("rb") as found, os.fdopen(os.open(target, _PRIVATE, 0o600), "wb") as copy:
        for number in range(row[0]):
            line = found.readline(MAX_LINE + 1)
            if not line.endswith(b"\n"):
                raise StoreDamaged(
                    f"{source} ends after {number} checkpoints, the journal knows {row[0]}",
                    hint="`dsec audit verify` tells more",
                )
            copy.write(line)
    _synced(target)


def copy_key(source: Path, target: Path) -> None:
    """The key that signs, for its owner's eyes alone."""
    with os.fdopen(os.open(target, _PRIVATE, 0o600), "wb") as copy:
        copy.write(source.read_bytes())
    _synced(target)


def _synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(path.parent)
