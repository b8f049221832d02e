"""Keys, projects, answered calls, and cursors."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    bound = sa.text("sandbox IS NOT NULL")
    op.create_table(
        "api_key",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("sandbox", sa.Text, nullable=True),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("used", sa.Double, nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
        sa.Column("revoked", sa.Double, nullable=False),
    )
    op.create_index("api_key_sandbox", "api_key", ["sandbox"], sqlite_where=bound, postgresql_where=bound)
    op.create_table(
        "project",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("quota", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_table(
        "idempotent_call",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("status", sa.BigInteger, nullable=False),
        sa.Column("media", sa.Text, nullable=False),
        sa.Column("answer", sa.LargeBinary, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_index("idempotent_call_created", "idempotent_call", ["created"])
    op.create_table(
        "export_cursor",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("changed", sa.Double, nullable=False),
    )
