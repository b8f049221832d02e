"""Journals of earlier versions, and how they become one of this version."""

from __future__ import annotations

import contextlib
import sqlite3
from hashlib import sha256
from pathlib import Path
from typing import Final

from dsec.stores.schema import (
    FOURTH,
    INDEXES,
    MARK,
    NEW_TABLES,
    OF_SNAPSHOTS,
    SCHEMA,
    SEQ_BITS,
    SEQ_MAX,
    VERSION,
    VOLUME,
    connect,
    pragma,
    transaction,
    translated,
)

_CHAIN: Final = (
    "CREATE TABLE chain (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, unsigned INTEGER NOT NULL DEFAULT 1,"
    " state TEXT, ended REAL, expires REAL, reason TEXT, created REAL, session TEXT, workdir BLOB, boot TEXT,"
    " boot_at REAL, flags TEXT, spec TEXT)"
)
_RECORD: Final = (
    "CREATE TABLE record (id INTEGER PRIMARY KEY, at INTEGER NOT NULL, act TEXT NOT NULL, phase TEXT NOT NULL,"
    " ref TEXT NOT NULL, actor TEXT NOT NULL, payload BLOB, payload_digest BLOB, digest BLOB NOT NULL,"
    f" chain INTEGER AS (id >> {SEQ_BITS}), seq INTEGER AS (id & {SEQ_MAX}))"
)
_SNAPSHOT: Final = (
    "CREATE TABLE snapshot (id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, kind TEXT NOT NULL, spec TEXT NOT NULL,"
    " created REAL NOT NULL, paused REAL NOT NULL) WITHOUT ROWID"
)
SECOND: Final = (_CHAIN, _RECORD, _SNAPSHOT, MARK)
THIRD: Final = (*SECOND, VOLUME)
SCHEMAS: Final = {2: SECOND, 3: THIRD, 4: (*FOURTH, _SNAPSHOT), VERSION: SCHEMA}

_TO_THIRD: Final = (VOLUME,)
# Records that no checkpoint covers come last, so that one position tells them from the others.
_TO_FOURTH: Final = (
    "ALTER TABLE record ADD COLUMN position INTEGER",
    """
    UPDATE record SET position = p.position FROM (
        SELECT r.id, row_number() OVER (ORDER BY coalesce(c.unsigned, 1), r.at, r.id) AS position
        FROM record r LEFT JOIN chain c ON c.number = r.chain) p
    WHERE p.id = record.id
    """,
    """
    INSERT INTO mark SELECT 'signed', coalesce(max(r.position), 0), x'' FROM record r JOIN chain c ON c.number = r.chain
    WHERE NOT c.unsigned
    """,
    *NEW_TABLES,
    "INSERT INTO spec (digest, text) SELECT dsec_sha256(spec), spec FROM chain WHERE spec IS NOT NULL GROUP BY spec",
    "ALTER TABLE chain ADD COLUMN project TEXT",
    "ALTER TABLE chain ADD COLUMN spec_number INTEGER",
    """
    UPDATE chain SET project = coalesce(json_extract(spec, '$.project'), 'default'),
        spec_number = (SELECT number FROM spec WHERE digest = dsec_sha256(chain.spec))
    WHERE spec IS NOT NULL
    """,
    "ALTER TABLE chain DROP COLUMN unsigned",
    "ALTER TABLE chain DROP COLUMN spec",
    "ALTER TABLE chain ADD COLUMN class TEXT",
    """
    UPDATE chain SET class = CASE WHEN state IN ('pending', 'running', 'paused', 'stopping') THEN 'live' ELSE state END
    WHERE state IS NOT NULL
    """,
    *INDEXES,
)
_TO_FIFTH: Final = (
    "ALTER TABLE snapshot ADD COLUMN project TEXT",
    "UPDATE snapshot SET project = coalesce(json_extract(spec, '$.project'), 'default')",
    *OF_SNAPSHOTS,
)
_STEPS: Final = {2: _TO_THIRD, 3: _TO_FOURTH, 4: _TO_FIFTH}


def upgrade(path: Path) -> None:
    """Make a journal of an earlier version one of this version, completely or not at all. Its owner does so before anything else.

    Raises:
        StoreDamaged, StorageFull, Denied: as :func:`~dsec.stores.schema.connect`.
    """
    if _written_version(path) == VERSION:
        return
    with contextlib.closing(connect(path, durability="disk", schemas=SCHEMAS)) as db, translated():
        version = pragma(db, "user_version")
        assert isinstance(version, int)
        if version == VERSION:
            return
        db.create_function("dsec_sha256", 1, _digest, deterministic=True)
        with transaction(db):
            for number in range(version, VERSION):
                _step(db, number)
            db.execute(f"PRAGMA user_version = {VERSION}")


def _step(db: sqlite3.Connection, version: int) -> None:
    for statement in _STEPS[version]:
        db.execute(statement)


def _digest(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogateescape")).digest()


def _written_version(path: Path) -> int:
    """As the file itself says: there may be a newer one in the log, never an older. Opening it as a database could change it."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return int.from_bytes(file.read(64)[60:64], "big")
    return 0
