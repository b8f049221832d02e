"""An open control database, and what is kept in it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from anyio import to_thread
from sqlalchemy import Connection, select

from dsec.errors import StoreDamaged
from dsec.model.ids import KeyId, SandboxId
from dsec.model.tenants import KeyInfo, ProjectInfo
from dsec.ports.tenants import Cursors, KeyRecords
from dsec.stores.control import rows
from dsec.stores.control.database import Database, PostgresDatabase, SqliteDatabase, make_file
from dsec.stores.control.faults import WHAT
from dsec.stores.control.tables import CURSOR, inserted
from dsec.stores.control.upgrade import bring_up, is_there

DATABASE: Final = "control.db"
Used = Callable[[], Awaitable[bool]]


async def open_control(where: Path | str, *, was_used: Used, synced: bool = False) -> ControlStore:
    """The control database of a directory (SQLite, in ``control.db``), or of a URL of PostgreSQL; made where there is none.

    Args:
        was_used: whether others know of keys that were made: asked where there is none.
        synced: commits of SQLite survive a loss of power.

    Raises:
        StoreDamaged: it is broken, of a later version, something else, or not there although it was used.
        StorageFull, Denied, BadRequest, Unsupported, RuntimeUnavailable.
    """
    if isinstance(where, Path):
        await to_thread.run_sync(make_file, where / DATABASE)
        database: Database = SqliteDatabase(where / DATABASE, synced=synced)
    else:
        database = PostgresDatabase(where)
    try:
        if not await database.run(is_there) and await was_used():
            raise StoreDamaged(
                f"{WHAT} is not there, and the journal says that keys were made",
                hint="restore it from a copy; or go on without the old keys and quotas: `dsec key begin-anew`",
            )
        await database.run(bring_up)
    except BaseException:
        await database.close()
        raise
    return ControlStore(database)


class ControlStore(KeyRecords, Cursors):
    """See the module.

    Attributes:
        database: for what else is kept in it.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    async def close(self) -> None:
        """Twice is no error."""
        await self.database.close()

    async def find(self, digest: bytes) -> KeyInfo | None:
        return await self.database.run(lambda connection: rows.key_of_digest(connection, digest))

    async def get(self, key: KeyId) -> KeyInfo | None:
        return await self.database.run(lambda connection: rows.key_of_id(connection, key))

    async def add(self, info: KeyInfo, digest: bytes) -> None:
        await self.database.run(lambda connection: rows.add_key(connection, info, digest))

    async def page(self, project: str, *, after: str, limit: int) -> tuple[KeyInfo, ...]:
        return await self.database.run(lambda connection: rows.keys_of(connection, project, after, limit))

    async def revoke(self, key: KeyId, at: float) -> KeyInfo | None:
        return await self.database.run(lambda connection: rows.revoke_key(connection, key, at))

    async def used(self, used: Mapping[KeyId, float]) -> frozenset[KeyId]:
        return await self.database.run(lambda connection: rows.note_use(connection, used))

    async def with_tokens(self, after: str, limit: int) -> tuple[SandboxId, ...]:
        return await self.database.run(
            lambda connection: rows.sandboxes_with_tokens(connection, after, limit)
        )

    async def drop(self, *, before: float = 0.0, sandboxes: Sequence[SandboxId] = ()) -> int:
        def work(connection: Connection) -> int:
            dropped = rows.drop_old_keys(connection, before) if before else 0
            return dropped + (rows.drop_tokens(connection, sandboxes) if sandboxes else 0)

        return await self.database.run(work)

    async def projects(self) -> tuple[ProjectInfo, ...]:
        return await self.database.run(rows.projects)

    async def put_project(self, info: ProjectInfo) -> ProjectInfo:
        return await self.database.run(lambda connection: rows.put_project(connection, info))

    async def position(self, name: str) -> int:
        asked = select(CURSOR.c.position).where(CURSOR.c.name == name)
        return await self.database.run(lambda connection: connection.execute(asked).scalar() or 0)

    async def advance(self, name: str, position: int) -> None:
        await self.database.run(partial(_advance, name=name, position=position))


def _advance(connection: Connection, *, name: str, position: int) -> None:
    values = {"position": position, "changed": time.time()}
    made = inserted(connection, CURSOR).values(name=name, **values)
    connection.execute(
        made.on_conflict_do_update(index_elements=["name"], set_=values, where=CURSOR.c.position < position)
    )
