"""Snapshots in memory, for tests of what the engine decides about them."""

from __future__ import annotations

from pathlib import Path

from anyio import to_thread

from dsec.errors import Conflict, NotFound, StorageFull
from dsec.model.ids import SandboxId, SnapshotId
from dsec.model.journal import Draft
from dsec.model.snapshots import SnapshotInfo
from dsec.ports.journal import Journal, SnapshotRecords
from dsec.ports.storage import Fill, Snapshots


class MemorySnapshots(SnapshotRecords):
    """Rows in memory, whose records go to ``journal``."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._rows: dict[SnapshotId, SnapshotInfo] = {}

    async def keep(self, info: SnapshotInfo, draft: Draft) -> None:
        if info.id in self._rows:
            raise Conflict(f"snapshot {info.id} exists already")
        await self._journal.append(draft)
        self._rows[info.id] = info

    async def forget(self, snapshot: SnapshotId, draft: Draft) -> None:
        await self.find(snapshot)
        await self._journal.append(draft)
        del self._rows[snapshot]

    async def find(self, snapshot: SnapshotId) -> SnapshotInfo:
        if snapshot not in self._rows:
            raise NotFound(f"there is no snapshot {snapshot}")
        return self._rows[snapshot]

    async def all(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        rows = [row for row in self._rows.values() if sandbox in (None, row.sandbox)]
        rows.sort(key=lambda row: (row.created_at, row.id))
        return tuple([row for row in rows if project in (None, row.spec.project)])


class FakeSnapshots(Snapshots):
    """Which snapshots there are, without any files. ``full``: taking one raises StorageFull.

    Attributes:
        taken: of which sandbox each is.
    """

    def __init__(self) -> None:
        self.full = False
        self.taken: dict[SnapshotId, SandboxId] = {}

    def changes(self, snapshot: SnapshotId) -> Path:
        """A path where nothing is."""
        if snapshot not in self.taken:
            raise NotFound(f"there is no snapshot {snapshot}", snapshot=snapshot)
        return Path("/nonexistent")

    async def settle(self) -> None:
        """Nothing is ever dirty."""

    async def take(self, sandbox: SandboxId, snapshot: SnapshotId) -> None:
        if self.full:
            raise StorageFull("the pool of writable layers is full", hint="make room")
        self.taken[snapshot] = sandbox

    async def put(self, snapshot: SnapshotId, fill: Fill, size: int) -> None:
        if self.full:
            raise StorageFull("the pool of writable layers is full", hint="make room")
        self.taken[snapshot] = SandboxId("")
        await to_thread.run_sync(fill, Path("/nonexistent"), lambda: None)

    async def secure(self) -> None:
        """As durable as memory is."""

    async def drop(self, snapshot: SnapshotId) -> None:
        self.taken.pop(snapshot, None)

    async def list(self) -> tuple[SnapshotId, ...]:
        return tuple(self.taken)
