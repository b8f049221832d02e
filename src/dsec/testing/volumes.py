"""Volumes in memory, for tests of what the engine decides about them."""

from __future__ import annotations

import os

from dsec.errors import CleanupFailed, Conflict, NotFound, StorageFull
from dsec.model.ids import VolumeId
from dsec.model.journal import Draft
from dsec.model.volumes import MOST_VOLUMES, VolumeInfo
from dsec.ports.journal import Journal, VolumeRecords
from dsec.ports.storage import Volumes


class MemoryVolumes(VolumeRecords):
    """Rows in memory, whose records go to ``journal``."""

    def __init__(self, journal: Journal, *, most: int = MOST_VOLUMES) -> None:
        self._journal = journal
        self._most = most
        self._rows: dict[tuple[str, str], VolumeInfo] = {}

    async def keep(self, info: VolumeInfo, draft: Draft) -> None:
        if len(self._rows) >= self._most:
            raise StorageFull(f"the engine holds {self._most} volumes, its maximum")
        if (info.project, info.name) in self._rows:
            raise Conflict(f"volume {info.name!r} exists already in project {info.project!r}")
        await self._journal.append(draft)
        self._rows[info.project, info.name] = info

    async def forget(self, project: str, name: str, draft: Draft) -> None:
        await self.find(project, name)
        await self._journal.append(draft)
        del self._rows[project, name]

    async def find(self, project: str, name: str) -> VolumeInfo:
        found = self._rows.get((project, name))
        if found is None:
            raise NotFound(f"there is no volume {name!r} in project {project!r}")
        return found

    async def all(self, project: str | None = None) -> tuple[VolumeInfo, ...]:
        return tuple(self._rows[key] for key in sorted(self._rows) if project in (None, key[0]))


class FakeVolumes(Volumes):
    """Which volumes there are, without any files.

    Attributes:
        sizes: MiB, of those there are. full: making one raises StorageFull. undead: dropping one of these raises CleanupFailed.
    """

    def __init__(self) -> None:
        self.full = False
        self.undead: set[VolumeId] = set()
        self.sizes: dict[VolumeId, int] = {}

    async def make(self, volume: VolumeId, size_mib: int) -> None:
        if self.full:
            raise StorageFull("the pool of writable layers is full", hint="make room")
        if volume in self.sizes:
            raise Conflict(f"volume {volume} exists already")
        self.sizes[volume] = size_mib

    def open(self, volume: VolumeId) -> int:
        if volume not in self.sizes:
            raise NotFound(f"there is no volume {volume}")
        return os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)

    async def used(self, volume: VolumeId) -> int:
        if volume not in self.sizes:
            raise NotFound(f"there is no volume {volume}")
        return 0

    async def drop(self, volume: VolumeId) -> None:
        if volume in self.undead:
            raise CleanupFailed(f"{volume} was ordered not to go")
        self.sizes.pop(volume, None)

    async def list(self) -> tuple[VolumeId, ...]:
        return tuple(self.sizes)
