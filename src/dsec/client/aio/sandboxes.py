"""The sandboxes of an engine: making, finding and listing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsec.client.aio.sandbox import AsyncSandbox
from dsec.client.aio_link import AsyncLink
from dsec.client.requests import BASE, NEVER_HAD, VolumeList, not_cold, spec_of, states_of
from dsec.model.built import Built
from dsec.model.checks import check_flag, check_text
from dsec.model.ids import SandboxId, parse_sandbox_id
from dsec.model.sandbox import Hibernate, Level, Limits, SandboxInfo, SandboxSpec, State
from dsec.model.snapshots import SnapshotInfo
from dsec.model.volumes import DEFAULT_PROJECT


class AsyncSandboxes:
    """The sandboxes of an engine."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def create(
        self,
        template: str | SnapshotInfo = BASE,
        *,
        level: Level | str | None = None,
        ttl: float = 0.0,
        idle: float = 0.0,
        limits: Limits | None = None,
        read_only: bool = False,
        env: Mapping[str, str] | None = None,
        volumes: VolumeList = (),
        labels: Mapping[str, str] | None = None,
        project: str = DEFAULT_PROJECT,
        hibernate: Hibernate | str | None = None,
        cold: bool = False,
    ) -> AsyncSandbox:
        """Make a sandbox, completely or not at all. As a context manager it is destroyed at the end.

        Args:
            template: what its files begin as: "base", which always exists, a built template (``name``, ``name:tag`` or
                ``name@sha256:…``), or a snapshot. What is given beside it goes before what it says; variables are added, and volumes, of which one that is
                given goes before one of the template with the same target.
            level: how strongly it is isolated, None = "container" or as the template says; one that cannot be had is refused, never lowered.
            ttl: seconds until it is destroyed, 0 = never. idle: seconds without any act until then, 0 = never.
            limits: hard ceilings, None = the template's, or the defaults.
            read_only: only the working directory, home and /tmp can be written.
            env: variables of every command. labels: yours, for finding it; names beginning with "dsec." are taken.
            volumes: :class:`~dsec.model.sandbox.Volume` values or ``SOURCE:TARGET[:ro]``, where a source that begins with / or . is a path of
                this machine, and another the name of a volume of ``project``. Of all sandboxes one at a time may have a named one writable.
            hibernate: whether it may be reduced to its files when nobody uses it ("auto", "files", "never"), None = as the template says, or "auto".
            cold: only record it; its first act makes it. Not of a snapshot.

        Raises:
            BadRequest, NotFound: an argument; the template, snapshot or volume.
            Conflict: another sandbox may write to a volume that this one is to write to; ``facts["holder"]`` is its id.
            Denied: a path of this machine that may not be shown.
            IsolationUnavailable: this machine or user cannot have that level.
            Busy: a bound is reached now.
            RuntimeUnavailable, StorageFull: it could not be made; nothing is left behind.
        """
        snapshot = template if isinstance(template, SnapshotInfo) else None
        spec = spec_of(
            await self._meant(template),
            level=level,
            limits=limits,
            ttl=ttl,
            idle=idle,
            read_only=read_only,
            env=env,
            volumes=volumes,
            labels=labels,
            project=project,
            hibernate=hibernate,
        )
        check_flag("cold", cold)
        if not cold:
            return await self._made(spec, snapshot)
        if snapshot is not None:
            raise not_cold()
        return await self._recorded(spec)

    async def _made(self, spec: SandboxSpec, snapshot: SnapshotInfo | None) -> AsyncSandbox:
        sandboxes, snapshots = self._link.services.sandboxes, self._link.services.snapshots
        return await self._link.make(
            sandboxes.create(spec) if snapshot is None else snapshots.create(snapshot.id, spec),
            lambda info: AsyncSandbox(self._link, info),
            lambda info: sandboxes.destroy(info.id, reason=NEVER_HAD),
        )

    async def _recorded(self, spec: SandboxSpec) -> AsyncSandbox:
        sandboxes = self._link.services.sandboxes
        (made,) = await self._link.make(
            sandboxes.create_cold(spec, 1),
            lambda ids: ids,
            lambda ids: sandboxes.destroy(ids[0], reason=NEVER_HAD),
        )
        return await self.get(made)

    async def create_many(
        self,
        template: str = BASE,
        count: int = 1,
        *,
        level: Level | str | None = None,
        ttl: float = 0.0,
        limits: Limits | None = None,
        read_only: bool = False,
        env: Mapping[str, str] | None = None,
        volumes: VolumeList = (),
        labels: Mapping[str, str] | None = None,
        project: str = DEFAULT_PROJECT,
        hibernate: Hibernate | str | None = None,
    ) -> tuple[SandboxId, ...]:
        """Record ``count`` sandboxes and make none: the first act of each makes it. All of them, or none; their ids, for :meth:`get`.

        Args:
            template: "base", or a built template. count: how many, 1 to 1,000.
            level: how strongly they are isolated. ttl: seconds until each is destroyed, 0 = never; it begins now. limits: hard ceilings.
            read_only: only the working directory, home and /tmp can be written. env: variables of every command. volumes: shown inside.
            labels: yours. project: whose volumes the names mean. hibernate: whether they may be reduced to their files when nobody uses them.

        Raises: as :meth:`create`, as far as it can be known now.
        """
        check_text("template", template)
        spec = spec_of(
            await self._meant(template),
            level=level,
            limits=limits,
            ttl=ttl,
            idle=0.0,
            read_only=read_only,
            env=env,
            volumes=volumes,
            labels=labels,
            project=project,
            hibernate=hibernate,
        )
        return await self._link.call(self._link.services.sandboxes.create_cold(spec, count))

    async def _meant(self, template: str | SnapshotInfo) -> SandboxSpec | Built | None:
        """What a sandbox begins with; None: the base alone.  Raises: NotFound, BadRequest."""
        if isinstance(template, SnapshotInfo):
            return template.spec
        check_text("template", template)
        return (
            None if template == BASE else await self._link.call(self._link.services.templates.find(template))
        )

    async def get(self, id: str) -> AsyncSandbox:
        """The sandbox of that ``id``, ended ones included.  Raises: NotFound: there is none. BadRequest: not the form of an id."""
        sandbox = parse_sandbox_id(id)
        return AsyncSandbox(self._link, await self._link.call(self._link.services.sandboxes.get(sandbox)))

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        """Those in these ``states``, oldest first; by default all that are not gone."""
        return await self._link.call(self._link.services.sandboxes.list(states_of(states)))
