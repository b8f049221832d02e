"""Which snapshots and volumes there are, in PostgreSQL: each row is written together with its record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from dsec.errors import Conflict
from dsec.model.ids import SandboxId, SnapshotId
from dsec.model.journal import Draft
from dsec.model.snapshots import SnapshotInfo
from dsec.model.volumes import MOST_VOLUMES, VolumeInfo
from dsec.ports.journal import SnapshotRecords, VolumeRecords
from dsec.stores.chain import prepare
from dsec.stores.postgres import sql
from dsec.stores.postgres.book import Sheet
from dsec.stores.postgres.writer import Job, Writer
from dsec.stores.sandbox_codec import spec_to_json
from dsec.stores.snapshot_records import no_snapshot, snapshot_of
from dsec.stores.volume_records import no_volume, too_many, volume_exists, volume_of

Query = Callable[..., Awaitable[list[Any]]]
_COUNTED: Final = """
    SELECT (SELECT count(*) FROM volume), (SELECT count(*) FROM volume WHERE project = $1 AND name = $2 OR id = $3)
"""


class PostgresSnapshots(SnapshotRecords):
    """Made by the store, whose writer and readers it shares."""

    def __init__(self, writer: Writer, query: Query) -> None:
        self._writer = writer
        self._query = query

    async def keep(self, info: SnapshotInfo, draft: Draft) -> None:
        prepared = prepare(draft)
        spec = spec_to_json(info.spec)
        row = (
            info.id,
            info.sandbox,
            info.kind.value,
            spec,
            float(info.created_at),
            float(info.paused),
            info.spec.project,
        )

        def apply(sheet: Sheet, rows: list[Any]) -> None:
            if rows:
                raise Conflict(f"snapshot {info.id} exists already", snapshot=info.id)
            sheet.append(prepared)
            sheet.extra.append((sql.KEEP_SNAPSHOT, row, 1))

        probe = (sql.FIND_SNAPSHOT, (info.id,))
        size = len(prepared.payload) + len(spec)
        await self._writer.run(Job(apply, names=(draft.chain,), probe=probe, size=size))

    async def forget(self, snapshot: SnapshotId, draft: Draft) -> None:
        prepared = prepare(draft)

        def apply(sheet: Sheet, rows: list[Any]) -> None:
            if not rows:
                raise no_snapshot(snapshot)
            sheet.append(prepared)
            sheet.extra.append((sql.FORGET_SNAPSHOT, (snapshot,), 1))

        probe = (sql.FIND_SNAPSHOT, (snapshot,))
        await self._writer.run(Job(apply, names=(draft.chain,), probe=probe, size=len(prepared.payload)))

    async def find(self, snapshot: SnapshotId) -> SnapshotInfo:
        rows = await self._query(sql.FIND_SNAPSHOT, snapshot)
        if not rows:
            raise no_snapshot(snapshot)
        return snapshot_of(tuple(rows[0]))

    async def all(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        text, values = sql.snapshots(sandbox, project)
        return tuple([snapshot_of(tuple(row)) for row in await self._query(text, *values)])


class PostgresVolumes(VolumeRecords):
    """Made by the store, whose writer and readers it shares.

    Args:
        most: rows at most.
    """

    def __init__(self, writer: Writer, query: Query, *, most: int = MOST_VOLUMES) -> None:
        self._writer = writer
        self._query = query
        self._most = most

    async def keep(self, info: VolumeInfo, draft: Draft) -> None:
        prepared = prepare(draft)
        row = (info.id, info.project, info.name, info.size_mib, float(info.created_at))

        def apply(sheet: Sheet, rows: list[Any]) -> None:
            count, same = rows[0]
            if count >= self._most:
                raise too_many(self._most)
            if same:
                raise volume_exists(info.project, info.name)
            sheet.append(prepared)
            sheet.extra.append((sql.KEEP_VOLUME, row, 1))

        probe = (_COUNTED, (info.project, info.name, info.id))
        await self._writer.run(Job(apply, names=(draft.chain,), probe=probe, size=len(prepared.payload)))

    async def forget(self, project: str, name: str, draft: Draft) -> None:
        prepared = prepare(draft)

        def apply(sheet: Sheet, rows: list[Any]) -> None:
            if not rows:
                raise no_volume(project, name)
            sheet.append(prepared)
            sheet.extra.append((sql.FORGET_VOLUME, (project, name), 1))

        probe = (sql.FIND_VOLUME, (project, name))
        await self._writer.run(Job(apply, names=(draft.chain,), probe=probe, size=len(prepared.payload)))

    async def find(self, project: str, name: str) -> VolumeInfo:
        rows = await self._query(sql.FIND_VOLUME, project, name)
        if not rows:
            raise no_volume(project, name)
        return volume_of(tuple(rows[0]))

    async def all(self, project: str | None = None) -> tuple[VolumeInfo, ...]:
        rows = await (
            self._query(sql.ALL_VOLUMES) if project is None else self._query(sql.OF_PROJECT, project)
        )
        return tuple([volume_of(tuple(row)) for row in rows])
