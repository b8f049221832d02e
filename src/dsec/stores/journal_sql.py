"""The statements of the journal's store, as they are."""

from __future__ import annotations

from typing import Final

READ: Final = """
    SELECT r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM record r JOIN chain c ON c.number = r.chain
    WHERE c.name = ? AND r.seq > ? ORDER BY r.seq LIMIT ?
"""
# `ref <> ''` lets the partial index on (chain, phase, ref) be used.
EXEC_BY_REF: Final = """
    SELECT r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM chain c JOIN record r ON r.chain = c.number
    WHERE c.name = ? AND r.phase = ? AND r.ref = ? AND r.ref <> '' AND r.act = 'exec'
    ORDER BY r.seq LIMIT 1
"""
OPEN_EXECS: Final = """
    SELECT r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest
    FROM chain c JOIN record r ON r.chain = c.number
    WHERE c.name = ? AND r.phase = 'intent' AND r.ref <> '' AND r.act = 'exec'
      AND NOT EXISTS (SELECT 1 FROM record e WHERE e.chain = r.chain AND e.phase = 'result' AND e.ref = r.ref
                      AND e.ref <> '' AND e.act = 'exec')
    ORDER BY r.seq
"""
GET: Final = """
    SELECT id, state, spec, flags, created, expires, ended, reason, session, workdir, boot, boot_at
    FROM sandbox WHERE id = ?
"""
LIST: Final = """
    SELECT id, state, spec, flags, created, expires, ended, reason, session, workdir, boot, boot_at
    FROM sandbox WHERE state IN (SELECT value FROM json_each(?)) ORDER BY created, id
"""
ADD: Final = """
    INSERT OR IGNORE INTO sandbox (id, state, spec, flags, created, expires, ended, reason, session, workdir, boot, boot_at)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
MOVE: Final = """
    UPDATE sandbox SET state = :to, ended = CASE WHEN :ends THEN iif(ended > 0, ended, :now) ELSE 0.0 END,
        reason = iif(:reason = '', reason, :reason)
    WHERE id = :id AND state = :seen RETURNING expires, ended, reason
"""
EXPIRE: Final = "UPDATE sandbox SET expires = ? WHERE id = ?"
PRUNE: Final = """
    DELETE FROM sandbox WHERE id IN (
        SELECT id FROM sandbox WHERE state IN ('gone', 'failed') ORDER BY state = 'failed', ended, id
        LIMIT min(?, max(0, (SELECT count(*) FROM sandbox WHERE state IN ('gone', 'failed')) - ?)))
"""
CHECKPOINT: Final = "SELECT number, digest FROM mark WHERE name = 'checkpoint'"
