"""Level ``container``: namespaces, an overlay of read-only images and one writable layer, cgroups, seccomp. Needs root."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from dsec.errors import (
    BadRequest,
    DsecError,
    IsolationUnavailable,
    NotFound,
    RuntimeUnavailable,
    StoreDamaged,
)
from dsec.handover import handed
from dsec.model.ids import SandboxId
from dsec.model.sandbox import HOST_BASE, MIB, Flag, Level, SandboxSpec, Volume
from dsec.ports.runtime import OnEnded, Plan
from dsec.ports.storage import SHOWABLE, Image, Images, Layers, Volumes
from dsec.runtimes.cgroups import Hierarchy, flags
from dsec.runtimes.dialing import Dialer
from dsec.runtimes.host_paths import HostPaths
from dsec.runtimes.mounted import MountedImages
from dsec.runtimes.spawned import SpawnedRuntime, base_flags
from dsec.runtimes.spawner import Spawner, SpawnerConfig
from dsec.wire.spawn import CreateRequest

_T = TypeVar("_T")

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

_MOUNTS: Final = 32  # that the spawner takes
_NAMES: Final = 1024  # of images, whose meaning is remembered


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
        volumes: Volumes,
        host: HostPaths,
    ) -> None:
        if os.geteuid() != 0:
            raise IsolationUnavailable(
                "level 'container' needs root", hint="run as root, or use level='process', which does not"
            )
        super().__init__(config, hierarchies, on_ended, layers.used)
        able = _FLAGS | flags(hierarchies)
        able |= {Flag.HIBERNATE}
        self.flags = base_flags(able | {Flag.SCRATCH, Flag.SNAPSHOTS} if Flag.PAUSE in able else able)
        self._images = images
        self._layers = layers
        self._mounts = mounts
        self._volumes = volumes
        self._host = host
        self._resolved: dict[str, Image] = {}
        self._dialer = Dialer(self._figures.member, self._runs)
        self._mounted = MountedImages(
            mount=mounts.image,
            clone=lambda fd: mounts.tree(fd, 0),
            attach=self._spawner.add_tree,
            detach=self._spawner.remove_tree,
        )

    async def _attach_trees(self, spawner: Spawner) -> None:
        rw = self._mounts.tree(self._layers.root_fd(), 0)
        try:
            await spawner.tree("rw", rw)
        finally:
            os.close(rw)
        await spawner.forget_trees()  # of an engine before this one, which nobody counts any more
        await self._mounted.attach_all(spawner.tree)

    async def pin(self, spec: SandboxSpec) -> SandboxSpec:
        """See :class:`~dsec.ports.runtime.Runtime`."""
        if spec.base_digest:
            return _called(spec, await self._resolve(spec.base_digest))
        image = await self._resolve(spec.base)
        there = self._mounted.has(image) or await asyncio.to_thread(image.path.exists)
        if not there:  # it left the store, and is built again
            self._resolved.pop(spec.base, None)
            image = await self._resolve(spec.base)
        return replace(_called(spec, image), base_digest=image.digest)

    async def _resolve(self, name: str) -> Image:
        """The image of a name, looked up once: what it means stays the same while this engine is open (and not forgotten among many)."""
        image = self._resolved.get(name)
        if image is None:
            image = await self._images.get(name)
            if len(self._resolved) >= _NAMES:
                del self._resolved[next(iter(self._resolved))]
            self._resolved[name] = image
        return image

    async def _images_of(self, plan: Plan, use: Callable[[list[Image]], Awaitable[_T]]) -> _T:
        """``use`` the images of a plan, the base first; once more with what their names mean now if one has left the store."""
        names = (plan.image, *plan.layers)
        try:
            return await use([await self._resolve(name) for name in names])
        except FileNotFoundError:
            for name in names:
                self._resolved.pop(name, None)
            return await use([await self._resolve(name) for name in names])

    async def _request(self, plan: Plan) -> tuple[CreateRequest, list[int]]:
        await self._spawner.ready()
        base, *over = await self._images_of(plan, partial(self._mounted.take, plan.id))
        shows = (await self._resolve(plan.image)).shows
        volumes: list[int] = []
        if plan.volumes or shows:
            volumes = await handed(partial(self._open_volumes, plan, shows), _close_all)
        try:
            writable = await self._writable(plan)
        except BaseException:
            _close_all(volumes)
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
            layers=(*over, base),
            volumes=(
                *((path, True) for path in shows),
                *((volume.target, volume.read_only) for volume in plan.volumes),
            ),
        )
        return request, volumes

    async def rehearse(self, plan: Plan) -> None:
        """See :class:`~dsec.ports.runtime.Runtime`."""
        await self._spawner.ready()
        await self._images_of(plan, self._mounted.ready)
        if plan.volumes:
            for fd in await asyncio.to_thread(self._open_volumes, plan):
                os.close(fd)
        if plan.files_of is not None:
            self._layers.rehearse(plan.files_of)

    async def _writable(self, plan: Plan) -> Path:
        if plan.parked:
            return self._layers.find(plan.id)
        if plan.files_of is None:
            return await self._layers.create(plan.id, plan.limits.disk_mib)
        if plan.files_of not in self._all:  # a snapshot: nothing writes to it
            return await self._layers.clone(plan.files_of, plan.id, plan.limits.disk_mib)
        async with self.stopped(SandboxId(plan.files_of)):
            return await self._layers.clone(plan.files_of, plan.id, plan.limits.disk_mib)

    def _open_volumes(self, plan: Plan, shows: tuple[str, ...] = ()) -> list[int]:
        """Detached mounts of what the base shows of this machine, then of what volumes do, in their order."""
        if shows and len(shows) + len(plan.volumes) > _MOUNTS:
            raise BadRequest(
                f"volumes: {len(plan.volumes)} are too many beside what the base shows of this machine",
                hint=f"at most {_MOUNTS - len(shows)}",
            )
        found: list[int] = []
        try:
            for path in shows:
                found.append(self._open_shown(path))  # noqa: PERF401 - those before one that fails are closed
            for volume in plan.volumes:
                found.append(self._open_volume(plan, volume))  # noqa: PERF401 - those before one that fails are closed
        except BaseException:
            _close_all(found)
            raise
        return found

    def _open_shown(self, path: str) -> int:
        if path not in SHOWABLE:
            raise StoreDamaged(
                f"an image would show {path!r} of this machine", hint="`dsec image refresh host`", path=path
            )
        try:
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return self._mounts.tree(fd, 0)
            finally:
                os.close(fd)
        except OSError as error:
            raise RuntimeUnavailable(
                f"base 'host': {path} of this machine cannot be shown: {error.strerror}",
                hint="use another base, such as system",
                path=path,
            ) from error

    def _open_volume(self, plan: Plan, volume: Volume) -> int:
        if isinstance(volume.source, str):
            return self._volumes.open(plan.stored[volume.source])
        fd = self._host.open(volume.source, lent=volume.target in plan.lent)
        try:
            return self._mounts.tree(fd, 0)
        except OSError as error:
            raise BadRequest(
                f"volume source: {str(volume.source)!r} cannot be mounted: {error.strerror}"
            ) from error
        finally:
            os.close(fd)

    async def dial(self, sandbox: SandboxId, port: int, timeout: float) -> socket.socket:
        """See :class:`~dsec.ports.runtime.Runtime`."""
        known = self._at(sandbox)
        return await self._dialer.dial(sandbox, known.pid, known.slot, port, timeout)

    async def _runs(self, sandbox: SandboxId) -> tuple[int, int] | None:
        listed = (one for one in await self._spawner.list() if one.id == sandbox)
        return next(((one.created.pid, one.created.slot) for one in listed), None)

    def keeps(self, sandbox: SandboxId) -> bool:
        """See :class:`~dsec.ports.runtime.Runtime`."""
        try:
            self._layers.find(sandbox)
        except NotFound:
            return False
        return True

    async def _set_down(self, sandbox: SandboxId) -> None:
        self._dialer.forget(sandbox)
        with contextlib.suppress(DsecError):  # then the next one does it
            await self._mounted.release(sandbox)

    async def _discard(self, sandbox: SandboxId) -> None:
        try:
            await self._layers.discard(sandbox)
        finally:
            await self._set_down(sandbox)

    async def close(self) -> None:
        """See :class:`SpawnedRuntime`; the writable layers are closed by whoever opened them."""
        self._dialer.close()
        await super().close()
        await self._mounted.close()


def _close_all(descriptors: list[int]) -> None:
    for one in descriptors:
        os.close(one)


def _called(spec: SandboxSpec, image: Image) -> SandboxSpec:
    """What shows this machine is base ``host``, whatever a template or a file says: what is recorded decides what may be kept of a sandbox."""
    return replace(spec, base=HOST_BASE) if image.mutable else spec
