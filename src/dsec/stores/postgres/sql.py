"""The statements of the journal in PostgreSQL, as they are. Names are those of the schema `dsec`."""

from __future__ import annotations

from typing import Final

_RECORD: Final = "r.seq, r.at, r.act, r.phase, r.ref, r.actor, r.payload, r.digest"
_COLUMNS: Final = """
    c.number, c.name, c.state, c.ended, c.expires, c.reason, c.created, c.session, c.workdir, c.boot, c.boot_at,
    c.flags, s.text
"""
_SANDBOX: Final = f"SELECT {_COLUMNS} FROM chain c JOIN spec s ON s.number = c.spec_number"  # noqa: S608

READ: Final = f"""
    SELECT {_RECORD} FROM chain c JOIN record r ON r.chain = c.number
    WHERE c.name = $2 AND r.seq > $1 ORDER BY r.seq LIMIT $3
"""  # noqa: S608 - of constants, as all below
LATEST: Final = f"""
    SELECT {_RECORD} FROM chain c JOIN record r ON r.chain = c.number
    WHERE c.name = $1 AND r.act = $2 ORDER BY r.seq DESC LIMIT $3
"""  # noqa: S608
LATEST_OF_REF: Final = f"""
    SELECT {_RECORD} FROM chain c JOIN record r ON r.chain = c.number
    WHERE c.name = $1 AND r.act = $2 AND r.ref = $3 ORDER BY r.seq DESC LIMIT $4
"""  # noqa: S608
UNANSWERED: Final = f"""
    SELECT {_RECORD} FROM (
        SELECT DISTINCT ON (r.act, r.ref) r.* FROM chain c JOIN record r ON r.chain = c.number
        WHERE c.name = $1 AND r.ref <> '' AND r.phase IN ('intent', 'result') ORDER BY r.act, r.ref, r.seq DESC) r
    WHERE r.phase = 'intent' ORDER BY r.seq
"""  # noqa: S608
TAIL: Final = f"""
    SELECT r.position, c.name, {_RECORD} FROM record r JOIN chain c ON c.number = r.chain
    WHERE r.position > $1 ORDER BY r.position LIMIT $2
"""  # noqa: S608
GET: Final = f"{_SANDBOX} WHERE c.name = $1 AND c.state IS NOT NULL"
LIST: Final = f"""
    {_SANDBOX} WHERE c.class = ANY($1::text[]) AND c.state = ANY($2::text[]) ORDER BY c.created, c.name
"""
EXPIRING: Final = f"""
    {_SANDBOX} WHERE c.class IN ('hibernated', 'cold') AND c.expires > 0 AND c.expires < $1 ORDER BY c.expires LIMIT $2
"""
STANDING: Final = """
    SELECT DISTINCT text::json->>'level', text::json->>'base_digest', (text::json->'layers')::text
    FROM spec WHERE EXISTS (SELECT 1 FROM chain c WHERE c.spec_number = spec.number AND c.state <> 'gone')
"""
_PART: Final = "(SELECT number FROM chain WHERE {0} AND number > $1 ORDER BY number LIMIT $2)"


def page(
    classes: list[str], states: list[str], project: str, after: int, limit: int
) -> tuple[str, list[object]]:
    """A page of those in these classes: the first of each class by its index, and of these the first."""
    values: list[object] = [after, limit]

    def place(value: object) -> str:
        values.append(value)
        return f"${len(values)}"

    parts = []
    for name in classes:
        words = [f"class = {place(name)}"]
        if project:
            words.append(f"project = {place(project)}")
        if name == "live":
            words.append(f"state = ANY({place(states)}::text[])")
        parts.append(_PART.format(" AND ".join(words)))
    numbers = " UNION ALL ".join(parts)
    first = f"SELECT number FROM ({numbers}) n ORDER BY number LIMIT $2"  # noqa: S608
    text = f"{_SANDBOX} WHERE c.number IN ({first}) ORDER BY c.number"
    return text, values


HEADS: Final = f"""
    SELECT c.name AS chain_name, c.number AS chain_number, r.seq, r.digest, {_COLUMNS}
    FROM chain c LEFT JOIN LATERAL (SELECT seq, digest FROM record WHERE chain = c.number ORDER BY seq DESC LIMIT 1) r ON true
        LEFT JOIN spec s ON s.number = c.spec_number
    WHERE c.name = ANY($1::text[])
"""  # noqa: S608
SPECS: Final = "SELECT text, number FROM spec WHERE digest = ANY($1::bytea[])"
# A chain that was dropped goes on where it ended: a record of the chain "engine" says where. See retention.py.
DROPPED_AT: Final = """
    SELECT j.value->>0, j.value->>1
    FROM chain c JOIN record r ON r.chain = c.number, json_each(convert_from(r.payload, 'UTF8')::json->'chains') j
    WHERE c.name = 'engine' AND r.act = 'journal.drop' AND j.key = $1 ORDER BY r.seq DESC LIMIT 1
"""
DROPPED: Final = """
    SELECT count(DISTINCT j.key)
    FROM chain c JOIN record r ON r.chain = c.number, json_each(convert_from(r.payload, 'UTF8')::json->'chains') j
    WHERE c.name = $1 AND r.act = $2
"""
INSERT: Final = """
    INSERT INTO record (chain, seq, position, at, act, phase, ref, actor, payload, digest)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
"""
# One statement is one transaction, in one message. What was not as it was read ends it: 1 / 0.
STORE: Final = """
    WITH s AS (
        INSERT INTO spec (number, digest, text) SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::text[])
    ), c AS (
        INSERT INTO chain (number, name, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags,
            class, project, spec_number)
        SELECT * FROM unnest($4::bigint[], $5::text[], $6::text[], $7::float8[], $8::float8[], $9::text[], $10::float8[],
            $11::text[], $12::bytea[], $13::text[], $14::float8[], $15::text[], $16::text[], $17::text[], $18::bigint[])
    ), u AS (
        UPDATE chain SET state = v.state, class = v.class, ended = v.ended, expires = v.expires, reason = v.reason
        FROM unnest($19::bigint[], $20::text[], $21::text[], $22::text[], $23::float8[], $24::float8[], $25::text[])
            AS v (number, seen, state, class, ended, expires, reason)
        WHERE chain.number = v.number AND chain.state = v.seen RETURNING 1
    ), r AS (
        INSERT INTO record (chain, seq, position, at, act, phase, ref, actor, payload, digest)
        SELECT * FROM unnest($26::bigint[], $27::bigint[], $28::bigint[], $29::bigint[], $30::text[], $31::text[],
            $32::text[], $33::text[], $34::bytea[], $35::bytea[])
        RETURNING 1
    )
    SELECT 1 / (CASE WHEN (SELECT count(*) FROM u) = cardinality($19::bigint[]) THEN 1 ELSE 0 END)
"""
AT: Final = "SELECT digest FROM record WHERE position = $1"
LAST: Final = "SELECT coalesce(max(position), 0) FROM record"
NUMBERS: Final = """
    SELECT (SELECT coalesce(max(number), 0) FROM chain), (SELECT coalesce(max(number), 0) FROM spec)
"""
MARKS: Final = "SELECT name, number, digest FROM mark"
MARK: Final = "UPDATE mark SET number = $2, digest = $3 WHERE name = $1"
# Of a server that crashed meanwhile, and does not have those records, it changes nothing.
FLUSH: Final = """
    UPDATE mark SET number = number + 1 WHERE name = 'flush' AND (SELECT max(position) FROM record) >= $1
"""
COUNTS: Final = """
    SELECT project, class, count(*) FROM chain WHERE project IS NOT NULL AND class <> 'live' GROUP BY project, class
    UNION ALL
    SELECT project, state, count(*) FROM chain WHERE class = 'live' GROUP BY project, state
"""
UNSIGNED: Final = """
    SELECT c.name, c.number, r.seq, r.digest FROM (
        SELECT DISTINCT ON (chain) chain, seq, digest, position FROM record WHERE position > $1 ORDER BY chain, seq DESC) r
        JOIN chain c ON c.number = r.chain
    ORDER BY r.position
"""
SIZE: Final = "SELECT coalesce(sum(octet_length(payload) + 250), 0)::bigint FROM record WHERE position > $1"
BYTES: Final = """
    SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'dsec' AND c.relname = ANY($1::text[])
"""

SURPLUS: Final = """
    SELECT number FROM chain WHERE class IN ('gone', 'failed') ORDER BY (class = 'failed'), ended, number
    LIMIT greatest(0, (SELECT count(*) FROM chain WHERE class IN ('gone', 'failed')) - $1)
"""
DROPPING: Final = """
    SELECT number, name, project, state, spec_number FROM chain WHERE number = ANY($1::bigint[]) AND class IN ('gone', 'failed')
"""
DROP: Final = """
    UPDATE chain SET state = NULL, ended = NULL, expires = NULL, reason = NULL, created = NULL, session = NULL,
        workdir = NULL, boot = NULL, boot_at = NULL, flags = NULL, class = NULL, project = NULL, spec_number = NULL
    WHERE number = ANY($1::bigint[])
"""
DROP_SPECS: Final = """
    DELETE FROM spec WHERE number = ANY($1::bigint[]) AND NOT EXISTS (SELECT 1 FROM chain c WHERE c.spec_number = spec.number)
"""
# Each part is in the order of the index on `class`.
VICTIMS: Final = """
    SELECT v.number, v.name, r.seq, r.digest, r.position FROM (
        (SELECT number, name FROM chain WHERE class IS NULL AND name <> 'engine' ORDER BY number LIMIT $2)
        UNION ALL
        (SELECT number, name FROM chain WHERE class = 'gone' AND ended < $1 ORDER BY number LIMIT $2)
        UNION ALL
        (SELECT number, name FROM chain WHERE class = 'failed' AND ended < $1 ORDER BY number LIMIT $2)) v
        JOIN LATERAL (SELECT seq, digest, position FROM record WHERE chain = v.number ORDER BY seq DESC LIMIT 1) r ON true
    ORDER BY v.number LIMIT $2
"""
NEWEST: Final = "SELECT chain, max(seq) FROM record WHERE chain = ANY($1::bigint[]) GROUP BY chain"
DELETE: Final = """
    WITH gone AS (
        DELETE FROM record USING unnest($1::bigint[], $2::bigint[]) AS v (number, last)
        WHERE record.chain = v.number AND record.seq <= v.last RETURNING octet_length(payload) + 250 AS size
    ), kept AS (
        UPDATE mark SET number = greatest(0, number - coalesce((SELECT sum(size) FROM gone), 0)) WHERE name = 'bytes'
    )
    SELECT coalesce(sum(size), 0)::bigint FROM gone
"""
FORGET: Final = (
    "DELETE FROM chain WHERE number = ANY($1::bigint[]) RETURNING name, project, state, spec_number"
)

KEEP_SNAPSHOT: Final = "INSERT INTO snapshot (id, sandbox, kind, spec, created, paused, project) VALUES ($1, $2, $3, $4, $5, $6, $7)"
FORGET_SNAPSHOT: Final = "DELETE FROM snapshot WHERE id = $1"
_SNAPSHOT: Final = "SELECT id, sandbox, kind, spec, created, paused FROM snapshot"
FIND_SNAPSHOT: Final = f"{_SNAPSHOT} WHERE id = $1"


def snapshots(sandbox: str | None, project: str | None) -> tuple[str, list[str]]:
    """Those of one sandbox, or of one project, or all."""
    given = [
        (name, value) for name, value in (("sandbox", sandbox), ("project", project)) if value is not None
    ]
    where = " AND ".join([f"{name} = ${place}" for place, (name, _) in enumerate(given, 1)])
    return f"{_SNAPSHOT} WHERE {where or 'true'} ORDER BY created, id", [value for _, value in given]


KEEP_VOLUME: Final = "INSERT INTO volume (id, project, name, size, created) VALUES ($1, $2, $3, $4, $5)"
FORGET_VOLUME: Final = "DELETE FROM volume WHERE project = $1 AND name = $2"
_VOLUME: Final = "SELECT id, project, name, size, created FROM volume"
FIND_VOLUME: Final = f"{_VOLUME} WHERE project = $1 AND name = $2"
OF_PROJECT: Final = f"{_VOLUME} WHERE project = $1 ORDER BY name"
ALL_VOLUMES: Final = f"{_VOLUME} ORDER BY project, name"
COUNT_VOLUMES: Final = "SELECT count(*) FROM volume"
