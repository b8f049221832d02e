"""Recognising a database: made where it is empty, brought up to date, refused where it is not what it was."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, Final

from dsec.errors import BadRequest, StoreDamaged, Unsupported
from dsec.stores.postgres.faults import REFUSALS, WHAT, translate
from dsec.stores.postgres.line import connect
from dsec.stores.postgres.tables import HEAD, INDEXES, SCHEMA, TABLES, VERSIONS

_MAKING: Final = 0x44736354  # whoever makes something in the schema `dsec` at the same time
_HINT: Final = "restore it from a copy, or name another database"
_FOUND: Final = "SELECT table_name::text FROM information_schema.tables WHERE table_schema = 'dsec'"
STEPS: Final = "postgres_steps"
"""The directory of the migrations, beside ours."""
_COLUMNS: Final = """
    SELECT table_name::text, string_agg(column_name, ' ' ORDER BY ordinal_position)
    FROM information_schema.columns WHERE table_schema = 'dsec' AND table_name = ANY($1::text[]) GROUP BY table_name
"""
_INDEXES: Final = """
    SELECT c.relname::text FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'dsec' AND i.indisvalid
"""
FORM: Final = "postgresql://USER:PASSWORD@HOST/DATABASE"


async def is_there(connection: Any) -> bool:
    """Whether a journal was ever made in it.  Raises: StoreDamaged: what is there is another's."""
    found = {row[0] for row in await connection.fetch(_FOUND)}
    if VERSIONS in found:
        return True
    odd = sorted(found & TABLES.keys())
    if odd:
        raise StoreDamaged(
            f"{WHAT} holds a table {odd[0]} in schema dsec that is none of a journal", hint=_HINT
        )
    return False


async def written(connection: Any) -> str:
    """The migration that was the last.  Raises: StoreDamaged: it does not say."""
    rows = await connection.fetch(f"SELECT version_num FROM {VERSIONS}")  # noqa: S608 - a constant
    if len(rows) != 1:
        raise StoreDamaged(f"{WHAT} says {len(rows)} versions", hint=_HINT)
    return str(rows[0][0])


async def bring_up(url: str) -> None:
    """Make the tables, or make them those of this version: all or nothing, in a thread: Alembic reads files.

    Raises:
        StoreDamaged: it is of a later version. Unsupported: what is needed is not installed.
    """
    await asyncio.to_thread(asyncio.run, _bring_up(url))


async def _bring_up(url: str) -> None:
    try:
        from sqlalchemy import Connection, NullPool, text  # noqa: PLC0415 - needed once a version
        from sqlalchemy.exc import DBAPIError  # noqa: PLC0415
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415
    except ImportError as error:
        raise Unsupported(
            f"PostgreSQL cannot be used: {error}", hint="pip install 'dsec-engine[postgres]'"
        ) from error

    def migrate(connection: Connection) -> None:
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_MAKING})"))
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        _upgrade(connection)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        poolclass=NullPool,
        async_creator=partial(connect, url, writes=True, synchronous_commit="on"),
    )
    try:
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
    except DBAPIError as error:
        raise translate(error.orig.__cause__ or error) if error.orig else StoreDamaged(str(error)) from error
    except REFUSALS as error:
        raise translate(error) from error
    finally:
        await engine.dispose()


def _upgrade(connection: object) -> None:
    from alembic import command  # noqa: PLC0415 - takes longer than all else, and is needed once a version
    from alembic.config import Config  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    config = Config()
    here = Path(__file__).parent
    for name, directory in (("script_location", here), ("version_locations", here.with_name(STEPS))):
        config.set_main_option(name, str(directory).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreDamaged(
            f"{WHAT} is of a version that this DSec does not know: {error}", hint="use the DSec that wrote it"
        ) from error


async def check_tables(connection: Any) -> None:
    """Raises: StoreDamaged: they are not as they were made."""
    version = await written(connection)
    if version != HEAD:
        raise StoreDamaged(
            f"{WHAT} has version {version!r}, this DSec reads {HEAD!r}", hint="use the DSec that wrote it"
        )
    found = dict(await connection.fetch(_COLUMNS, list(TABLES)))
    for name, columns in TABLES.items():
        if found.get(name) != columns:
            raise StoreDamaged(f"{WHAT}: table {name} is not as it was made: {found.get(name)}", hint=_HINT)
    missing = INDEXES - {row[0] for row in await connection.fetch(_INDEXES)}
    if missing:
        raise StoreDamaged(f"{WHAT}: index {sorted(missing)[0]} is missing", hint=_HINT)


def check_url(url: str) -> str:
    """Raises: BadRequest: no URL of PostgreSQL."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise BadRequest("database: this is no URL of a database that can be used", hint=FORM)
    return "postgresql://" + url.partition("://")[2]
