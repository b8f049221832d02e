"""The journal of an engine, read from outside."""

from __future__ import annotations

from pathlib import Path

from dsec.model.journal import Finding
from dsec.stores.reader import JournalReader, verify
from dsec.wiring.state import JOURNAL, KEY, KEYS


def journal_reader(home: Path) -> JournalReader:
    """The journal of a durable engine, whether or not it is open somewhere.  Raises: NotFound, StoreDamaged."""
    return JournalReader(home / JOURNAL)


def verify_journal(home: Path) -> tuple[Finding, ...]:
    """All that is wrong with the journal of a durable engine, open or closed.  Raises: NotFound, StoreDamaged."""
    return verify(home / JOURNAL, home / KEYS / KEY)
