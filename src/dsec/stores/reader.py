"""Reading a journal beside its owner, or when it has none: nothing is written, and no lock is taken."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from dsec.errors import Conflict, NotFound
from dsec.model.ids import SandboxId
from dsec.model.journal import Finding, Record
from dsec.model.sandbox import SandboxInfo, State
from dsec.stores import checkpoints, schema
from dsec.stores import journal_sql as sql
from dsec.stores.audit import Sources, audit
from dsec.stores.listing import classes_of
from dsec.stores.parts import CHECKPOINTS
from dsec.stores.retention import ACT, ENGINE
from dsec.stores.rows import no_sandbox, record_of
from dsec.stores.sandbox_codec import from_row
from dsec.stores.schema import translated
from dsec.stores.upgrades import SCHEMAS

_CHAINS: Final = "SELECT name FROM chain ORDER BY number"


class JournalReader:
    """What is recorded now. As a context manager it closes the database; blocking.

    Args:
        directory: of the journal.

    Raises:
        NotFound: there is no journal. StoreDamaged: it cannot be read. Conflict: it is of an earlier version.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / schema.DATABASE
        if not path.exists():
            raise NotFound(f"there is no journal in {directory}", hint="`dsec create` makes a first sandbox")
        self._db: sqlite3.Connection = schema.connect(path, read_only=True, schemas=SCHEMAS)
        version = schema.pragma(self._db, "user_version")
        if version != schema.VERSION:
            self._db.close()
            raise Conflict(
                f"{path} has version {version}, this DSec reads version {schema.VERSION}",
                hint="its engine makes it one of this version when it opens: `dsec ls`",
            )

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def sandboxes(self, states: Sequence[State]) -> tuple[SandboxInfo, ...]:
        """Those in these states, oldest first."""
        with translated():
            wanted = tuple(map(json.dumps, classes_of(states)))
            rows = self._db.execute(sql.LIST, wanted).fetchall()
        return tuple(from_row(row[1:]) for row in rows)

    def sandbox(self, sandbox: SandboxId) -> SandboxInfo:
        """Raises: NotFound."""
        with translated():
            row = self._db.execute(sql.GET, (sandbox,)).fetchone()
        if row is None:
            raise no_sandbox(sandbox)
        return from_row(row[1:])

    def chains(self) -> tuple[str, ...]:
        """Every chain, oldest first."""
        with translated():
            return tuple(str(row[0]) for row in self._db.execute(_CHAINS).fetchall())

    def records(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        """Of one chain in order, numbered above ``after``."""
        with translated():
            rows = self._db.execute(sql.READ, (min(max(after, 0), schema.SEQ_MAX), chain, limit)).fetchall()
        return tuple(record_of(chain, row) for row in rows)

    def dropped(self) -> int:
        """How many chains were dropped to keep the journal within its bound; records of the chain ``engine`` name them."""
        with translated():
            return int(self._db.execute(sql.DROPPED, (ENGINE, ACT)).fetchone()[0])

    def running(self, sandbox: SandboxId) -> tuple[Record, ...]:
        """Intents of the commands of a sandbox whose end is not recorded."""
        with translated():
            rows = self._db.execute(sql.UNANSWERED, (sandbox,)).fetchall()
        return tuple(record for record in (record_of(sandbox, row) for row in rows) if record.act == "exec")


def verify(directory: Path, key: Path) -> tuple[Finding, ...]:
    """All that is wrong with a journal, open or closed; empty = sound. Blocking.

    Raises:
        NotFound: there is none. StoreDamaged: it, or its key, cannot be read at all.
    """
    database = directory / schema.DATABASE
    if not database.exists() and not (directory / CHECKPOINTS).exists():
        raise NotFound(f"there is no journal in {directory}", hint="`dsec create` makes a first sandbox")
    public = checkpoints.load_key(key).public_key()
    return audit(Sources(database, directory / CHECKPOINTS, public))
