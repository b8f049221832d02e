"""Who uses which volume: any number of sandboxes that read, and one that may write.

Claims are kept in memory, and follow from the sandboxes that live or are hibernated, which go on as they were when they wake: an engine that
starts takes those of every recorded one before it does anything else. They are taken and given back between two awaits, so that of any number of creates that want to write exactly one may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsec.core.machine import LIVE
from dsec.errors import Conflict
from dsec.model.ids import SandboxId, VolumeId
from dsec.model.paging import MOST_IN_PAGE
from dsec.model.sandbox import SandboxSpec, State
from dsec.ports.journal import Sandboxes, VolumeRecords

Key = tuple[str, str]
"""Project and name."""


@dataclass(slots=True, eq=False)
class Users:
    """Of one volume. A writer that an earlier engine left is never refused, so there may be several."""

    writers: set[SandboxId] = field(default_factory=set)
    readers: set[SandboxId] = field(default_factory=set)


class Claims:
    """See the module.

    Args:
        records: what the names mean.
    """

    def __init__(self, records: VolumeRecords) -> None:
        self._records = records
        self._users: dict[Key, Users] = {}
        self._claimed: dict[SandboxId, set[Key]] = {}
        self._going: set[Key] = set()

    def users(self, key: Key) -> Users:
        """Who uses it now."""
        return self._users.get(key) or Users()

    async def take(self, sandbox: SandboxId, spec: SandboxSpec) -> Mapping[str, VolumeId]:
        """Claim the named volumes of a sandbox that is to be made, and tell which each name means. What fails claims nothing.

        Raises:
            NotFound: the project has no such volume. Conflict: another sandbox may write to one that this one is to write to.
        """
        if not any(volume.name for volume in spec.volumes):
            return {}
        self._check(sandbox, spec)
        self.hold(sandbox, spec)
        try:
            return await self.meanings(spec)
        except BaseException:
            self.give_back(sandbox)
            raise

    async def meanings(self, spec: SandboxSpec) -> Mapping[str, VolumeId]:
        """Which volume each name means.  Raises: NotFound."""
        names = {volume.name for volume in spec.volumes if volume.name}
        return {name: (await self._records.find(spec.project, name)).id for name in sorted(names)}

    def _check(self, sandbox: SandboxId, spec: SandboxSpec) -> None:
        for volume in spec.volumes:
            key = (spec.project, volume.name)
            if key in self._going:
                raise Conflict(f"volume {volume.name!r} is being removed", volume=volume.name)
            others = self.users(key).writers - {sandbox}
            if volume.name and not volume.read_only and others:
                holder = min(others)
                raise Conflict(
                    f"volume {volume.name!r}: {holder} may write to it, and only one sandbox at a time may",
                    hint="show it read-only (NAME:TARGET:ro), or wait until that sandbox has ended: it keeps its place also while it is hibernated",
                    volume=volume.name,
                    project=spec.project,
                    holder=holder,
                )

    def hold(self, sandbox: SandboxId, spec: SandboxSpec) -> None:
        """Claim what a sandbox has already, whoever else does. Twice is once."""
        for volume in spec.volumes:
            if volume.name:
                key = (spec.project, volume.name)
                users = self._users.setdefault(key, Users())
                (users.readers if volume.read_only else users.writers).add(sandbox)
                self._claimed.setdefault(sandbox, set()).add(key)

    async def load(self, sandboxes: Sandboxes) -> None:
        """What those have that are recorded; only projects that have volumes are looked through for hibernated ones."""
        for living in await sandboxes.list(LIVE):
            self.hold(living.id, living.spec)
        for project in sorted({info.project for info in await self._records.all()}):
            after, more = "", True
            while more:
                page = await sandboxes.page(
                    states=(State.HIBERNATED,), project=project, after=after, limit=MOST_IN_PAGE
                )
                for info in page.items:
                    self.hold(info.id, info.spec)
                after, more = page.next, bool(page.next)

    def give_back(self, sandbox: SandboxId) -> None:
        """Nothing of it is left. Twice is no error."""
        for key in self._claimed.pop(sandbox, ()):
            users = self._users[key]
            users.writers.discard(sandbox)
            users.readers.discard(sandbox)
            if not users.writers and not users.readers:
                del self._users[key]

    def begin_removal(self, project: str, name: str) -> None:
        """From now on nobody can claim it.  Raises: Conflict: somebody uses it, or it is being removed already."""
        key = (project, name)
        users = self.users(key)
        sandboxes = sorted(users.writers | users.readers)
        if sandboxes:
            more = f" and {len(sandboxes) - 1} more" if sandboxes[1:] else ""
            raise Conflict(
                f"volume {name!r} is used by {sandboxes[0]}{more}",
                hint="destroy what uses it first",
                volume=name,
                project=project,
                sandboxes=sandboxes[:100],
            )
        if key in self._going:
            raise Conflict(f"volume {name!r} is being removed", volume=name, project=project)
        self._going.add(key)

    def end_removal(self, project: str, name: str) -> None:
        """It is gone, or stays."""
        self._going.discard((project, name))
