"""Chains, records, specifications, snapshots, volumes and marks."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_STATEMENTS = (
    # A chain and, in the same row, the sandbox whose chain it is: `state` is NULL where it is of none, or no longer.
    """
    CREATE TABLE chain (
        number bigint PRIMARY KEY, name text NOT NULL UNIQUE,
        state text, ended double precision, expires double precision, reason text, created double precision,
        session text, workdir bytea, boot text, boot_at double precision, flags text,
        class text, project text, spec_number bigint
    ) WITH (fillfactor = 90)
    """,
    """
    CREATE TABLE record (
        chain bigint NOT NULL, seq bigint NOT NULL, position bigint NOT NULL, at bigint NOT NULL,
        act text NOT NULL, phase text NOT NULL, ref text NOT NULL, actor text NOT NULL,
        payload bytea, payload_digest bytea, digest bytea NOT NULL,
        PRIMARY KEY (chain, seq)
    )
    """,
    "CREATE TABLE spec (number bigint PRIMARY KEY, digest bytea NOT NULL UNIQUE, text text NOT NULL)",
    """
    CREATE TABLE snapshot (
        id text PRIMARY KEY, sandbox text NOT NULL, kind text NOT NULL, spec text NOT NULL,
        created double precision NOT NULL, paused double precision NOT NULL
    )
    """,
    """
    CREATE TABLE volume (
        id text PRIMARY KEY, project text NOT NULL, name text NOT NULL, size bigint NOT NULL,
        created double precision NOT NULL, UNIQUE (project, name)
    )
    """,
    "CREATE TABLE mark (name text PRIMARY KEY, number bigint NOT NULL, digest bytea NOT NULL)",
    "CREATE UNIQUE INDEX record_position ON record (position)",
    "CREATE INDEX chain_class ON chain (class, number)",
    "CREATE INDEX chain_project ON chain (project, class, number) WHERE project IS NOT NULL",
    "CREATE INDEX chain_spec ON chain (spec_number) WHERE spec_number IS NOT NULL",
    "CREATE INDEX chain_expires ON chain (expires) WHERE class IN ('hibernated', 'cold') AND expires > 0",
    r"""
    INSERT INTO mark VALUES ('checkpoint', 0, decode(repeat('00', 32), 'hex')), ('signed', 0, ''), ('owner', 0, ''),
        ('bytes', 0, ''), ('counted', 0, ''), ('flush', 0, '')
    """,
)


def upgrade() -> None:
    for statement in _STATEMENTS:
        op.execute(statement)
