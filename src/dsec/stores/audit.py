"""Checking a journal: every chain against its digests and against the signed checkpoints, in bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from dsec.model.journal import Finding
from dsec.stores import checkpoints
from dsec.stores.chain import GENESIS, link_fields
from dsec.stores.journal_sql import CHECKPOINT
from dsec.stores.retention import ACT, ENGINE
from dsec.stores.schema import SEQ_BITS, SEQ_MAX, connect, translated
from dsec.stores.upgrades import SCHEMAS

CHECKPOINTS: Final = "checkpoints"
_PAGE: Final = 500
MAX_FINDINGS: Final = 1000

# Records whose chain has no name, and names without records, are both found: neither happens to a sound journal.
_NEXT: Final = (
    "SELECT min(n) FROM (SELECT min(number) AS n FROM chain WHERE number >= ?"
    " UNION ALL SELECT min(id) >> 32 FROM record WHERE id >= ?)"
)
_ROWS: Final = (
    "SELECT id, at, act, phase, ref, actor, payload, payload_digest, digest FROM record"
    " WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?"
)
_NUMBERS: Final = range(-(2**31), 2**31)
_SIGNED: Final = "CREATE TABLE signed (chain TEXT, seq INTEGER, digest BLOB, seen INTEGER DEFAULT 0)"
_DROPPED: Final = "CREATE TABLE dropped (chain TEXT PRIMARY KEY, seq INTEGER, digest BLOB) WITHOUT ROWID"
_MISSING: Final = """
    SELECT s.chain, max(s.seq) FROM signed s LEFT JOIN dropped d ON d.chain = s.chain
    WHERE s.seen = 0 GROUP BY s.chain HAVING max(s.seq) > coalesce(max(d.seq), 0)
"""
_SIGNED_INDEX: Final = "CREATE INDEX signed_chain ON signed (chain, seq)"


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of one journal."""

    database: Path
    checkpoints: Path
    public: Ed25519PublicKey


def audit(sources: Sources) -> tuple[Finding, ...]:
    """All that is wrong, at most 1,000 findings; for each chain its first bad record.

    Works beside a writer: checkpoints are read first, so the records can only be ahead of them. What was dropped to keep
    the journal within its bound is no finding: a signed record says so, and ties what is left to what was dropped.

    Raises:
        StoreDamaged: the database cannot be read at all.
    """
    return audit_of(lambda: _sqlite(sources.database), sources.checkpoints, sources.public)


def audit_of(
    look: Callable[[], AbstractContextManager[Look]], file: Path, public: Ed25519PublicKey
) -> tuple[Finding, ...]:
    """As :func:`audit`, of a journal in any database."""
    findings = _findings(look, file, public, None)
    if findings:
        # Beside a writer, chains may have been dropped after the checkpoints were read: look at the suspects again.
        findings = _findings(look, file, public, frozenset(finding.chain for finding in findings))
    return findings


def _findings(
    look: Callable[[], AbstractContextManager[Look]],
    file: Path,
    public: Ed25519PublicKey,
    only: frozenset[str] | None,
) -> tuple[Finding, ...]:
    with (
        translated(),
        look() as db,
        contextlib.closing(sqlite3.connect("")) as signed,  # a temporary file: memory stays bounded
    ):
        return tuple(itertools.islice(_all(db, signed, file, public, only), MAX_FINDINGS))


@contextlib.contextmanager
def _sqlite(database: Path) -> Iterator[Look]:
    with contextlib.closing(connect(database, read_only=True, schemas=SCHEMAS)) as db:
        db.text_factory = _text
        yield _SqliteLook(db)


class Look(Protocol):
    """What an audit reads of a database. Blocking."""

    def noted(self) -> tuple[int, bytes] | None:
        """The last checkpoint that the journal knows."""

    def number_of(self, name: str) -> int | None:
        """Of a chain."""

    def name_of(self, number: int) -> tuple[object] | None:
        """Of a chain, None where no chain has this number."""

    def numbers(self) -> Iterator[int]:
        """Of the chains that have a name or records, in order."""

    def rows(self, number: int, after: int) -> Iterator[tuple[Any, ...]]:
        """Records of a chain numbered above ``after``, in order: seq, at, act, phase, ref, actor, payload, its digest, digest."""


class _SqliteLook:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def noted(self) -> tuple[int, bytes] | None:
        row: tuple[int, bytes] | None = self._db.execute(CHECKPOINT).fetchone()
        return row

    def number_of(self, name: str) -> int | None:
        row = self._db.execute("SELECT number FROM chain WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def name_of(self, number: int) -> tuple[object] | None:
        row: tuple[object] | None = self._db.execute(
            "SELECT name FROM chain WHERE number = ?", (number,)
        ).fetchone()
        return row

    def numbers(self) -> Iterator[int]:
        return _numbers(self._db)

    def rows(self, number: int, after: int) -> Iterator[tuple[Any, ...]]:
        return _rows(self._db, number, after)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")  # altered text need not be UTF-8; it must still be named


def _all(
    db: Look, signed: sqlite3.Connection, file: Path, public: Ed25519PublicKey, only: frozenset[str] | None
) -> Iterator[Finding]:
    """What is wrong with the file of checkpoints, the chain of the engine, and all other chains or ``only`` these."""
    noted = db.noted()
    yield from _load(signed, file, public, checkpoints.Place(*noted) if noted else None)
    engine = db.number_of(ENGINE)
    first = [engine] if engine is not None else []  # it says what was dropped
    for number in itertools.chain(first, (other for other in db.numbers() if other not in first)):
        finding = _numbered(db, signed, number, only)
        if finding is not None:
            yield finding
    for name, seq in signed.execute(_MISSING):
        if only is None or name in only:
            yield Finding(
                chain=name, seq=1, problem=f"the whole chain is missing; a checkpoint signed {seq} records"
            )


def _numbers(db: sqlite3.Connection) -> Iterator[int]:
    """Of the chains that have a name or records."""
    number = -(2**63)
    while True:
        first = min(max(number << SEQ_BITS, -(2**63)), 2**63 - 1)
        row = db.execute(_NEXT, (number, first)).fetchone()
        if row[0] is None or row[0] < number:
            return
        yield row[0]
        number = row[0] + 1
        if number == 2**63:
            return


def _load(
    signed: sqlite3.Connection, file: Path, public: Ed25519PublicKey, noted: checkpoints.Place | None
) -> Iterator[Finding]:
    """Fill ``signed`` from the file; what is wrong with the file itself."""
    signed.execute(_SIGNED)
    signed.execute(_SIGNED_INDEX)
    signed.execute(_DROPPED)
    place, met = checkpoints.Place(), noted is not None and noted.n == 0
    try:
        for checkpoint in checkpoints.read(file, public):
            place = checkpoint.place
            met = met or place == noted
            signed.executemany("INSERT INTO signed (chain, seq, digest) VALUES (?, ?, ?)", checkpoint.heads)
    except checkpoints.BadCheckpoint as exc:
        yield Finding(chain=CHECKPOINTS, seq=exc.n, problem=exc.problem)
        return
    if noted is None:
        yield Finding(
            chain=CHECKPOINTS, seq=0, problem="the journal's note of its last checkpoint is missing"
        )
    elif place.n < noted.n:
        problem = f"the file was cut: the journal knows {noted.n} checkpoints, the file has {place.n}"
        yield Finding(chain=CHECKPOINTS, seq=place.n + 1, problem=problem)
    elif not met:
        yield Finding(
            chain=CHECKPOINTS, seq=noted.n, problem="it is not the checkpoint that the journal noted"
        )


def _numbered(
    db: Look, signed: sqlite3.Connection, number: int, only: frozenset[str] | None
) -> Finding | None:
    row = db.name_of(number)
    if row is None:
        if next(db.rows(number, 0), None) is None:
            return None  # dropped since it was seen
        return Finding(chain=f"#{number}", seq=1, problem="records of a chain whose name is missing")
    name = row[0]
    if number not in _NUMBERS:
        return Finding(chain=str(name), seq=1, problem=f"its number {number} is not that of a chain")
    if not isinstance(name, str):
        return Finding(chain=f"#{number}", seq=1, problem=f"its name is {type(name).__name__}, not text")
    signed.execute("UPDATE signed SET seen = 1 WHERE chain = ?", (name,))
    if only is not None and name not in only and name != ENGINE:
        return None
    return _chain(db, signed, number, name)


def _chain(db: Look, signed: sqlite3.Connection, number: int, name: str) -> Finding | None:
    dropped = signed.execute("SELECT seq, digest FROM dropped WHERE chain = ?", (name,)).fetchone()
    seq, previous = start = dropped or (0, GENESIS)
    last = signed.execute("SELECT max(seq) FROM signed WHERE chain = ?", (name,)).fetchone()[0] or 0
    marks = signed.execute(
        "SELECT seq, digest FROM signed WHERE chain = ? AND seq >= ? ORDER BY seq, rowid", (name, seq)
    )
    mark = marks.fetchone()
    for values in itertools.chain(
        [None], db.rows(number, seq)
    ):  # None: the place from which the chain is there
        if values is not None:
            problem = _problem(name, seq + 1, values, previous)
            if problem:
                return Finding(chain=name, seq=seq + 1, problem=problem)
            seq, previous = seq + 1, values[8]
            if name == ENGINE and seq <= last and values[2] == ACT:
                _note_drops(signed, values[6])
        while mark is not None and mark[0] <= seq:
            if mark[0] == seq and mark[1] != previous:
                return Finding(
                    chain=name,
                    seq=seq,
                    problem="not the record that was signed; it, or one before it, was rewritten",
                )
            mark = marks.fetchone()
    return _end(name, seq, last, there=(seq, previous) != start or dropped is not None)


def _note_drops(signed: sqlite3.Connection, payload: bytes) -> None:
    """A record that is signed says which chains were dropped; up to which record, and its digest."""
    chains = json.loads(payload)["chains"]
    rows = [(name, seq, bytes.fromhex(digest)) for name, (seq, digest) in chains.items()]
    signed.executemany("INSERT OR REPLACE INTO dropped VALUES (?, ?, ?)", rows)


def _end(name: str, seq: int, last: int, *, there: bool) -> Finding | None:
    if last > seq:
        problem = f"the tail was cut: a checkpoint signed {last} records, {seq} are left"
        return Finding(chain=name, seq=seq + 1, problem=problem)
    if not there:
        return Finding(chain=name, seq=1, problem="the chain has a name and no records")
    return None


def _rows(db: sqlite3.Connection, number: int, dropped: int) -> Iterator[tuple[Any, ...]]:
    """Records in order, each with its number first; a page at a time: no long read keeps the write-ahead log from shrinking."""
    first = number << SEQ_BITS
    start, last = first + dropped + 1 if dropped else first, first + SEQ_MAX
    while True:
        page = db.execute(_ROWS, (start, last, _PAGE)).fetchall()
        for row in page:
            yield (row[0] - first, *row[1:])
        if len(page) < _PAGE:
            return
        start = page[-1][0] + 1


def _problem(chain: str, expected: int, values: tuple[Any, ...], previous: bytes) -> str:
    """What is wrong with one record, or ""."""
    seq, at, act, phase, ref, actor, payload, payload_digest, digest = values
    if not isinstance(seq, int) or seq < expected:
        return f"a record numbered {seq!r} is where {expected} belongs"
    if seq > expected:
        return f"the record is missing; the next one is {seq}"
    if not isinstance(at, int) or not all(isinstance(text, str) for text in (act, phase, ref, actor)):
        return "the record was altered: a field has another type"
    if payload is None:
        return "the payload is missing"
    if not isinstance(payload, bytes) or payload_digest is not None:
        return "the record was altered: its payload or the digest of that is not as it was written"
    fields = (chain, seq, at, act, phase, ref, actor)
    if link_fields(fields, payload_digest=hashlib.sha256(payload).digest(), previous=previous) != digest:
        return "the record was altered"
    return ""
