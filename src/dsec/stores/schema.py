"""The journal's database file: its tables, how it is made, opened and recognised."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from dsec.errors import Busy, Denied, DsecError, StorageFull, StoreDamaged

Durability = Literal["process", "disk"]

DATABASE: Final = "journal.db"
APPLICATION_ID: Final = 0x44736563  # "Dsec"
VERSION: Final = 5

# A record's key is the number of its chain and its own number in it: records of a chain lie together, and a new one
# is written into one page. What a key stands for is computed, not stored.
SEQ_BITS: Final = 32
SEQ_MAX: Final = 2**SEQ_BITS - 1
# `payload` may be NULL: an erased payload leaves `payload_digest`, and with it the chain. Else that digest is computed.
# `position`: among the records of all chains, in the order in which they were stored.
_RECORD: Final = (
    "CREATE TABLE record (id INTEGER PRIMARY KEY, at INTEGER NOT NULL, act TEXT NOT NULL, phase TEXT NOT NULL,"
    " ref TEXT NOT NULL, actor TEXT NOT NULL, payload BLOB, payload_digest BLOB, digest BLOB NOT NULL,"
    f" chain INTEGER AS (id >> {SEQ_BITS}), seq INTEGER AS (id & {SEQ_MAX}), position INTEGER)"
)
# A chain and, in the same row, the sandbox whose chain it is (`state` is NULL where it is of none, or no longer): its
# birth is one row. `class` is what indexes see of the state, `live` or the state itself: those that live are few, and change
# theirs often. It is a column of its own, as an update that names what an index is computed from writes the index, too.
_CHAIN: Final = (
    "CREATE TABLE chain (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,"
    " state TEXT, ended REAL, expires REAL, reason TEXT, created REAL, session TEXT, workdir BLOB, boot TEXT,"
    " boot_at REAL, flags TEXT, project TEXT, spec_number INTEGER, class TEXT)"
)
# What sandboxes were asked to be; many are asked to be the same.
_SPEC: Final = (
    "CREATE TABLE spec (number INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, text TEXT NOT NULL)"
)
VOLUME: Final = (
    "CREATE TABLE volume (id TEXT PRIMARY KEY, project TEXT NOT NULL, name TEXT NOT NULL, size INTEGER NOT NULL,"
    " created REAL NOT NULL, UNIQUE (project, name)) WITHOUT ROWID"
)
_SNAPSHOT: Final = (
    "CREATE TABLE snapshot (id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, kind TEXT NOT NULL, spec TEXT NOT NULL,"
    " created REAL NOT NULL, paused REAL NOT NULL, project TEXT) WITHOUT ROWID"
)
MARK: Final = (
    "CREATE TABLE mark (name TEXT PRIMARY KEY, number INTEGER NOT NULL, digest BLOB NOT NULL) WITHOUT ROWID"
)
OF_SNAPSHOTS: Final = (
    "CREATE INDEX snapshot_project ON snapshot (project)",
    "CREATE INDEX snapshot_sandbox ON snapshot (sandbox)",
)
INDEXES: Final = (
    "CREATE UNIQUE INDEX record_position ON record (position)",
    "CREATE INDEX chain_class ON chain (class)",
    "CREATE INDEX chain_project ON chain (project, class) WHERE project IS NOT NULL",
    "CREATE INDEX chain_spec ON chain (spec_number) WHERE spec_number IS NOT NULL",
    "CREATE INDEX chain_expires ON chain (expires) WHERE class IN ('hibernated', 'cold') AND expires > 0",
)
NEW_TABLES: Final = (_SPEC,)
FOURTH: Final = (_CHAIN, _RECORD, MARK, VOLUME, *NEW_TABLES, *INDEXES)
"""All but snapshots, which have no project before this version."""
SCHEMA: Final = (*FOURTH, _SNAPSHOT, *OF_SNAPSHOTS)
_FIRST_MARKS: Final = (
    "INSERT INTO mark VALUES ('checkpoint', 0, zeroblob(32)), ('wal', 0, x''), ('signed', 0, x'')"
)

_FULL_IOERR: Final = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})


def translate(exc: sqlite3.Error) -> DsecError:
    """What an error of SQLite means to a caller."""
    code = getattr(exc, "sqlite_errorcode", 0)
    name = getattr(exc, "sqlite_errorname", type(exc).__name__)
    if code & 0xFF == sqlite3.SQLITE_FULL or code in _FULL_IOERR:
        return StorageFull(
            f"the journal cannot grow: {exc} ({name})",
            hint="free space under the state directory",
            sqlite=name,
        )
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Busy(
            f"the journal is locked by another process: {exc} ({name})",
            hint="another engine or a tool has it open: try again when that has ended",
            sqlite=name,
        )
    if code & 0xFF in (
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_AUTH,
    ):
        return Denied(
            f"the journal cannot be opened: {exc} ({name})",
            hint="its files and their directory must belong to whoever runs this",
            sqlite=name,
        )
    return StoreDamaged(
        f"the journal cannot be used: {exc} ({name})",
        hint="run `dsec audit verify`; restore a copy",
        sqlite=name,
    )


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn errors of SQLite into ours."""
    try:
        yield
    except sqlite3.Error as exc:
        raise translate(exc) from exc


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def begin_log(db: sqlite3.Connection) -> None:
    """Commit something. The first commit into a new write-ahead log waits for the disk: better here than in an append."""
    db.execute("UPDATE mark SET number = number + 1 WHERE name = 'wal'")


def create(path: Path) -> None:
    """Make an empty journal, completely or not at all.

    Raises:
        StorageFull, StoreDamaged.
    """
    draft = path.with_name(path.name + ".new")  # what a dead process left half-made was never acknowledged
    draft.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    with translated(), contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as db:
        db.execute(
            "PRAGMA page_size = 2048"
        )  # a record takes some 300 bytes: less of a page is written for nothing
        db.execute("PRAGMA journal_mode = MEMORY")
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            db.execute(statement)
        db.execute(_FIRST_MARKS)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
    draft.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def connect(
    path: Path,
    *,
    durability: Durability = "process",
    read_only: bool = False,
    schemas: Mapping[int, Sequence[str]] = MappingProxyType({VERSION: SCHEMA}),
) -> sqlite3.Connection:
    """Open a journal that exists, with one of these schemas, by version.

    ``process`` is synchronous=NORMAL: a commit is in the kernel when it returns, which outlives this process, and
    power loss costs the newest records but never the file. ``disk`` is FULL: every commit is synced.

    Raises:
        StoreDamaged: not a journal of ours, of a newer version, or broken.
    """
    if not path.is_file():
        raise StoreDamaged(f"{path} is not a file", hint="restore it from a copy")
    with translated():
        # autocommit mode; transactions are begun by hand. `rw` never creates.
        uri = f"{path.absolute().as_uri()}?mode=rw"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=5.0)
        try:
            check(db, path, schemas)
            db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'disk' else 'NORMAL'}")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute("PRAGMA trusted_schema = OFF")
            if read_only:
                db.execute("PRAGMA query_only = ON")
        except BaseException:
            db.close()
            raise
    return db


def check(db: sqlite3.Connection, path: Path, schemas: Mapping[int, Sequence[str]]) -> None:
    """Raises: StoreDamaged: not a journal of ours, of a version that we do not know, or its tables are not as they were made."""
    application = pragma(db, "application_id")
    if application != APPLICATION_ID:
        raise StoreDamaged(f"{path} is not a DSec journal (application id {application})")
    version = pragma(db, "user_version")
    schema = schemas.get(version) if isinstance(version, int) else None
    if schema is None:
        raise StoreDamaged(
            f"{path} has version {version}, this DSec reads version {VERSION}",
            hint="use the DSec that wrote it",
        )
    found = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if found != set(schema):
        odd = sorted(str(sql)[:80] for sql in found ^ set(schema))
        raise StoreDamaged(f"{path}: its tables are not those of a journal; first difference: {odd[0]}")
    mode = db.execute("PRAGMA journal_mode").fetchone()[0]
    if mode != "wal":
        raise StoreDamaged(f"{path}: journal mode is {mode}, not wal")


def pragma(db: sqlite3.Connection, name: str) -> object:
    """The value of one."""
    return db.execute(f"PRAGMA {name}").fetchone()[0]
