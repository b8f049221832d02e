"""Volumes: made, looked at and removed, each act recorded in the transaction that changes what there is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

from dsec.errors import CleanupFailed, Conflict, DsecError, NotFound, Unsupported
from dsec.model.ids import VolumeId, new_volume_id
from dsec.model.journal import Draft, Json, Phase
from dsec.model.volumes import VolumeInfo, check_project, check_size_mib, check_volume_name
from dsec.node import drafts
from dsec.node.claims import Claims
from dsec.node.kit import Kit
from dsec.node.work import ignore, settled
from dsec.ports.engine import VolumeService
from dsec.ports.journal import VolumeRecords
from dsec.ports.storage import Volumes

CREATE: Final = "volume.create"
REMOVE: Final = "volume.remove"
ENGINE: Final = "engine"
Infos = tuple[VolumeInfo, ...]  # before the class, in which `list` is a method


class VolumeKeeping(VolumeService):
    """See the module. Files without a row are nobody's: they were half made or half removed, and go.

    Args:
        store: where the files are; None: no level here has volumes.
    """

    def __init__(self, store: Volumes | None, records: VolumeRecords, claims: Claims, kit: Kit) -> None:
        self._store = store
        self._records = records
        self._claims = claims
        self._kit = kit
        self._making: set[VolumeId] = set()

    # Looking

    async def get(self, project: str, name: str) -> VolumeInfo:
        _check(project, name)
        return await self._told(await self._records.find(project, name))

    async def list(self, project: str) -> Infos:
        check_project("project", project)
        return tuple([await self._told(info) for info in await self._records.all(project)])

    async def _told(self, info: VolumeInfo) -> VolumeInfo:
        """With what it holds and who uses it now."""
        users = self._claims.users((info.project, info.name))
        used = -1
        if self._store is not None:
            with suppress(NotFound, OSError):  # removed meanwhile
                used = await self._store.used(info.id)
        return replace(
            info,
            used_bytes=used,
            writer=min(users.writers, default=None),
            readers=tuple(sorted(users.readers)),
        )

    # Making

    async def create(self, project: str, name: str, size_mib: int) -> VolumeInfo:
        _check(project, name)
        check_size_mib("size_mib", size_mib)
        store = self._stored()
        with suppress(NotFound):
            found = await self._records.find(project, name)
            raise Conflict(
                f"volume {name!r} exists already in project {project!r}",
                hint="use it, or choose another name",
                volume=name,
                size_mib=found.size_mib,
            )
        return await settled(self._kit.work.start(self._create(store, project, name, size_mib)), ignore)

    async def _create(self, store: Volumes, project: str, name: str, size_mib: int) -> VolumeInfo:
        info = VolumeInfo(
            id=new_volume_id(),
            project=project,
            name=name,
            size_mib=size_mib,
            created_at=self._kit.clock.now().wall,
        )
        facts: dict[str, Json] = {"project": project, "name": name, "size_mib": size_mib}
        await self._say(CREATE, Phase.INTENT, info.id, facts)
        self._making.add(info.id)
        try:
            await store.make(info.id, size_mib)
            await self._records.keep(info, _draft(CREATE, Phase.RESULT, info.id, {"outcome": "ok"}))
        except BaseException as error:
            with suppress(DsecError, OSError):  # the next engine finds it
                await store.drop(info.id)
            if isinstance(error, DsecError):
                with suppress(DsecError):  # whoever asked hears of what failed first
                    await self._say(CREATE, Phase.RESULT, info.id, drafts.failure(error))
            raise
        finally:
            self._making.discard(info.id)
        return replace(info, used_bytes=0)

    # Removing

    async def remove(self, project: str, name: str) -> None:
        _check(project, name)
        await settled(self._kit.work.start(self._remove(project, name)), ignore)

    async def _remove(self, project: str, name: str) -> None:
        self._claims.begin_removal(project, name)
        try:
            info = await self._records.find(project, name)
            facts: dict[str, Json] = {"project": project, "name": name, "outcome": "ok"}
            await self._records.forget(project, name, _draft(REMOVE, Phase.NOTE, info.id, facts))
        except NotFound:
            await self._sweep()  # its files, if an earlier removal left them
            return
        finally:
            self._claims.end_removal(project, name)
        if self._store is not None:
            await self._store.drop(info.id)

    async def _sweep(self) -> None:
        """Remove what has no row.  Raises: CleanupFailed."""
        if self._store is None:
            return
        there = set(await self._store.list()) - self._making
        kept = {info.id for info in await self._records.all()}
        for volume in there - kept - self._making:
            await self._store.drop(volume)

    # After a start

    async def compare(self) -> None:
        """What was made and never recorded, or recorded as removed, goes; a row without its files is told and goes."""
        for intent in await self._kit.journal.unanswered(ENGINE):
            if intent.act == CREATE:
                facts: dict[str, Json] = {"outcome": "failed", "message": "the engine ended meanwhile"}
                await self._say(CREATE, Phase.RESULT, VolumeId(intent.ref), facts)
        if self._store is None:
            return
        with suppress(CleanupFailed):  # the next engine finds it again
            await self._sweep()
        there = set(await self._store.list())
        for info in await self._records.all():
            if info.id not in there:
                facts = {"outcome": "lost", "message": "its files are not there any more"}
                await self._records.forget(
                    info.project, info.name, _draft(REMOVE, Phase.NOTE, info.id, facts)
                )

    # What all need

    def _stored(self) -> Volumes:
        """Raises: Unsupported."""
        if self._store is None:
            raise Unsupported(
                "volumes: no level here can keep any",
                hint="they need the level 'container', which needs root; `dsec doctor` tells what is missing",
            )
        return self._store

    async def _say(self, act: str, phase: Phase, ref: VolumeId, facts: dict[str, Json]) -> None:
        await self._kit.journal.append(_draft(act, phase, ref, facts))


def _draft(act: str, phase: Phase, ref: VolumeId, facts: dict[str, Json]) -> Draft:
    return Draft(chain=ENGINE, act=act, phase=phase, ref=ref, payload=facts)


def _check(project: str, name: str) -> None:
    """Raises: BadRequest."""
    check_project("project", project)
    check_volume_name("name", name)
