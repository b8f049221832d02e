"""Snapshots are found by project and by sandbox."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_STATEMENTS = (
    "ALTER TABLE snapshot ADD COLUMN project text",
    "UPDATE snapshot SET project = coalesce(spec::json->>'project', 'default')",
    "ALTER TABLE snapshot ALTER COLUMN project SET NOT NULL",
    "CREATE INDEX snapshot_project ON snapshot (project, created, id)",
    "CREATE INDEX snapshot_sandbox ON snapshot (sandbox, created, id)",
)


def upgrade() -> None:
    for statement in _STATEMENTS:
        op.execute(statement)
