"""Volumes: files that sandboxes use one after the other."""

from __future__ import annotations

from dsec.client.aio_link import AsyncLink
from dsec.model.volumes import DEFAULT_PROJECT, DEFAULT_SIZE_MIB, VolumeInfo


class AsyncVolumes:
    """The volumes of an engine: files by name within a ``project``, for one sandbox after the other. Those of a private engine end with it.

    What is in one project is found in no other one.

    Every method raises:
        BadRequest: a name, or a project, that is none.
    """

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def create(
        self, name: str, *, size_mib: int = DEFAULT_SIZE_MIB, project: str = DEFAULT_PROJECT
    ) -> VolumeInfo:
        """Make an empty volume called ``name``, which may come to hold ``size_mib``. It takes room as it fills.

        Raises:
            Conflict: the project has one of that name. StorageFull: the engine holds its maximum.
            Unsupported: no level here has volumes. StorageFull: there is no room.
        """
        return await self._link.call(self._link.services.volumes.create(project, name, size_mib))

    async def get(self, name: str, *, project: str = DEFAULT_PROJECT) -> VolumeInfo:
        """The volume ``name``, with what it holds and who uses it now.  Raises: NotFound: the project has none of that name."""
        return await self._link.call(self._link.services.volumes.get(project, name))

    async def list(self, *, project: str = DEFAULT_PROJECT) -> tuple[VolumeInfo, ...]:
        """Those of the ``project``, by name."""
        return await self._link.call(self._link.services.volumes.list(project))

    async def remove(self, name: str, *, project: str = DEFAULT_PROJECT) -> None:
        """Remove the volume ``name`` with all its files. Twice is no error.  Raises: Conflict: a sandbox uses it. CleanupFailed: call again."""
        await self._link.call(self._link.services.volumes.remove(project, name))
