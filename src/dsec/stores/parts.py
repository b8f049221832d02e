"""Everything behind an open journal of SQLite: its files, connections and threads, put together and taken apart."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dsec.errors import Denied, StorageFull, StoreDamaged
from dsec.model.journal import Draft, Finding, Json, Phase
from dsec.stores import checkpoints, schema
from dsec.stores import journal_sql as sql
from dsec.stores.audit import Sources, audit
from dsec.stores.chain import prepare
from dsec.stores.keeper import Keeper, Pace
from dsec.stores.ledger import Ledger
from dsec.stores.memory import Memory
from dsec.stores.schema import Durability, translated
from dsec.stores.upgrades import upgrade
from dsec.stores.writer import Writer

CHECKPOINTS: Final = "checkpoints.jsonl"
_CACHE_KIB: Final = (
    32 * 1024
)  # the writer's: the inner pages of the indexes of millions of sandboxes fit into it


class Files:
    """Where the parts of a journal are."""

    def __init__(self, directory: Path, key: Path, checkpoint_file: Path) -> None:
        self.database = directory / schema.DATABASE
        self.wal = directory / f"{schema.DATABASE}-wal"
        self.key = key
        self.begun = key.with_suffix(".begun")
        """Beside the key: there is a journal of it, so that one that is gone is missed even where its whole directory is."""
        self.checkpoints = checkpoint_file

    def prepare(self) -> Ed25519PrivateKey:
        """The signing key; makes the files when there are none of them.  Raises: StoreDamaged."""
        if self.database.exists():
            key = checkpoints.load_key(self.key)
            upgrade(self.database)
            self._begin()
            return key
        left = [str(path) for path in (self.wal, self.checkpoints, self.begun) if path.exists()]
        if left:
            raise StoreDamaged(
                f"{self.database} is missing but {left[0]} is there",
                hint="restore it from a copy; to begin anew, and lose what is recorded, give another home",
            )
        self.database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The key before the journal: a key alone (we died here) is simply used by the next start.
        key = checkpoints.load_key(self.key) if self.key.exists() else checkpoints.make_key(self.key)
        schema.create(self.database)
        self._begin()
        return key

    def _begin(self) -> None:
        if not self.begun.exists():
            self.begun.touch(mode=0o600)
            schema.sync_directory(self.begun.parent)


class Parts:
    """Everything behind an open store, put together and taken apart. Blocks."""

    def __init__(
        self, files: Files, engine_id: str, durability: Durability, pace: Pace, now: Callable[[], float]
    ) -> None:
        self.now = now
        with contextlib.ExitStack() as stack:
            try:
                key = files.prepare()
            except PermissionError as exc:
                raise Denied(
                    f"the journal cannot be opened: {exc}",
                    hint="its files and their directory must belong to whoever runs this",
                ) from exc
            except OSError as exc:
                raise StorageFull(f"the journal cannot be made: {exc}") from exc
            self.sources = Sources(files.database, files.checkpoints, key.public_key())
            self.db = stack.enter_context(
                contextlib.closing(schema.connect(files.database, durability=durability))
            )
            self.reader, self.finder = [
                stack.enter_context(contextlib.closing(schema.connect(files.database, read_only=True)))
                for _ in range(2)
            ]
            side = stack.enter_context(contextlib.closing(schema.connect(files.database)))
            with translated():
                self.db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
                self.ledger = Ledger(self.db, now)
                self.ledger.recover()
                self.memory = _counted(self.db)
                place, torn = place_of(self.db, self.sources)
                schema.begin_log(self.db)
            file = stack.enter_context(
                contextlib.closing(checkpoints.CheckpointFile(files.checkpoints, key, engine_id, place))
            )
            self.writer = Writer(self.db, self.ledger, self.memory, inline=durability == "process")
            stack.callback(self.writer.release)  # an open read would keep the connection open
            with translated():
                self.writer.hold()
            self.keeper = keeper = Keeper(side, self.writer, self.ledger, file, pace=pace, now=now)
            self.writer.tell(keeper.committed)
            if torn:
                self._cut(files.checkpoints, torn)
            self.keeper.start()
            self._open = stack.pop_all()

    def close(self) -> None:
        """Raises: StorageFull: the last heads could not be signed; they will be after the next start."""
        with self._open:
            self.writer.close()
            self.keeper.close()

    def _cut(self, path: Path, torn: int) -> None:
        """Drop an unfinished last line, and say so in the journal first."""
        payload: dict[str, Json] = {"bytes": torn}
        note = prepare(Draft(chain="engine", act="journal.checkpoint_cut", phase=Phase.NOTE, payload=payload))
        self.writer.transact(lambda: self.ledger.append(note))
        os.truncate(path, path.stat().st_size - torn)


def place_of(db: sqlite3.Connection, sources: Sources) -> tuple[checkpoints.Place, int]:
    """Where the checkpoint file ends.  Raises: StoreDamaged: it is shorter than the journal knows."""
    place, torn = checkpoints.last(sources.checkpoints, sources.public)
    checkpoints.check_place(place, db.execute(sql.CHECKPOINT).fetchone(), sources.checkpoints)
    return place, torn


def _counted(db: sqlite3.Connection) -> Memory:
    """Raises: StoreDamaged: a stored state is none."""
    memory = Memory(db)
    try:
        memory.recover()
    except ValueError as exc:
        raise StoreDamaged(f"a stored state cannot be read: {exc}", hint="restore a copy") from exc
    return memory


def verify_directory(
    directory: Path, *, key: Path, checkpoint_file: Path | None = None
) -> tuple[Finding, ...]:
    """Check a journal, open or not. Blocks.

    Raises:
        StoreDamaged: there is no journal, it cannot be read, or its key is missing.
    """
    files = Files(directory, key, checkpoint_file or directory / CHECKPOINTS)
    return audit(Sources(files.database, files.checkpoints, checkpoints.load_key(key).public_key()))
