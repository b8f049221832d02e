"""Which snapshots there are: rows of the journal's database, each written together with its record."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any, Final

from dsec.errors import BadRequest, Conflict, DsecError, NotFound, StoreDamaged
from dsec.model.ids import SandboxId, SnapshotId, parse_sandbox_id, parse_snapshot_id
from dsec.model.journal import Draft
from dsec.model.snapshots import SnapshotInfo, SnapshotKind
from dsec.ports.journal import SnapshotRecords
from dsec.stores.chain import prepare
from dsec.stores.ledger import Ledger
from dsec.stores.sandbox_codec import spec_from_json, spec_to_json
from dsec.stores.writer import Writer

Rows = list[tuple[Any, ...]]
Query = Callable[[str, tuple[Any, ...]], Awaitable[Rows]]

_KEEP: Final = "INSERT OR IGNORE INTO snapshot (id, sandbox, kind, spec, created, paused, project) VALUES (?, ?, ?, ?, ?, ?, ?)"
_FORGET: Final = "DELETE FROM snapshot WHERE id = ?"
_ROWS: Final = "SELECT id, sandbox, kind, spec, created, paused FROM snapshot"
_FIND: Final = f"{_ROWS} WHERE id = ?"


class SqliteSnapshots(SnapshotRecords):
    """Made by :class:`~dsec.stores.journal.SqliteStore`, whose writer and reader it shares.

    Args:
        query: a read in a thread.  Raises: Conflict: the store is closed.
    """

    def __init__(self, db: sqlite3.Connection, writer: Writer, ledger: Ledger, query: Query) -> None:
        self._db = db
        self._writer = writer
        self._ledger = ledger
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

        def job() -> None:
            if self._db.execute(_KEEP, row).rowcount != 1:
                raise Conflict(f"snapshot {info.id} exists already", snapshot=info.id)
            self._ledger.append(prepared)

        await self._writer.run(job, size=len(prepared.payload) + len(spec))

    async def forget(self, snapshot: SnapshotId, draft: Draft) -> None:
        prepared = prepare(draft)

        def job() -> None:
            if self._db.execute(_FORGET, (snapshot,)).rowcount != 1:
                raise no_snapshot(snapshot)
            self._ledger.append(prepared)

        await self._writer.run(job, size=len(prepared.payload))

    async def find(self, snapshot: SnapshotId) -> SnapshotInfo:
        rows = await self._query(_FIND, (snapshot,))
        if not rows:
            raise no_snapshot(snapshot)
        return snapshot_of(rows[0])

    async def all(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        wanted = {"sandbox": sandbox, "project": project}
        given = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join([f"{name} = ?" for name in given])
        text = f"{_ROWS} WHERE {where or 'TRUE'} ORDER BY created, id"
        return tuple(map(snapshot_of, await self._query(text, tuple(given.values()))))


def no_snapshot(snapshot: SnapshotId) -> NotFound:
    """The one answer for ids that do not exist or no longer do."""
    return NotFound(
        f"there is no snapshot {snapshot}", hint="`dsec snapshots` shows those there are", snapshot=snapshot
    )


def snapshot_of(row: tuple[Any, ...]) -> SnapshotInfo:
    """Raises: StoreDamaged: the row is not one of ours."""
    snapshot, sandbox, kind, spec, created, paused = row
    try:
        return SnapshotInfo(
            id=parse_snapshot_id(snapshot),
            sandbox=parse_sandbox_id(sandbox),
            kind=SnapshotKind(kind),
            spec=spec_from_json(spec),
            created_at=float(created),
            paused=float(paused),
        )
    except StoreDamaged:
        raise
    except (BadRequest, DsecError, ValueError, TypeError) as exc:
        raise StoreDamaged(f"the stored row of snapshot {snapshot!r} cannot be read: {exc}") from exc
