"""The statements of the journal's store, as they are."""

from __future__ import annotations

from typing import Final

# Keys of records: see schema.py. 4294967295 is the last number that a record of a chain can have.
READ: Final = """
    SELECT r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM chain c JOIN record r ON r.id > (c.number << 32) + ? AND r.id <= (c.number << 32) + 4294967295
    WHERE c.name = ? ORDER BY r.id LIMIT ?
"""
LATEST: Final = """
    SELECT r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM chain c JOIN record r ON r.id > c.number << 32 AND r.id <= (c.number << 32) + 4294967295
    WHERE c.name = ? AND r.act = ? ORDER BY r.id DESC LIMIT ?
"""
LATEST_OF_REF: Final = """
    SELECT r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM chain c JOIN record r ON r.id > c.number << 32 AND r.id <= (c.number << 32) + 4294967295
    WHERE c.name = ? AND r.act = ? AND r.ref = ? ORDER BY r.id DESC LIMIT ?
"""
UNANSWERED: Final = """
    SELECT seq, at, act, phase, ref, actor, payload, digest FROM record
    WHERE phase = 'intent' AND id IN (
        SELECT max(r.id)
        FROM chain c JOIN record r ON r.id > c.number << 32 AND r.id <= (c.number << 32) + 4294967295
        WHERE c.name = ? AND r.ref <> '' AND r.phase IN ('intent', 'result') GROUP BY r.act, r.ref)
    ORDER BY id
"""
_COLUMNS: Final = """
    c.number, c.name, c.state, c.ended, c.expires, c.reason, c.created, c.session, c.workdir, c.boot, c.boot_at,
    c.flags, s.text
"""
GET: Final = f"""
    SELECT {_COLUMNS} FROM chain c JOIN spec s ON s.number = c.spec_number WHERE c.name = ? AND c.state IS NOT NULL
"""  # noqa: S608 - of constants
LIST: Final = f"""
    SELECT {_COLUMNS} FROM chain c JOIN spec s ON s.number = c.spec_number
    WHERE c.class IN (SELECT value FROM json_each(?)) AND c.state IN (SELECT value FROM json_each(?))
    ORDER BY c.created, c.name
"""  # noqa: S608 - of constants
_SANDBOX: Final = "name, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, class, project, spec_number"
ADD: Final = f"INSERT OR IGNORE INTO chain ({_SANDBOX}) VALUES ({', '.join('?' * 14)})"  # noqa: S608 - of constants
_ADD_MANY: Final = f"INSERT OR IGNORE INTO chain (number, {_SANDBOX}) VALUES "  # noqa: S608 - of constants
LAST_CHAIN: Final = "SELECT coalesce(max(number), 0) FROM chain"
NUMBER: Final = "SELECT number FROM chain WHERE name = ?"
_INSERT: Final = "INSERT INTO record (id, at, act, phase, ref, actor, payload, digest, position) VALUES "
INSERT: Final = f"{_INSERT}({', '.join('?' * 9)})"


def add_many(count: int) -> str:
    """As :data:`ADD`, so many rows, each with its number before it."""
    return _ADD_MANY + _places(15, count)


def insert_many(count: int) -> str:
    """As :data:`INSERT`, so many records."""
    return _INSERT + _places(9, count)


def _places(columns: int, rows: int) -> str:
    return ", ".join([f"({', '.join('?' * columns)})"] * rows)


# What an update does not name, its indexes need not be written for.
CHANGE: Final = "UPDATE chain SET state = ?, ended = ?, reason = ? WHERE number = ? AND state = ?"
CHANGE_ALL: Final = """
    UPDATE chain SET state = ?, ended = ?, reason = ?, class = ?, expires = ? WHERE number = ? AND state = ?
"""
# Named, as nothing tells SQLite that nearly all of millions may be of these two classes, and few of them expire soon.
EXPIRING: Final = f"""
    SELECT {_COLUMNS} FROM chain c INDEXED BY chain_expires CROSS JOIN spec s ON s.number = c.spec_number
    WHERE c.class IN ('hibernated', 'cold') AND c.expires > 0 AND c.expires < ? ORDER BY c.expires LIMIT ?
"""  # noqa: S608 - of constants
TAIL: Final = """
    SELECT r.position, c.name, r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM record r CROSS JOIN chain c ON c.number = r.chain WHERE r.position > ? ORDER BY r.position LIMIT ?
"""
STANDING: Final = """
    SELECT DISTINCT json_extract(text, '$.level'), json_extract(text, '$.base_digest'), json_extract(text, '$.layers')
    FROM spec WHERE EXISTS (SELECT 1 FROM chain c WHERE c.spec_number = spec.number AND c.state <> 'gone')
"""
_PART: Final = (
    "SELECT * FROM (SELECT number FROM chain WHERE {0} AND number > :after ORDER BY number LIMIT :limit)"
)


def page(classes: int, *, of_project: bool, live: bool) -> str:
    """A page of those in so many classes: the first of each class by its index, and of these the first.

    Parameters: ``c0`` … the classes; ``after``, ``limit``, ``project``, and ``states``, a list as JSON, where ``live`` is among the classes.
    """
    parts = []
    for n in range(classes):
        words = [f"class = :c{n}"]
        if of_project:
            words.append("project = :project")
        if live and n == 0:
            words.append("state IN (SELECT value FROM json_each(:states))")
        parts.append(_PART.format(" AND ".join(words)))
    numbers = " UNION ALL ".join(parts)
    return f"""
        SELECT {_COLUMNS} FROM chain c JOIN spec s ON s.number = c.spec_number
        WHERE c.number IN (SELECT number FROM ({numbers}) ORDER BY number LIMIT :limit) ORDER BY c.number
    """  # noqa: S608 - of constants


SURPLUS: Final = """
    SELECT number FROM chain WHERE class IN ('gone', 'failed') ORDER BY state = 'failed', ended, number
    LIMIT max(0, (SELECT count(*) FROM chain WHERE class IN ('gone', 'failed')) - ?)
"""
DROPPING: Final = """
    SELECT number, project, state, spec_number FROM chain
    WHERE number IN (SELECT value FROM json_each(?)) AND state IN ('gone', 'failed')
"""
DROP: Final = """
    UPDATE chain SET state = NULL, ended = NULL, expires = NULL, reason = NULL, created = NULL, session = NULL,
        workdir = NULL, boot = NULL, boot_at = NULL, flags = NULL, class = NULL, project = NULL, spec_number = NULL
    WHERE number IN (SELECT value FROM json_each(?))
"""
DROPPED: Final = """
    SELECT count(DISTINCT j.key)
    FROM chain c JOIN record r ON r.id > c.number << 32 AND r.id <= (c.number << 32) + 4294967295
        JOIN json_each(CAST(r.payload AS TEXT), '$.chains') j
    WHERE c.name = ? AND r.act = ?
"""
CHECKPOINT: Final = "SELECT number, digest FROM mark WHERE name = 'checkpoint'"
