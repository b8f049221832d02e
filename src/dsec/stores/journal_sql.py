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
GET: Final = """
    SELECT number, name, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, spec
    FROM chain WHERE name = ? AND state IS NOT NULL
"""
LIST: Final = """
    SELECT number, name, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, spec
    FROM chain WHERE state IN (SELECT value FROM json_each(?)) ORDER BY created, name
"""
ADD: Final = """
    INSERT OR IGNORE INTO chain
        (name, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, spec)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
CHANGE: Final = """
    UPDATE chain SET state = ?, ended = ?, expires = ?, reason = ?, unsigned = 1 WHERE number = ? AND state = ?
"""
SURPLUS: Final = """
    SELECT number FROM chain WHERE state IN ('gone', 'failed') ORDER BY state = 'failed', ended, number
    LIMIT max(0, (SELECT count(*) FROM chain WHERE state IN ('gone', 'failed')) - ?)
"""
DROP: Final = """
    UPDATE chain SET state = NULL, ended = NULL, expires = NULL, reason = NULL, created = NULL, session = NULL,
        workdir = NULL, boot = NULL, boot_at = NULL, flags = NULL, spec = NULL
    WHERE number IN (SELECT value FROM json_each(?)) AND state IN ('gone', 'failed')
"""
DROPPED: Final = """
    SELECT count(DISTINCT j.key)
    FROM chain c JOIN record r ON r.id > c.number << 32 AND r.id <= (c.number << 32) + 4294967295
        JOIN json_each(CAST(r.payload AS TEXT), '$.chains') j
    WHERE c.name = ? AND r.act = ?
"""
CHECKPOINT: Final = "SELECT number, digest FROM mark WHERE name = 'checkpoint'"

PAGE: Final = """
    SELECT number, name, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, spec
    FROM chain WHERE state IN (SELECT value FROM json_each(?)) AND number > ?
        AND (? = '' OR json_extract(spec, '$.project') = ?) ORDER BY number LIMIT ?
"""
COUNT: Final = """
    SELECT state, count(*) FROM chain
    WHERE state IS NOT NULL AND (? = '' OR json_extract(spec, '$.project') = ?) GROUP BY state
"""
EXPIRING: Final = """
    SELECT number, name, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, spec
    FROM chain WHERE state IN ('hibernated', 'cold') AND expires > 0 AND expires < ? ORDER BY expires LIMIT ?
"""
TAIL: Final = """
    SELECT position, name, seq, at, act, phase, ref, actor, payload, digest FROM (
        SELECT row_number() OVER (ORDER BY r.at, r.id) AS position, c.name, r.*
        FROM record r JOIN chain c ON c.number = r.chain)
    WHERE position > ? ORDER BY position LIMIT ?
"""
