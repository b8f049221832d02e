"""The journal of an engine, read from outside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dsec.model.journal import Finding
from dsec.stores.checkpoints import load_key
from dsec.stores.parts import CHECKPOINTS
from dsec.stores.reader import JournalReader, verify
from dsec.wiring.journals import remembered
from dsec.wiring.state import JOURNAL, KEY, KEYS

if TYPE_CHECKING:
    from dsec.stores.postgres.look import PostgresReader


def journal_reader(home: Path) -> JournalReader | PostgresReader:
    """The journal of a durable engine, whether or not it is open somewhere.  Raises: NotFound, StoreDamaged, RuntimeUnavailable."""
    url = remembered(home / JOURNAL)
    if not url:
        return JournalReader(home / JOURNAL)
    from dsec.stores.postgres.look import PostgresReader

    return PostgresReader(url)


def verify_journal(home: Path) -> tuple[Finding, ...]:
    """All that is wrong with the journal of a durable engine, open or closed.  Raises: NotFound, StoreDamaged, RuntimeUnavailable."""
    url = remembered(home / JOURNAL)
    if not url:
        return verify(home / JOURNAL, home / KEYS / KEY)
    from dsec.stores.postgres.look import verify as verify_database

    public = load_key(home / KEYS / KEY).public_key()
    return verify_database(url, home / JOURNAL / CHECKPOINTS, public)
