"""Level ``container``: namespaces, an overlay of read-only images and one writable layer, cgroups, seccomp. Needs root."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest, IsolationUnavailable
from dsec.model.ids import SandboxId
from dsec.model.sandbox import MIB, Flag, Level, Volume
from dsec.ports.runtime import OnEnded, Plan
from dsec.ports.storage import Image, Images, Layers
from dsec.runtimes.cgroups import Hierarchy, flags
from dsec.runtimes.spawned import SpawnedRuntime, base_flags
from dsec.runtimes.spawner import Spawner, SpawnerConfig
from dsec.wire.spawn import CreateRequest

_FLAGS: Final = frozenset(
    {
        Flag.ROOT_FS,
        Flag.LAYERS,
        Flag.DISK_QUOTA,
        Flag.PID_NAMESPACE,
        Flag.LOOPBACK,
        Flag.USERS,
        Flag.PRIVATE_UID,
        Flag.CROSS_EXEC_SIGNALS,
        Flag.VOLUMES,
    }
)


@dataclass(frozen=True, slots=True)
class Mounts:
    """Making detached mounts, injected: ``image`` from an image file, ``tree`` a clone of an open directory or file."""

    image: Callable[[Path], int]
    tree: Callable[[int, int], int]


class ContainerRuntime(SpawnedRuntime):
    """See the module.

    Raises:
        IsolationUnavailable: not root, or no cgroups.
    """

    level = Level.CONTAINER

    def __init__(
        self,
        config: SpawnerConfig,
        hierarchies: tuple[Hierarchy, ...],
        *,
        on_ended: OnEnded,
        images: Images,
        layers: Layers,
        mounts: Mounts,
    ) -> None:
        if os.geteuid() != 0:
            raise IsolationUnavailable(
                "level 'container' needs root", hint="run as root, or use level='process', which does not"
            )
        super().__init__(config, hierarchies, on_ended, layers.used)
        able = _FLAGS | flags(hierarchies)
        self.flags = base_flags(able | {Flag.SCRATCH, Flag.SNAPSHOTS} if Flag.PAUSE in able else able)
        self._images = images
        self._layers = layers
        self._mounts = mounts
        self._trees: dict[str, int] = {}
        self._resolved: dict[str, str] = {}
        self._attaching = asyncio.Lock()

    async def _attach_trees(self, spawner: Spawner) -> None:
        rw = self._mounts.tree(self._layers.root_fd(), 0)
        try:
            await spawner.tree("rw", rw)
        finally:
            os.close(rw)
        for name, fd in self._trees.items():
            await self._attach(spawner, name, fd)

    async def _attach(self, spawner: Spawner, name: str, fd: int) -> None:
        clone = self._mounts.tree(fd, 0)
        try:
            await spawner.tree(name, clone)
        finally:
            os.close(clone)

    async def _layer(self, image: Image) -> str:
        """The name under which the spawner has this image, mounted there first if need be. We keep the mount too, for its successor."""
        name = image.digest.replace(":", "-")
        if name in self._trees:
            return name
        async with self._attaching:
            if name not in self._trees:
                await self._spawner.ready()
                fd = await asyncio.to_thread(self._mounts.image, image.path)
                try:
                    await self._attach(self._spawner, name, fd)
                except BaseException:
                    os.close(fd)
                    raise
                self._trees[name] = fd
        return name

    async def _resolve(self, name: str) -> str:
        """The layer of an image, looked up once: what a name means stays the same while this engine is open."""
        layer = await self._layer(await self._images.get(name))
        self._resolved[name] = layer
        return layer

    async def _request(self, plan: Plan) -> tuple[CreateRequest, list[int]]:
        await self._spawner.ready()
        layer = self._resolved.get(plan.image) or await self._resolve(plan.image)
        over = [self._resolved.get(digest) or await self._resolve(digest) for digest in plan.layers]
        volumes = await asyncio.to_thread(self._open_volumes, plan.volumes) if plan.volumes else []
        try:
            writable = await self._writable(plan)
        except BaseException:
            for fd in volumes:
                os.close(fd)
            raise
        request = CreateRequest(
            id=plan.id,
            hostname=plan.hostname,
            memory=plan.limits.memory_mib * MIB,
            pids=plan.limits.pids + 1,
            cpu_millis=plan.limits.cpu_millis,
            open_files=plan.limits.open_files,
            deadline=int(plan.deadline * 1e9),
            writable=str(writable),
            read_only=plan.read_only,
            layers=(*over, layer),
            volumes=tuple((volume.target, volume.read_only) for volume in plan.volumes),
        )
        return request, volumes

    async def rehearse(self, plan: Plan) -> None:
        """See :class:`~dsec.ports.runtime.Runtime`."""
        await self._spawner.ready()
        for name in (plan.image, *plan.layers):
            if name not in self._resolved:
                await self._resolve(name)
        if plan.volumes:
            for fd in await asyncio.to_thread(self._open_volumes, plan.volumes):
                os.close(fd)
        if plan.files_of is not None:
            self._layers.rehearse(plan.files_of)

    async def _writable(self, plan: Plan) -> Path:
        if plan.files_of is None:
            return await self._layers.create(plan.id, plan.limits.disk_mib)
        if plan.files_of not in self._all:  # a snapshot: nothing writes to it
            return await self._layers.clone(plan.files_of, plan.id, plan.limits.disk_mib)
        async with self.stopped(SandboxId(plan.files_of)):
            return await self._layers.clone(plan.files_of, plan.id, plan.limits.disk_mib)

    def _open_volumes(self, volumes: tuple[Volume, ...]) -> list[int]:
        found: list[int] = []
        try:
            found.extend(map(self._open_volume, volumes))
        except BaseException:
            for fd in found:
                os.close(fd)
            raise
        return found

    def _open_volume(self, volume: Volume) -> int:
        try:
            fd = os.open(volume.source, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise BadRequest(f"volume source: {str(volume.source)!r}: {error.strerror}") from error
        try:
            return self._mounts.tree(fd, 0)
        except OSError as error:
            raise BadRequest(
                f"volume source: {str(volume.source)!r} cannot be mounted: {error.strerror}"
            ) from error
        finally:
            os.close(fd)

    async def _discard(self, sandbox: SandboxId) -> None:
        await self._layers.discard(sandbox)

    async def close(self) -> None:
        """See :class:`SpawnedRuntime`; the writable layers are closed by whoever opened them."""
        await super().close()
        for fd in self._trees.values():
            os.close(fd)
        self._trees.clear()
