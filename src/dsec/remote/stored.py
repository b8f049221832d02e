"""What engines keep beside sandboxes, behind HTTP: volumes, templates, images, ready sandboxes, and all of these as files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from dsec.model.built import Built, Tagged
from dsec.model.ids import SnapshotId
from dsec.model.images import Freed, ImageInfo
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import SandboxSpec
from dsec.model.snapshots import SnapshotInfo
from dsec.model.volumes import VolumeInfo
from dsec.ports.engine import ImageService, PoolService, SharingService, TemplateService, VolumeService
from dsec.remote.connection import Call, Connection, fresh_key, segment
from dsec.remote.sandboxes import SNAPSHOTS
from dsec.remote.uploads import Upload
from dsec.remote.values import done, every, value
from dsec.wire.values import encode

VOLUMES: Final = "/v1/volumes"
TEMPLATES: Final = "/v1/templates"
IMAGES: Final = "/v1/images"
POOL: Final = "/v1/pool"
RAW: Final = "application/octet-stream"
YAML: Final = "application/yaml"


def _post(path: str, body: dict[str, Any]) -> Call:
    """An act that the server knows again."""
    return Call(method="POST", path=path, body=encode(body), key=fresh_key(), patience=None)


class RemoteVolumes(VolumeService):
    """See :class:`VolumeService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(self, project: str, name: str, size_mib: int) -> VolumeInfo:
        body = {"name": name, "size_mib": size_mib, "project": project}
        return await value(self._connection, VolumeInfo, _post(VOLUMES, body))

    async def get(self, project: str, name: str) -> VolumeInfo:
        path, query = f"{VOLUMES}/{segment(name)}", {"project": project}
        return await value(
            self._connection, VolumeInfo, Call(method="GET", path=path, query=query, again=True)
        )

    async def list(self, project: str) -> tuple[VolumeInfo, ...]:
        call = Call(method="GET", path=VOLUMES, query={"project": project}, again=True)
        return await every(self._connection, VolumeInfo, call)

    async def remove(self, project: str, name: str) -> None:
        path, query = f"{VOLUMES}/{segment(name)}", {"project": project}
        await done(self._connection, Call(method="DELETE", path=path, query=query, again=True, patience=None))


class RemoteTemplates(TemplateService):
    """See :class:`TemplateService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def build(self, text: bytes, *, source: str, tag: str, strict: bool, update: bool) -> Built:
        query = {"tag": tag, "strict": strict, "update": update, "source": source}
        call = Call(
            method="POST", path=TEMPLATES, query=query, body=text, kind=YAML, key=fresh_key(), patience=None
        )
        return await value(self._connection, Built, call)

    async def promote(self, snapshot: SnapshotId, *, name: str, tag: str) -> Built:
        body = {"snapshot": snapshot, "name": name, "tag": tag}
        return await value(self._connection, Built, _post(f"{TEMPLATES}/promote", body))

    async def find(self, reference: str) -> Built:
        path = f"{TEMPLATES}/{segment(reference)}"
        return await value(self._connection, Built, Call(method="GET", path=path, again=True))

    async def list(self) -> tuple[Tagged, ...]:
        return await every(self._connection, Tagged, Call(method="GET", path=TEMPLATES, again=True))

    async def history(self, name: str) -> tuple[Tagged, ...]:
        path = f"{TEMPLATES}/{segment(name)}/history"
        return await every(self._connection, Tagged, Call(method="GET", path=path, again=True))

    async def tag(self, reference: str, tag: str) -> Built:
        return await value(
            self._connection, Built, _post(f"{TEMPLATES}/tag", {"reference": reference, "tag": tag})
        )

    async def rollback(self, reference: str) -> Built:
        return await value(self._connection, Built, _post(f"{TEMPLATES}/rollback", {"reference": reference}))

    async def remove(self, reference: str) -> None:
        path = f"{TEMPLATES}/{segment(reference)}"
        await done(self._connection, Call(method="DELETE", path=path, again=True, patience=None))


class RemoteImages(ImageService):
    """See :class:`ImageService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self) -> tuple[ImageInfo, ...]:
        return await every(self._connection, ImageInfo, Call(method="GET", path=IMAGES, again=True))

    async def get(self, name: str) -> ImageInfo:
        return await self._act("get", {"name": name})

    async def refresh(self, name: str) -> ImageInfo:
        return await self._act("refresh", {"name": name})

    async def verify(self, name: str) -> ImageInfo:
        return await self._act("verify", {"name": name})

    async def remove(self, name: str) -> ImageInfo:
        path = f"{IMAGES}/{segment(name)}"
        return await value(self._connection, ImageInfo, Call(method="DELETE", path=path, patience=None))

    async def collect(self, budget: int | None) -> Freed:
        return await value(self._connection, Freed, _again(f"{IMAGES}/collect", {"budget": budget}))

    async def _act(self, act: str, body: dict[str, Any]) -> ImageInfo:
        return await value(self._connection, ImageInfo, _again(f"{IMAGES}/{act}", body))


def _again(path: str, body: dict[str, Any]) -> Call:
    """An act that gives the same when it is done twice."""
    return Call(method="POST", path=path, body=encode(body), again=True, patience=None)


class RemotePool(PoolService):
    """See :class:`PoolService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def info(self) -> PoolInfo:
        return await value(self._connection, PoolInfo, Call(method="GET", path=POOL, again=True))

    async def warm(self, spec: SandboxSpec, count: int) -> int:
        call = _again(f"{POOL}/warm", {"spec": spec, "count": count})
        return (await value(self._connection, dict[str, int], call)).get("ready", 0)


class RemoteSharing(SharingService):
    """See :class:`SharingService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def export_template(self, reference: str) -> AsyncIterator[bytes]:
        query = {"reference": reference}
        call = Call(method="GET", path=f"{TEMPLATES}/export", query=query, accept=RAW, patience=None)
        return self._connection.pieces(call)

    async def import_template(self, file: AsyncIterator[bytes], *, tag: str) -> Built:
        upload = Upload(file)
        call = Call(
            method="POST",
            path=f"{TEMPLATES}/import",
            query={"tag": tag},
            body=upload.pieces(),
            kind=RAW,
            key=fresh_key(),
            patience=None,
        )
        return await upload.told(value(self._connection, Built, call))

    def export_snapshot(self, snapshot: SnapshotId) -> AsyncIterator[bytes]:
        path = f"{SNAPSHOTS}/{segment(snapshot)}/export"
        return self._connection.pieces(Call(method="GET", path=path, accept=RAW, patience=None))

    async def import_snapshot(self, file: AsyncIterator[bytes]) -> SnapshotInfo:
        upload = Upload(file)
        call = Call(
            method="POST",
            path=f"{SNAPSHOTS}/import",
            body=upload.pieces(),
            kind=RAW,
            key=fresh_key(),
            patience=None,
        )
        return await upload.told(value(self._connection, SnapshotInfo, call))
