"""Recognising a control database: made where there is none, brought up to date, refused where it is not what it was.

All in one transaction: whoever is killed in it has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, column, inspect, select, table, text

from dsec.errors import StoreDamaged
from dsec.stores.control.faults import WHAT
from dsec.stores.control.tables import HEAD, SCHEMA, VERSIONS, metadata

APPLICATION_ID: Final = 0x44736354  # "DscT"
_CHECKED_BYTES: Final = 64 * 2**20  # a larger file is not read from end to end at every start
STEPS: Final = "control_steps"
"""The directory of the migrations, beside ours."""
_LOCK: Final = 0x44736354
_SQLITE: Final = "sqlite"
_HINT: Final = "restore it from a copy, or see docs/how-to: what to do when it is lost"


def is_there(connection: Connection) -> bool:
    """Whether it was ever made.  Raises: StoreDamaged: it is something else."""
    if connection.dialect.name == _SQLITE:
        _check_file(connection)
        return VERSIONS in inspect(connection).get_table_names()
    connection.execute(
        text(f"SELECT pg_advisory_xact_lock({_LOCK})")
    )  # who makes the schema at the same time
    if SCHEMA not in inspect(connection).get_schema_names():
        return False
    return VERSIONS in inspect(connection).get_table_names(schema=SCHEMA)


def _check_file(connection: Connection) -> None:
    """Raises: StoreDamaged: another program's, or broken."""
    application = connection.exec_driver_sql("PRAGMA application_id").scalar()
    tables = inspect(connection).get_table_names()
    if application != APPLICATION_ID and (application or tables):
        raise StoreDamaged(f"{WHAT} is not one of DSec (application id {application})", hint=_HINT)
    pages, size = (
        connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("page_count", "page_size")
    )
    if pages * size <= _CHECKED_BYTES:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if found != "ok":
            raise StoreDamaged(f"{WHAT} is broken: {found}", hint=_HINT)


def bring_up(connection: Connection) -> None:
    """Make it, or make it one of this version.  Raises: StoreDamaged: it is of a later one, or its tables are not as they were made."""
    written = _written(connection)
    if written != HEAD:
        _migrate(connection, written)
    _check_tables(connection)


def _written(connection: Connection) -> str:
    """The migration that was the last, "" = none."""
    if connection.dialect.name == _SQLITE:
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
    elif SCHEMA not in inspect(connection).get_schema_names():
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
    if VERSIONS not in inspect(connection).get_table_names():
        return ""
    rows: Sequence[str] = (
        connection.execute(select(column("version_num")).select_from(table(VERSIONS))).scalars().all()
    )
    if len(rows) != 1:
        raise StoreDamaged(f"{WHAT} has {len(rows)} versions", hint=_HINT)
    return str(rows[0])


def _migrate(connection: Connection, written: str) -> None:
    from alembic import command  # noqa: PLC0415 - takes longer than all else, and is needed once a version
    from alembic.config import Config  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    config = Config()
    here = Path(__file__).parent
    for name, directory in (("script_location", here), ("version_locations", here.with_name(STEPS))):
        config.set_main_option(name, str(directory).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if written and written not in known:
        raise StoreDamaged(
            f"{WHAT} has version {written!r}, this DSec knows {HEAD!r}", hint="use the DSec that wrote it"
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _check_tables(connection: Connection) -> None:
    looked = inspect(connection)
    for name, made in metadata.tables.items():
        found = {each["name"] for each in looked.get_columns(name)} if looked.has_table(name) else set()
        wanted = {each.name for each in made.columns}
        if found != wanted:
            odd = ", ".join(sorted(found ^ wanted))
            raise StoreDamaged(f"{WHAT}: table {name} is not as it was made: {odd}", hint=_HINT)
