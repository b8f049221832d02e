"""The tables of the control database, as they are now. How they came to be is in `control_steps`."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Index,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

HEAD: Final = "0001"
"""The newest migration."""
VERSIONS: Final = "control_version"
"""Where the database itself says which migration was the last."""
SCHEMA: Final = "dsec"
"""Of PostgreSQL, in which all of them are."""

metadata: Final = MetaData()

API_KEY: Final = Table(
    "api_key",
    metadata,
    Column("id", Text, primary_key=True),
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("scope", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("sandbox", Text, nullable=True),
    Column("created", Double, nullable=False),
    Column("used", Double, nullable=False),
    Column("expires", Double, nullable=False),
    Column("revoked", Double, nullable=False),
    Index(
        "api_key_sandbox",
        "sandbox",
        sqlite_where=text("sandbox IS NOT NULL"),
        postgresql_where=text("sandbox IS NOT NULL"),
    ),
)

PROJECT: Final = Table(
    "project",
    metadata,
    Column("name", Text, primary_key=True),
    Column("quota", Text, nullable=False),
    Column("created", Double, nullable=False),
)

CALL: Final = Table(
    "idempotent_call",
    metadata,
    Column("project", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("request", Text, nullable=False),
    Column("status", BigInteger, nullable=False),
    Column("media", Text, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Column("created", Double, nullable=False),
    Index("idempotent_call_created", "created"),
)

CURSOR: Final = Table(
    "export_cursor",
    metadata,
    Column("name", Text, primary_key=True),
    Column("position", BigInteger, nullable=False),
    Column("changed", Double, nullable=False),
)


def inserted(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An insertion that may say what to do where the row is there already."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)
