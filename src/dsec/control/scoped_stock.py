"""What projects have beside sandboxes, as a principal sees it: volumes, templates, images, ready sandboxes, keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from typing import Any, Final, TypeVar

from dsec.control.reach import Reach, told_as
from dsec.errors import Denied, NotFound
from dsec.model.built import Built, Tagged
from dsec.model.ids import KeyId, SandboxId, SnapshotId, new_snapshot_id
from dsec.model.images import Freed, ImageInfo
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import SandboxSpec
from dsec.model.snapshots import SnapshotInfo
from dsec.model.tenants import Coinage, KeyInfo, NewKey, ProjectInfo, Quota, Scope
from dsec.model.volumes import DEFAULT_PROJECT, VolumeInfo
from dsec.ports.engine import (
    ImageService,
    PoolService,
    SharingService,
    TemplateService,
    VolumeService,
)
from dsec.ports.tenants import TenantService

T = TypeVar("T")
Volumes = tuple[VolumeInfo, ...]  # before the classes, in which `list` is a method
Tags = tuple[Tagged, ...]
Images = tuple[ImageInfo, ...]
_SHARED: Final = "templates: those of project 'default' are everybody's, and changed by admins only"


class ScopedVolumes(VolumeService):
    """A client that names no project says ``default``: that is the principal's own, too."""

    def __init__(self, inner: VolumeService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    async def create(self, project: str, name: str, size_mib: int) -> VolumeInfo:
        reach = self._reach
        reach.need(Scope.DEVELOPER)
        with reach.acting():
            mine = project if reach.all else reach.project
            return await self._inner.create(mine, name, size_mib)

    async def get(self, project: str, name: str) -> VolumeInfo:
        return await self._call(project, lambda mine: self._inner.get(mine, name))

    async def list(self, project: str) -> Volumes:
        return await self._call(project, self._inner.list)

    async def remove(self, project: str, name: str) -> None:
        await self._call(project, lambda mine: self._inner.remove(mine, name))

    async def _call(self, project: str, act: Callable[[str], Awaitable[T]]) -> T:
        mine = self._reach.named(project, DEFAULT_PROJECT)
        with self._reach.acting():
            if mine in (project, self._reach.project):
                return await act(mine)
            with told_as(project, mine):
                return await act(mine)


class ScopedTemplates(TemplateService):
    """Args: inner: the templates that the principal's project sees. changes: whether it may change them."""

    def __init__(self, inner: TemplateService, reach: Reach, *, changes: bool) -> None:
        self._inner = inner
        self._reach = reach
        self._changes = changes

    def _check(self) -> None:
        """Raises: Denied."""
        self._reach.need(Scope.DEVELOPER)
        if not self._changes:
            raise Denied(_SHARED, hint="a key of another project has templates of its own")

    async def build(self, text: bytes, *, source: str, tag: str, strict: bool, update: bool) -> Built:
        self._check()
        with self._reach.acting():
            return await self._inner.build(text, source=source, tag=tag, strict=strict, update=update)

    async def promote(self, snapshot: SnapshotId, *, name: str, tag: str) -> Built:
        self._check()
        with self._reach.acting():
            return await self._inner.promote(snapshot, name=name, tag=tag)

    async def find(self, reference: str) -> Built:
        self._reach.need(Scope.DEVELOPER)
        return await self._inner.find(reference)

    async def list(self) -> Tags:
        self._reach.need(Scope.DEVELOPER)
        return await self._inner.list()

    async def history(self, name: str) -> Tags:
        self._reach.need(Scope.DEVELOPER)
        return await self._inner.history(name)

    async def tag(self, reference: str, tag: str) -> Built:
        self._check()
        with self._reach.acting():
            return await self._inner.tag(reference, tag)

    async def rollback(self, reference: str) -> Built:
        self._check()
        with self._reach.acting():
            return await self._inner.rollback(reference)

    async def remove(self, reference: str) -> None:
        self._check()
        with self._reach.acting():
            await self._inner.remove(reference)


class ScopedSharing(SharingService):
    """Args: inner: over what the principal's project sees. changes: whether it may change the templates that it sees."""

    def __init__(self, inner: SharingService, reach: Reach, *, changes: bool) -> None:
        self._inner = inner
        self._reach = reach
        self._changes = changes

    def export_template(self, reference: str) -> AsyncIterator[bytes]:
        self._reach.need(Scope.DEVELOPER)
        return self._reach.steps(self._inner.export_template(reference))

    async def import_template(self, file: AsyncIterator[bytes], *, tag: str) -> Built:
        self._reach.need(Scope.DEVELOPER)
        if not self._changes:
            raise Denied(_SHARED, hint="a key of another project has templates of its own")
        with self._reach.acting():
            return await self._inner.import_template(file, tag=tag)

    def export_snapshot(self, snapshot: SnapshotId) -> AsyncIterator[bytes]:
        return self._export(snapshot)

    async def _export(self, snapshot: SnapshotId) -> AsyncIterator[bytes]:
        mine = await self._reach.has_snapshot(snapshot)
        found = snapshot if mine else new_snapshot_id()
        with nullcontext() if mine else told_as(snapshot, found):
            async with aclosing(self._reach.steps(self._inner.export_snapshot(found))) as pieces:
                async for piece in pieces:
                    yield piece

    async def import_snapshot(self, file: AsyncIterator[bytes]) -> SnapshotInfo:
        self._reach.need(Scope.DEVELOPER)
        with self._reach.acting():
            return await self._inner.import_snapshot(file)


class ScopedImages(ImageService):
    """Admins change images; others see those that have names, and not who needs them."""

    def __init__(self, inner: ImageService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    async def list(self) -> Images:
        self._reach.need(Scope.DEVELOPER)
        found = await self._inner.list()
        return found if self._reach.all else tuple([_shown(each) for each in found if each.names])

    async def get(self, name: str) -> ImageInfo:
        if self._reach.all:
            return await self._admin(self._inner.get, name)
        for image in await self.list():
            if name in image.names:
                return image
        raise NotFound(f"no image {name!r:.200} is stored", hint="an admin gets it", name=name)

    async def refresh(self, name: str) -> ImageInfo:
        return await self._admin(self._inner.refresh, name)

    async def verify(self, name: str) -> ImageInfo:
        return await self._admin(self._inner.verify, name)

    async def remove(self, name: str) -> ImageInfo:
        return await self._admin(self._inner.remove, name)

    async def collect(self, budget: int | None) -> Freed:
        return await self._admin(self._inner.collect, budget)

    async def _admin(self, act: Callable[[Any], Awaitable[T]], about: object) -> T:
        self._reach.need(Scope.ADMIN)
        with self._reach.acting():
            return await act(about)


def _shown(image: ImageInfo) -> ImageInfo:
    return ImageInfo(
        digest=image.digest,
        names=image.names,
        sources=image.sources,
        size=image.size,
        mutable=image.mutable,
        created_at=image.created_at,
        used_at=image.used_at,
    )


class ScopedPool(PoolService):
    """Ready sandboxes are everybody's: admins see and make them."""

    def __init__(self, inner: PoolService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    async def info(self) -> PoolInfo:
        self._reach.need(Scope.ADMIN)
        return await self._inner.info()

    async def warm(self, spec: SandboxSpec, count: int) -> int:
        self._reach.need(Scope.ADMIN)
        with self._reach.acting():
            return await self._inner.warm(spec, count)


class ScopedTenants(TenantService):
    """Admins have keys and quotas; a developer sees its own project, and makes tokens for its sandboxes."""

    def __init__(self, inner: TenantService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    async def create_key(
        self,
        scope: Scope,
        *,
        project: str,
        label: str = "",
        ttl: float = 0.0,
        coinage: Coinage = Coinage.DSEC,
    ) -> NewKey:
        self._reach.need(Scope.ADMIN)
        with self._reach.acting():
            return await self._inner.create_key(scope, project=project, label=label, ttl=ttl, coinage=coinage)

    async def keys(self, project: str = "", *, after: str = "", limit: int = 1000) -> tuple[KeyInfo, ...]:
        self._reach.need(Scope.ADMIN)
        return await self._inner.keys(project, after=after, limit=limit)

    async def revoke_key(self, key: KeyId) -> KeyInfo:
        self._reach.need(Scope.ADMIN)
        with self._reach.acting():
            return await self._inner.revoke_key(key)

    async def token(self, sandbox: SandboxId, *, ttl: float = 0.0) -> NewKey:
        return await self._reach.manage(sandbox, lambda found: self._inner.token(found, ttl=ttl))

    async def projects(self) -> tuple[ProjectInfo, ...]:
        self._reach.need(Scope.DEVELOPER)
        if self._reach.all:
            return await self._inner.projects()
        return (await self._inner.project(self._reach.project),)

    async def project(self, name: str) -> ProjectInfo:
        self._reach.need(Scope.DEVELOPER)
        mine = self._reach.named(name)
        if self._reach.all or mine == name:
            return await self._inner.project(name)
        with told_as(name, mine):
            return await self._inner.project(mine)

    async def set_quota(self, name: str, quota: Quota) -> ProjectInfo:
        self._reach.need(Scope.ADMIN)
        with self._reach.acting():
            return await self._inner.set_quota(name, quota)
