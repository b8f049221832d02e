"""Which volumes there are: rows of the journal's database, each written together with its record."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from dsec.errors import Conflict, DsecError, NotFound, StorageFull, StoreDamaged
from dsec.model.ids import parse_volume_id
from dsec.model.journal import Draft
from dsec.model.volumes import MOST_VOLUMES, VolumeInfo, check_project, check_size_mib, check_volume_name
from dsec.ports.journal import VolumeRecords
from dsec.stores.chain import prepare
from dsec.stores.ledger import Ledger
from dsec.stores.snapshot_records import Query
from dsec.stores.writer import Writer

_KEEP: Final = "INSERT OR IGNORE INTO volume (id, project, name, size, created) VALUES (?, ?, ?, ?, ?)"
_COUNT: Final = "SELECT count(*) FROM volume"
_FORGET: Final = "DELETE FROM volume WHERE project = ? AND name = ?"
_FIND: Final = "SELECT id, project, name, size, created FROM volume WHERE project = ? AND name = ?"
_OF_PROJECT: Final = "SELECT id, project, name, size, created FROM volume WHERE project = ? ORDER BY name"
_ALL: Final = "SELECT id, project, name, size, created FROM volume ORDER BY project, name"


class SqliteVolumes(VolumeRecords):
    """Made by :class:`~dsec.stores.journal.SqliteStore`, whose writer and reader it shares.

    Args:
        query: a read in a thread.  Raises: Conflict: the store is closed.
        most: rows at most.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        writer: Writer,
        ledger: Ledger,
        query: Query,
        *,
        most: int = MOST_VOLUMES,
    ) -> None:
        self._db = db
        self._writer = writer
        self._ledger = ledger
        self._query = query
        self._most = most

    async def keep(self, info: VolumeInfo, draft: Draft) -> None:
        prepared = prepare(draft)
        row = (info.id, info.project, info.name, info.size_mib, float(info.created_at))

        def job() -> None:
            if self._db.execute(_COUNT).fetchone()[0] >= self._most:
                raise too_many(self._most)
            if self._db.execute(_KEEP, row).rowcount != 1:
                raise volume_exists(info.project, info.name)
            self._ledger.append(prepared)

        await self._writer.run(job, size=len(prepared.payload))

    async def forget(self, project: str, name: str, draft: Draft) -> None:
        prepared = prepare(draft)

        def job() -> None:
            if self._db.execute(_FORGET, (project, name)).rowcount != 1:
                raise no_volume(project, name)
            self._ledger.append(prepared)

        await self._writer.run(job, size=len(prepared.payload))

    async def find(self, project: str, name: str) -> VolumeInfo:
        rows = await self._query(_FIND, (project, name))
        if not rows:
            raise no_volume(project, name)
        return volume_of(rows[0])

    async def all(self, project: str | None = None) -> tuple[VolumeInfo, ...]:
        rows = await (self._query(_ALL, ()) if project is None else self._query(_OF_PROJECT, (project,)))
        return tuple(map(volume_of, rows))


def no_volume(project: str, name: str) -> NotFound:
    """The one answer for names that mean nothing in this project, whatever they mean in another."""
    return NotFound(
        f"there is no volume {name!r} in project {project!r}",
        hint="`dsec volume ls` shows those there are; `dsec volume create` makes one",
        volume=name,
        project=project,
    )


def volume_exists(project: str, name: str) -> Conflict:
    """The answer to who would make it again."""
    return Conflict(
        f"volume {name!r} exists already in project {project!r}",
        hint="use it, or choose another name",
        volume=name,
        project=project,
    )


def too_many(most: int) -> StorageFull:
    """The answer when the bound is reached."""
    return StorageFull(f"the engine holds {most} volumes, its maximum", hint="remove some", volumes=most)


def volume_of(row: tuple[Any, ...]) -> VolumeInfo:
    """Raises: StoreDamaged: the row is not one of ours."""
    volume, project, name, size, created = row
    try:
        check_project("project", project)
        check_volume_name("name", name)
        check_size_mib("size", size)
        return VolumeInfo(
            id=parse_volume_id(volume), project=project, name=name, size_mib=size, created_at=float(created)
        )
    except (DsecError, ValueError, TypeError) as exc:
        raise StoreDamaged(f"the stored row of volume {volume!r} cannot be read: {exc}") from exc
