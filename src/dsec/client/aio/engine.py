"""An engine, and the way to each of its services."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from dsec.client.aio.images import AsyncImages
from dsec.client.aio.pool import AsyncPool
from dsec.client.aio.sandboxes import AsyncSandboxes
from dsec.client.aio.snapshots import AsyncSnapshots
from dsec.client.aio.templates import AsyncTemplates
from dsec.client.aio.tenants import AsyncKeys, AsyncProjects
from dsec.client.aio.volumes import AsyncVolumes
from dsec.client.aio_link import AsyncLink, Connect
from dsec.model.sandbox import Problem


class AsyncDsec:
    """An engine, opened by ``async with`` (or :meth:`open` and :meth:`close`).

    Args:
        connect: makes or finds the engine.
    """

    def __init__(self, connect: Connect) -> None:
        self._link = AsyncLink(connect)
        self.sandboxes = AsyncSandboxes(self._link)
        self.snapshots = AsyncSnapshots(self._link)
        self.volumes = AsyncVolumes(self._link)
        self.templates = AsyncTemplates(self._link)
        self.images = AsyncImages(self._link)
        self.pool = AsyncPool(self._link)
        self.keys = AsyncKeys(self._link)
        self.projects = AsyncProjects(self._link)

    async def open(self) -> Self:
        """Open it; twice is no error.  Raises: RuntimeUnavailable, StoreDamaged, Conflict: it cannot be opened."""
        await self._link.open()
        return self

    async def close(self) -> None:
        """Close it; a private engine destroys its sandboxes first. Twice is no error."""
        await self._link.close()

    async def problems(self) -> tuple[Problem, ...]:
        """Clean-ups that failed and are being retried, oldest first."""
        return await self._link.call(self._link.services.observe.problems())

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
