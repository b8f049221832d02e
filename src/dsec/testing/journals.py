"""Journals as earlier versions wrote them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from dsec.model.sandbox import SandboxInfo, State
from dsec.stores import checkpoints, schema
from dsec.stores.chain import GENESIS, link, prepare
from dsec.stores.ledger import Head
from dsec.stores.sandbox_codec import to_row
from dsec.stores.upgrades import SECOND, THIRD
from dsec.testing.contracts.journal import note, sandbox

_TABLES: Final = {2: SECOND, 3: THIRD}
_ADD: Final = """
    INSERT INTO chain (number, name, unsigned, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, spec)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_RECORD: Final = (
    "INSERT INTO record (id, at, act, phase, ref, actor, payload, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)


def lived() -> list[SandboxInfo]:
    """What is in such a journal: one that runs, one that is gone; the head of the first is signed, the other not. Blocks."""
    return [sandbox(state=State.RUNNING), replace(sandbox(state=State.GONE), ended_at=1500.0)]


def earlier(home: Path, version: int, infos: list[SandboxInfo] | None = None) -> Path:
    """A journal of that version in ``home/state``, its key in ``home/journal.key``, with three records of each sandbox; its file."""
    path = home / "state" / schema.DATABASE
    path.parent.mkdir(parents=True)
    key = checkpoints.make_key(home / "journal.key")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in _TABLES[version]:
            db.execute(statement)
        db.execute("INSERT INTO mark VALUES ('checkpoint', 0, zeroblob(32)), ('wal', 0, x'')")
        heads = [_add(db, number, info) for number, info in enumerate(infos or lived(), 1)]
        file = checkpoints.CheckpointFile(
            home / "state" / "checkpoints.jsonl", key, "en-test", checkpoints.Place()
        )
        with closing(file):
            place = file.append({heads[0][0]: heads[0][1]}, 1.0)
        db.execute(
            "UPDATE mark SET number = ?, digest = ? WHERE name = 'checkpoint'", (place.n, place.digest)
        )
        db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {version}")
        db.execute("PRAGMA journal_mode = WAL")
    return path


def _add(db: sqlite3.Connection, number: int, info: SandboxInfo) -> tuple[str, Head]:
    db.execute(_ADD, (number, info.id, int(number > 1), *to_row(info)[1:]))
    digest = GENESIS
    for seq in (1, 2, 3):
        one = prepare(note(info.id, n=seq))
        at = 1_000_000 * (10 * seq - number)
        digest = link(one, seq=seq, at=at, previous=digest)
        row = (number << 32 | seq, at, one.draft.act, "note", "", "local", one.payload, digest)
        db.execute(_RECORD, row)
    return info.id, Head(number, 3, digest)
