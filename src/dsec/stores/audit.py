"""Checking a journal: every chain against its digests and against the signed checkpoints, in bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from dsec.model.journal import Finding
from dsec.stores import checkpoints
from dsec.stores.chain import GENESIS, link_fields
from dsec.stores.journal_sql import CHECKPOINT
from dsec.stores.schema import connect, translated

CHECKPOINTS: Final = "checkpoints"
_PAGE: Final = 500
MAX_FINDINGS: Final = 1000

# Records whose chain has no name, and names without records, are both found: neither happens to a sound journal.
_NEXT: Final = (
    "SELECT min(n) FROM (SELECT min(number) AS n FROM chain WHERE number > :after"
    " UNION ALL SELECT min(chain) FROM record WHERE chain > :after)"
)
_ROWS: Final = (
    "SELECT seq, at, act, phase, ref, actor, payload, payload_digest, digest FROM record"
    " WHERE chain = ? AND seq > ? ORDER BY seq LIMIT ?"
)
_SIGNED: Final = "CREATE TABLE signed (chain TEXT, seq INTEGER, digest BLOB, seen INTEGER DEFAULT 0)"
_SIGNED_INDEX: Final = "CREATE INDEX signed_chain ON signed (chain, seq)"


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of one journal."""

    database: Path
    checkpoints: Path
    public: Ed25519PublicKey


def audit(sources: Sources) -> tuple[Finding, ...]:
    """All that is wrong, at most 1,000 findings; for each chain its first bad record.

    Works beside a writer: checkpoints are read first, so the records can only be ahead of them.

    Raises:
        StoreDamaged: the database cannot be read at all.
    """
    findings: list[Finding] = []
    with (
        translated(),
        contextlib.closing(connect(sources.database, read_only=True)) as db,
        contextlib.closing(sqlite3.connect("")) as signed,  # a temporary file: memory stays bounded
    ):
        db.text_factory = _text
        for finding in _all(db, signed, sources):
            findings.append(finding)
            if len(findings) >= MAX_FINDINGS:
                break
    return tuple(findings)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")  # altered text need not be UTF-8; it must still be named


def _all(db: sqlite3.Connection, signed: sqlite3.Connection, sources: Sources) -> Iterator[Finding]:
    noted = db.execute(CHECKPOINT).fetchone()
    yield from _load(signed, sources, checkpoints.Place(*noted) if noted else None)
    number = -(2**63)
    while (row := db.execute(_NEXT, {"after": number}).fetchone())[0] is not None:
        number = row[0]
        finding = _chain(db, signed, number)
        if finding is not None:
            yield finding
    missing = "SELECT chain, max(seq) FROM signed WHERE seen = 0 GROUP BY chain"
    for chain, seq in signed.execute(missing):
        yield Finding(
            chain=chain, seq=1, problem=f"the whole chain is missing; a checkpoint signed {seq} records"
        )


def _load(signed: sqlite3.Connection, sources: Sources, noted: checkpoints.Place | None) -> Iterator[Finding]:
    """Fill ``signed`` from the file; what is wrong with the file itself."""
    signed.execute(_SIGNED)
    signed.execute(_SIGNED_INDEX)
    place, met = checkpoints.Place(), noted is not None and noted.n == 0
    try:
        for checkpoint in checkpoints.read(sources.checkpoints, sources.public):
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


def _chain(db: sqlite3.Connection, signed: sqlite3.Connection, number: int) -> Finding | None:
    row = db.execute("SELECT name FROM chain WHERE number = ?", (number,)).fetchone()
    if row is None:
        return Finding(chain=f"#{number}", seq=1, problem="records of a chain whose name is missing")
    name = row[0]
    if not isinstance(name, str):
        return Finding(chain=f"#{number}", seq=1, problem=f"its name is {type(name).__name__}, not text")
    signed.execute("UPDATE signed SET seen = 1 WHERE chain = ?", (name,))
    marks = signed.execute("SELECT seq, digest FROM signed WHERE chain = ? ORDER BY seq, rowid", (name,))
    mark = marks.fetchone()
    seq, previous = 0, GENESIS
    for values in _rows(db, number):
        problem = _problem(name, seq + 1, values, previous)
        if problem:
            return Finding(chain=name, seq=seq + 1, problem=problem)
        seq, previous = seq + 1, values[8]
        while mark is not None and mark[0] <= seq:
            if mark[0] == seq and mark[1] != previous:
                return Finding(
                    chain=name,
                    seq=seq,
                    problem="not the record that was signed; it, or one before it, was rewritten",
                )
            mark = marks.fetchone()
    return _end(signed, name, seq)


def _end(signed: sqlite3.Connection, name: str, seq: int) -> Finding | None:
    last = signed.execute("SELECT max(seq) FROM signed WHERE chain = ?", (name,)).fetchone()[0]
    if last is not None and last > seq:
        problem = f"the tail was cut: a checkpoint signed {last} records, {seq} are left"
        return Finding(chain=name, seq=seq + 1, problem=problem)
    if seq == 0:
        return Finding(chain=name, seq=1, problem="the chain has a name and no records")
    return None


def _rows(db: sqlite3.Connection, number: int) -> Iterator[tuple[Any, ...]]:
    """Records in order; a page at a time, so that no long read keeps the write-ahead log from shrinking."""
    after = -(2**63)
    while True:
        page = db.execute(_ROWS, (number, after, _PAGE)).fetchall()
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1][0]


def _problem(chain: str, expected: int, values: tuple[Any, ...], previous: bytes) -> str:
    """What is wrong with one record, or ""."""
    seq, at, act, phase, ref, actor, payload, payload_digest, digest = values
    if not isinstance(seq, int) or seq < expected:
        return f"a record numbered {seq!r} is where {expected} belongs"
    if seq > expected:
        return f"the record is missing; the next one is {seq}"
    texts, blobs = (act, phase, ref, actor), (payload_digest, digest)
    if not isinstance(at, int) or not all(isinstance(text, str) for text in texts):
        return "the record was altered: a field has another type"
    if not all(isinstance(blob, bytes) for blob in blobs):
        return "the record was altered: a digest has another type"
    fields = (chain, seq, at, act, phase, ref, actor)
    if link_fields(fields, payload_digest=payload_digest, previous=previous) != digest:
        return "the record was altered"
    if payload is None:
        return "the payload is missing"
    if not isinstance(payload, bytes) or hashlib.sha256(payload).digest() != payload_digest:
        return "the payload was altered"
    return ""
