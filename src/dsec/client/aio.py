"""The asynchronous SDK. The blocking one (`dsec.client.sync`) is generated from this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from dsec.client.aio_link import AsyncLink, Connect
from dsec.client.requests import (
    BASE,
    GIB,
    NEVER_HAD,
    SIGKILL,
    Argv,
    Content,
    VolumeList,
    closed,
    collected,
    content_of,
    document_of,
    each,
    exec_request,
    fed_at_start,
    killed,
    kind_of,
    not_cold,
    pty_size,
    spec_of,
    states_of,
    streamed,
)
from dsec.client.residue import TRACES, Difference, differences, seen
from dsec.client.transfers import file_pieces, saved
from dsec.errors import BadRequest
from dsec.model.built import Built, Tagged
from dsec.model.checks import check_count, check_flag, check_text, check_user, local_path
from dsec.model.execs import Chunk, ExecInfo, ExecResult
from dsec.model.files import (
    Entry,
    FileEvent,
    MakeDir,
    Remove,
    Rename,
    Transfer,
    WriteOptions,
)
from dsec.model.ids import ExecId, SandboxId, parse_exec_id, parse_key_id, parse_sandbox_id, parse_snapshot_id
from dsec.model.images import MOST_BYTES, Freed, ImageInfo
from dsec.model.journal import Json, Record
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import (
    Flag,
    Hibernate,
    Level,
    Limits,
    Metrics,
    Problem,
    SandboxInfo,
    SandboxSpec,
    State,
)
from dsec.model.snapshots import MOST_CHILDREN, SnapshotInfo, SnapshotKind
from dsec.model.tenants import Coinage, KeyInfo, NewKey, ProjectInfo, Quota, Scope, coinage_of, scope_of
from dsec.model.volumes import DEFAULT_PROJECT, DEFAULT_SIZE_MIB, VolumeInfo
from dsec.ports.engine import ExecSession


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
        sandboxes = self._link.services.sandboxes
        check_flag("cold", cold)
        if cold:
            if snapshot is not None:
                raise not_cold()
            (made,) = await self._link.make(
                sandboxes.create_cold(spec, 1),
                lambda ids: ids,
                lambda ids: sandboxes.destroy(ids[0], reason=NEVER_HAD),
            )
            return await self.get(made)
        return await self._link.make(
            sandboxes.create(spec)
            if snapshot is None
            else self._link.services.snapshots.create(snapshot.id, spec),
            lambda info: AsyncSandbox(self._link, info),
            lambda info: sandboxes.destroy(info.id, reason=NEVER_HAD),
        )

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


class AsyncTemplates:
    """Blueprints, built once and run many times. Those of one user are shared by all his engines."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def build(
        self, document: str | Path | bytes, *, tag: str = "latest", strict: bool = False, update: bool = False
    ) -> Built:
        """Build a template, and let a tag mean it. The same document over the same base gives the same digest.

        Args:
            document: path of a YAML file, or its content as bytes.
            tag: that means it afterwards.
            strict: refuse dependencies that float, and a base that can change.
            update: lock dependencies anew, instead of as they were locked before.

        Raises:
            BadRequest: the document: every error with line and field; dependencies that contradict one another.
            Unsupported: something that cannot be built here. NotFound: the file, or the base.
            RuntimeUnavailable: an index does not answer. StorageFull, TooLarge, TimedOut, Busy.
        """
        check_text("tag", tag)
        check_flag("strict", strict)
        check_flag("update", update)
        text, source = await self._link.call(document_of(document))
        return await self._link.call(
            self._link.services.templates.build(text, source=source, tag=tag, strict=strict, update=update)
        )

    async def promote(self, snapshot: SnapshotInfo, name: str, *, tag: str = "latest") -> Built:
        """Make a template of what a ``snapshot`` holds: sandboxes of it begin with those files, and need neither the snapshot nor this engine.

        What else it says is as in the template of the snapshot's sandbox; without one, as that sandbox was.

        Args:
            snapshot: whose files it is to have. name: of the template. tag: that means it afterwards.

        Raises:
            NotFound: there is no such snapshot. BadRequest: the name, or the tag. Unsupported: a file that no template can keep.
            TooLarge, StorageFull, Busy.
        """
        check_text("name", name)
        check_text("tag", tag)
        return await self._link.call(self._link.services.templates.promote(snapshot.id, name=name, tag=tag))

    async def export(self, reference: str, path: str | Path) -> None:
        """Write a template, with all that it is made of, to one file: :meth:`import_` takes it in elsewhere. The same template gives the same bytes.

        Args:
            reference: of the template. path: of the file; it is there when it is whole, and one that was there is replaced.

        Raises:
            NotFound, BadRequest: the template, or the path. StorageFull, StoreDamaged, Denied, Busy.
        """
        check_text("reference", reference)
        await self._link.call(saved(self._link.services.sharing.export_template(reference), path))

    async def import_(self, path: str | Path, *, tag: str | None = None) -> Built:
        """Take in a template that :meth:`export` wrote, under its own name. Nothing in the file is believed: it is what its digests say, or refused.

        Args:
            path: of the file. tag: that means it afterwards; None = "latest", unless that means another template of this name.

        Raises:
            Conflict: no tag was given, and there is one. NotFound: the file. BadRequest: it is no template, was damaged, or was made to do harm.
            TooLarge, StorageFull, Unsupported, Denied, Busy.
        """
        if tag is not None:
            check_text("tag", tag)
            if not tag:
                raise BadRequest("tag: it is empty", hint="leave it out")
        return await self._link.call(
            self._link.services.sharing.import_template(file_pieces("path", path), tag=tag or "")
        )

    async def get(self, reference: str) -> Built:
        """What a ``reference`` means now: ``name``, ``name:tag`` or ``name@sha256:…``.  Raises: NotFound, BadRequest."""
        check_text("reference", reference)
        return await self._link.call(self._link.services.templates.find(reference))

    async def list(self) -> tuple[Tagged, ...]:
        """What every tag means, by name."""
        return await self._link.call(self._link.services.templates.list())

    async def history(self, name: str) -> tuple[Tagged, ...]:
        """Each time that a tag of the template ``name`` was set, oldest first.  Raises: BadRequest."""
        check_text("name", name)
        return await self._link.call(self._link.services.templates.history(name))

    async def tag(self, reference: str, tag: str) -> Built:
        """Let ``tag`` mean what ``reference`` means now.  Raises: NotFound, BadRequest."""
        check_text("reference", reference)
        check_text("tag", tag)
        return await self._link.call(self._link.services.templates.tag(reference, tag))

    async def rollback(self, reference: str) -> Built:
        """Let the tag of a ``reference`` mean what it meant before.  Raises: NotFound, BadRequest. Conflict: it never meant anything else."""
        check_text("reference", reference)
        return await self._link.call(self._link.services.templates.rollback(reference))

    async def check(self, reference: str) -> tuple[Difference, ...]:
        """Run a template twice and compare everything that each run can see at its start; nothing is returned when they begin alike.

        Between the two looks the first run leaves what a run may leave: files in every place that it may write, and a process.

        Args:
            reference: of the template; "base" will do, too.

        Raises:
            NotFound, BadRequest: the template. As :meth:`AsyncSandboxes.create`.
        """
        first = await self._begun(reference)
        return differences(first, await self._begun(reference))

    async def _begun(self, reference: str) -> Mapping[str, str]:
        """What a run sees, which leaves its traces when it has looked: not in volumes, which are no part of it."""
        services = self._link.services
        sandbox = await AsyncSandboxes(self._link).create(reference)
        try:
            env = await sandbox.exec(["env", "-0"])
            found = await self._link.call(seen(services, sandbox.id, env.stdout))
            await sandbox.exec(TRACES, user="root" if Flag.USERS in sandbox.flags else "")
        finally:
            await sandbox.destroy()
        return found

    async def remove(self, reference: str) -> None:
        """Take the tag of a ``reference`` away. With the last tag of a name goes everything that was built under it. Twice is no error.  Raises: BadRequest."""
        check_text("reference", reference)
        await self._link.call(self._link.services.templates.remove(reference))


class AsyncKeys:
    """Keys of a server; for its admins."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def create(
        self,
        scope: Scope | str = Scope.DEVELOPER,
        *,
        project: str = DEFAULT_PROJECT,
        label: str = "",
        ttl: float = 0.0,
        coinage: Coinage | str = Coinage.DSEC,
    ) -> NewKey:
        """Make a key, which is shown this once: only its SHA-256 is kept.

        Args:
            scope: "developer" (everything within ``project``) or "admin" (everything). project: is made where it is not there.
            label: your own words. ttl: seconds for which it is good, 0 = until it is revoked.
            coinage: how it is written, "dsec" or "e2b" (as SDKs of that maker want it).

        Raises: BadRequest. Denied: the key in use is not an admin's. Unsupported: the engine has no keys.
        """
        chosen = scope_of(scope), coinage_of(coinage)
        return await self._link.call(
            self._link.services.tenants.create_key(
                chosen[0], project=project, label=label, ttl=ttl, coinage=chosen[1]
            )
        )

    async def list(self, project: str = "", *, after: str = "", limit: int = 1000) -> tuple[KeyInfo, ...]:
        """Keys of one ``project`` or of all, by id, those after the id ``after``; none of them is shown."""
        return await self._link.call(self._link.services.tenants.keys(project, after=after, limit=limit))

    async def revoke(self, id: str) -> KeyInfo:
        """Make a key no good, from now on. Twice is no error.  Raises: NotFound, BadRequest."""
        return await self._link.call(self._link.services.tenants.revoke_key(parse_key_id(id)))


class AsyncProjects:
    """Projects of a server, and what they may have."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def list(self) -> tuple[ProjectInfo, ...]:
        """All that the key in use can see, by name."""
        return await self._link.call(self._link.services.tenants.projects())

    async def get(self, name: str) -> ProjectInfo:
        """One.  Raises: NotFound."""
        return await self._link.call(self._link.services.tenants.project(name))

    async def set(self, name: str, quota: Quota) -> ProjectInfo:
        """Set what it may have from now on; it is made where it is not there.  Raises: BadRequest. Denied: the key in use is not an admin's."""
        return await self._link.call(self._link.services.tenants.set_quota(name, quota))


class AsyncPool:
    """The ready sandboxes of an engine: whole ones that nobody has used, so that creating one is claiming one.

    How many there are of which kind follows from what is asked for, within ``Settings.pool`` and ``Settings.pool_memory``.
    """

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def info(self) -> PoolInfo:
        """What it holds now, and how many creates since the engine was opened found one ready."""
        return await self._link.call(self._link.services.pool.info())

    async def warm(
        self,
        template: str = BASE,
        count: int = 1,
        *,
        level: Level | str | None = None,
        limits: Limits | None = None,
        read_only: bool = False,
    ) -> int:
        """Have sandboxes ready before anybody asks for them. They stay until nobody has asked for their kind for five minutes.

        Args:
            template: "base" or a built template. level, limits, read_only: as they will be asked for; another one is another kind.
            count: ready ones, 0 = no more than arrivals call for.

        Returns:
            How many are ready: fewer than ``count`` where the memory that the pool may take is used up.

        Raises:
            BadRequest: an argument; more than ``Settings.pool``. NotFound: the template.
            Unsupported: this engine keeps none ready. As :meth:`AsyncSandboxes.create`.
        """
        check_text("template", template)
        check_count("count", count, 0, 1000)
        templates = self._link.services.templates
        spec = spec_of(
            None if template == BASE else await self._link.call(templates.find(template)),
            level=level,
            limits=limits,
            ttl=0.0,
            idle=0.0,
            read_only=read_only,
            env=None,
            volumes=(),
            labels=None,
        )
        return await self._link.call(self._link.services.pool.warm(spec, count))


class AsyncSnapshots:
    """The snapshots of an engine. Those of a private engine end with it."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def get(self, id: str) -> SnapshotInfo:
        """The snapshot of that ``id``.  Raises: NotFound: there is none. BadRequest: not the form of an id."""
        return await self._link.call(self._link.services.snapshots.get(parse_snapshot_id(id)))

    async def list(self, sandbox: str = "") -> tuple[SnapshotInfo, ...]:
        """Those of the ``sandbox`` with that id (it may have ended), or all; oldest first.  Raises: BadRequest: not the form of an id."""
        of = parse_sandbox_id(sandbox) if sandbox else None
        return await self._link.call(self._link.services.snapshots.list(of))

    async def export(self, snapshot: SnapshotInfo, path: str | Path) -> None:
        """Write a ``snapshot``, with all that its files lie over, to one file: :meth:`import_` takes it in, in another engine or on another machine.

        Not part of it: volumes, what of the host was shown inside, and for how long its sandbox was to live.

        Args:
            snapshot: what is written. path: of the file; it is there when it is whole, and one that was there is replaced.

        Raises:
            NotFound: there is no such snapshot. BadRequest: the path. Unsupported: it holds a file that cannot be kept.
            TooLarge, StorageFull, StoreDamaged, Denied, Busy.
        """
        await self._link.call(saved(self._link.services.sharing.export_snapshot(snapshot.id), path))

    async def import_(self, path: str | Path) -> SnapshotInfo:
        """Take in a snapshot that :meth:`export` wrote to the file ``path``, as a new one with an id of its own. Nothing in the file is believed.

        Raises:
            NotFound: the file. BadRequest: it is no snapshot, was damaged, or was made to do harm.
            Unsupported: no level here has snapshots. TooLarge, StorageFull, Denied, Busy.
        """
        return await self._link.call(self._link.services.sharing.import_snapshot(file_pieces("path", path)))

    async def remove(self, id: str) -> None:
        """Remove the snapshot of that ``id``; sandboxes that began with it keep their files. Twice is no error.  Raises: BadRequest: not the form of an id."""
        await self._link.call(self._link.services.snapshots.remove(parse_snapshot_id(id)))


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


class AsyncImages:
    """The images that sandboxes stand on, shared by all engines of a user.

    A ``name`` is that of a base, or ``sha256:…``.

    Every method raises:
        BadRequest: the name. NotFound: there is no such image. StoreDamaged, Denied: the store.
    """

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def list(self) -> tuple[ImageInfo, ...]:
        """What is stored, by name; what no name stands for comes last."""
        return await self._link.call(self._link.services.images.list())

    async def get(self, name: str) -> ImageInfo:
        """The image of that ``name``, built or fetched first when it is not stored.

        Raises:
            Conflict: its content is not that of the pinned digest. TooLarge: more than an image may have.
            Unsupported: it cannot be built here; the message says what is missing. RuntimeUnavailable, Busy, StorageFull.
        """
        check_text("name", name)
        return await self._link.call(self._link.services.images.get(name))

    async def refresh(self, name: str) -> ImageInfo:
        """The image of that ``name`` built or fetched anew. Sandboxes and templates keep what they have.  Raises: as :meth:`get`."""
        check_text("name", name)
        return await self._link.call(self._link.services.images.refresh(name))

    async def verify(self, name: str) -> ImageInfo:
        """The image of that ``name`` after all of its file was read.  Raises: StoreDamaged: it is not what was stored."""
        check_text("name", name)
        return await self._link.call(self._link.services.images.verify(name))

    async def remove(self, name: str) -> ImageInfo:
        """Take a ``name`` away, and the image when no other name stands for it; given a digest, the image and all its names.

        Raises:
            Conflict: templates, or engines with sandboxes or snapshots, need it; all are named.
        """
        check_text("name", name)
        return await self._link.call(self._link.services.images.remove(name))

    async def collect(self, budget: int | None = None) -> Freed:
        """Remove what nothing needs; with a ``budget`` of bytes also what nobody holds beyond it, the longest unused first."""
        if budget is not None:
            check_count("budget", budget, 0, MOST_BYTES)
        return await self._link.call(self._link.services.images.collect(budget))


class AsyncSandbox:
    """One sandbox. Leaving its ``async with`` destroys it."""

    def __init__(self, link: AsyncLink, info: SandboxInfo) -> None:
        self._link = link
        self._info = info
        self.files = AsyncFiles(link, info.id)

    @property
    def id(self) -> SandboxId:
        """Its id."""
        return self._info.id

    @property
    def info(self) -> SandboxInfo:
        """What was known of it at the last act that told; :meth:`inspect` asks."""
        return self._info

    @property
    def flags(self) -> frozenset[Flag]:
        """What its level guarantees here."""
        return self._info.flags

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.destroy()

    # Commands

    async def exec(
        self,
        command: Argv,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: Content | None = None,
        scratch: bool = False,
    ) -> ExecResult:
        """Run a command to its end. How it ended is the result, whatever that is: only our own failures raise.

        When this call is cancelled, the command's process tree is killed.

        Args:
            command: program and arguments, or one string for a shell.
            timeout: seconds until its whole process tree is ended; then ``timed_out`` is set. None = none.
            env: added to the sandbox's variables.
            cwd: relative to the sandbox's working directory. user: "root" where the level has users, "" = the ordinary one.
            stdin: bytes, a binary file or an iterator of bytes.
            scratch: in a throw-away copy of the sandbox.

        Raises:
            BadRequest, TooLarge, Unsupported: an argument.
            NotFound, Conflict, SandboxFailed: the sandbox does not run.
            Busy: it runs its maximum of commands.
            RuntimeUnavailable: the command was never reached. UnknownOutcome: it was, and its end is unknown.
        """
        source = None if stdin is None else content_of(stdin, "stdin")
        whole = source if isinstance(source, bytes) else None
        request = exec_request(
            command, env=env, cwd=cwd, user=user, timeout=timeout, stdin=whole, scratch=scratch
        )
        pieces = None if isinstance(source, bytes) else source
        return await self._link.call(self._link.services.execs.run(self._info.id, request, pieces))

    async def start(
        self,
        command: Argv,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bytes | bool | None = None,
    ) -> AsyncExec:
        """Start a command in the background; it goes on whether or not anybody waits, and its result is recorded.

        What is not told here is as for :meth:`exec`.

        Args:
            stdin: all of standard input, or True to send it piece by piece.

        Raises:
            BadRequest, NotFound, Conflict, SandboxFailed, Busy, RuntimeUnavailable: as :meth:`exec`.
        """
        whole, more = fed_at_start(stdin)
        request = exec_request(
            command, env=env, cwd=cwd, user=user, timeout=timeout, stdin=whole, stdin_open=more
        )
        return await self._link.make(
            self._link.services.execs.start(self._info.id, request),
            lambda session: AsyncExec(self._link, self._info.id, session),
            killed,
        )

    async def attach(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> AsyncExec:
        """Follow a command, also one that an earlier engine started.

        Args:
            exec_id: its id.
            stdout, stderr: bytes of that stream to skip, counted from its start. What is no longer kept shows as a gap in the offsets.

        Raises:
            NotFound: there is no such command in this sandbox.
            Conflict: it is paused, and an earlier engine started the command.
        """
        work = self._link.services.execs.attach(
            self._info.id, parse_exec_id(exec_id), stdout=stdout, stderr=stderr
        )
        return AsyncExec(self._link, self._info.id, await self._link.call(work))

    async def execs(self) -> tuple[ExecInfo, ...]:
        """Its latest thousand commands, oldest first, also those of an earlier engine."""
        return await self._link.call(self._link.services.execs.list(self._info.id))

    async def terminal(
        self,
        command: Argv = ("/bin/sh",),
        *,
        rows: int = 24,
        cols: int = 80,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
    ) -> AsyncTerminal:
        """Start a command on a terminal. As a context manager its tree is killed at the end.

        What is not told here is as for :meth:`exec`.

        Args:
            rows, cols: the terminal's size in characters.

        Raises:
            BadRequest, NotFound, Conflict, SandboxFailed, Busy, RuntimeUnavailable: as :meth:`exec`.
            Unsupported: this level has no terminals.
        """
        request = exec_request(
            command,
            env=env,
            cwd=cwd,
            user=user,
            timeout=timeout,
            stdin_open=True,
            pty=pty_size(rows, cols),
        )
        return await self._link.make(
            self._link.services.execs.start(self._info.id, request),
            lambda session: AsyncTerminal(self._link, self._info.id, session),
            killed,
        )

    # Life

    async def pause(self) -> SandboxInfo:
        """Stop all its processes. Twice is no error.  Raises: Unsupported: this level cannot. NotFound, Conflict, SandboxFailed: it does not run."""
        return self._told(await self._link.call(self._link.services.sandboxes.pause(self._info.id)))

    async def resume(self) -> SandboxInfo:
        """Let its processes go on; time-outs of commands did not run meanwhile. One that is dormant is woken.  Raises: Unsupported, NotFound, Conflict, SandboxFailed: as :meth:`pause`."""
        return self._told(await self._link.call(self._link.services.sandboxes.resume(self._info.id)))

    async def hibernate(self) -> SandboxInfo:
        """Keep its files, its id and its session, and nothing else: every process ends. Its next act wakes it. Twice is no error.

        Raises: Unsupported: its level keeps no files without a sandbox. NotFound, Conflict, SandboxFailed.
        """
        return self._told(await self._link.call(self._link.services.sandboxes.hibernate(self._info.id)))

    async def extend(self, ttl: float) -> SandboxInfo:
        """Let it live ``ttl`` seconds from now, 0 = without end.  Raises: NotFound, Conflict, SandboxFailed: it does not run."""
        return self._told(await self._link.call(self._link.services.sandboxes.extend(self._info.id, ttl)))

    async def snapshot(self, kind: SnapshotKind | str = SnapshotKind.FILES) -> SnapshotInfo:
        """Keep its files as they are now; it stands still for a few milliseconds. When this returns, the snapshot is whole.

        Args:
            kind: what is kept: "files".

        Raises:
            Unsupported: its level has no snapshots, or not of that kind. BadRequest: the kind.
            StorageFull: there is no room. NotFound, Conflict, SandboxFailed: it does not run.
        """
        work = self._link.services.snapshots.take(self._info.id, kind_of(kind))
        return await self._link.call(work)

    async def fork(
        self, count: int = 1, *, kind: SnapshotKind | str = SnapshotKind.FILES
    ) -> list[AsyncSandbox]:
        """Make sandboxes whose files begin as this one's are now: all of them, or none. They share what none of them changes.

        Processes are not copied. Each has its own id and SESSION_ID, and this one's limits, variables and time to live, counted anew; its volumes
        are read-only.

        Args:
            count: how many, at most 1,000.
            kind: what they begin with: "files".

        Raises:
            BadRequest, Unsupported: the count; its level has no snapshots.
            Busy, StorageFull, RuntimeUnavailable: not all could be made; none is left.
            NotFound, Conflict, SandboxFailed: it does not run.
        """
        kind_of(kind)
        check_count("count", count, 1, MOST_CHILDREN)
        sandboxes = self._link.services.sandboxes
        made = await self._link.make(
            self._link.services.snapshots.fork(self._info.id, count),
            lambda fork: fork.children,
            lambda fork: each(fork.children, lambda child: sandboxes.destroy(child, reason=NEVER_HAD)),
        )
        return [AsyncSandbox(self._link, await self._link.call(sandboxes.get(child))) for child in made]

    async def rollback(self, snapshot: SnapshotInfo | str) -> SandboxInfo:
        """Make its files those of a snapshot again. All its processes end first: commands that ran end with UnknownOutcome.

        Args:
            snapshot: one of this sandbox, or of another of the same level and base; or its id.

        Raises:
            NotFound, BadRequest: the snapshot. Conflict: it is of another level or base; the sandbox is paused or does not run.
            Unsupported: its level has no snapshots.
        """
        chosen = snapshot.id if isinstance(snapshot, SnapshotInfo) else parse_snapshot_id(snapshot)
        return self._told(
            await self._link.call(self._link.services.snapshots.rollback(self._info.id, chosen))
        )

    async def destroy(self, reason: str = "asked") -> None:
        """End it and remove everything. Twice is no error.

        Args:
            reason: kept in its record.

        Raises:
            CleanupFailed: something is left; it is recorded and will be retried.
        """
        check_text("reason", reason)
        await self._link.call(self._link.services.sandboxes.destroy(self._info.id, reason=reason))

    async def wait(self) -> SandboxInfo:
        """Wait until it has ended, however long that takes; the result says why."""
        return self._told(await self._link.call(self._link.services.observe.wait(self._info.id)))

    # Looking

    async def inspect(self) -> SandboxInfo:
        """What is known of it now, also when it has ended."""
        return self._told(await self._link.call(self._link.services.sandboxes.get(self._info.id)))

    async def metrics(self) -> Metrics:
        """Figures now.  Raises: NotFound, Conflict, SandboxFailed: it does not run."""
        return await self._link.call(self._link.services.observe.metrics(self._info.id))

    async def events(self, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        """Its records in the journal with a number above ``after``, the first ``limit`` of them (at most 10,000). Also when it has ended."""
        return await self._link.call(
            self._link.services.observe.events(self._info.id, after=after, limit=limit)
        )

    async def decide(self, decision: Mapping[str, Json]) -> Record:
        """Keep in its journal what whoever acts in it is about to do, and why, beside what is done then. It need not run, and is not woken.

        Args:
            decision: an object of JSON of your own, at most 32 KiB: a plan, a tool that was chosen, what was not, ids of a trace.

        Raises:
            BadRequest: it is no JSON, or empty. TooLarge. NotFound, SandboxFailed: it has ended.
        """
        return await self._link.call(self._link.services.observe.decide(self._info.id, decision))

    def _told(self, info: SandboxInfo) -> SandboxInfo:
        self._info = info
        return info


class AsyncExec:
    """A command in the background."""

    def __init__(self, link: AsyncLink, sandbox: SandboxId, session: ExecSession) -> None:
        self._link = link
        self._sandbox = sandbox
        self._session = session

    @property
    def id(self) -> ExecId:
        """Its id, for :meth:`AsyncSandbox.attach`."""
        return self._session.id

    @property
    def pid(self) -> int:
        """Its process id inside the sandbox, 0 when it never started or has ended earlier."""
        return self._session.pid

    @property
    def output(self) -> AsyncIterator[Chunk]:
        """Output as it comes, until the command has ended. While this is iterated and not consumed, the command waits."""
        return self._link.iterate(self._session.output())

    async def wait(self) -> ExecResult:
        """How it ended, waited for.  Raises: UnknownOutcome: nobody knows. SandboxFailed: the sandbox died first."""
        return await self._link.call(self._session.wait())

    async def kill(self) -> None:
        """Kill its whole process tree. One that has ended is no error."""
        await self._link.call(self._session.signal(SIGKILL, tree=True))

    async def signal(self, signo: int) -> None:
        """Send it the signal ``signo``, its first process only. One that has ended is no error."""
        check_count("signo", signo, 0, 64)
        await self._link.call(self._session.signal(signo))

    async def send_stdin(self, data: bytes) -> None:
        """Send ``data`` to its standard input; waits while the command does not read.  Raises: Conflict: it was started without stdin=True, or that input was closed."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise BadRequest(f"data: {type(data).__name__} is not bytes", hint="text.encode()")
        await self._link.call(self._session.send(bytes(data)))

    async def close_stdin(self) -> None:
        """End of standard input."""
        await self._link.call(self._session.close_stdin())

    async def attach(self, *, stdout: int = 0, stderr: int = 0) -> AsyncExec:
        """The same command, followed anew with ``stdout`` and ``stderr`` bytes skipped.  Raises: NotFound: nothing is known of it any more."""
        work = self._link.services.execs.attach(self._sandbox, self.id, stdout=stdout, stderr=stderr)
        return AsyncExec(self._link, self._sandbox, await self._link.call(work))


class AsyncTerminal(AsyncExec):
    """A command on a terminal. Its output is one stream."""

    async def send(self, data: bytes) -> None:
        """Type ``data``."""
        await self.send_stdin(data)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell it a new size: ``rows`` and ``cols`` in characters, from 1 to 65,535."""
        await self._link.call(self._session.resize(pty_size(rows, cols)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()


class AsyncFiles:
    """Files of one sandbox. A relative ``path`` is below its working directory; ``user`` is as for a command.

    Every method raises:
        FileMissing, FileDenied, FileIsDirectory, FileKind, QuotaExceeded, FileProblem: as the kernel inside said.
        BadRequest: an argument. NotFound, Conflict, SandboxFailed: the sandbox does not run.
    """

    def __init__(self, link: AsyncLink, sandbox: SandboxId) -> None:
        self._link = link
        self._sandbox = sandbox

    async def read(
        self, path: str, *, offset: int = 0, length: int = 2**63 - 1, max_bytes: int = GIB, user: str = ""
    ) -> bytes:
        """Content, all of it or ``length`` bytes from ``offset``.  Raises: TooLarge: it is more than ``max_bytes``."""
        check_user(user)
        files = self._link.services.files
        stream = files.read(self._sandbox, path, offset=offset, length=length, user=user)
        return await self._link.call(collected(stream, max_bytes, path))

    def open_read(
        self, path: str, *, offset: int = 0, length: int = 2**63 - 1, user: str = ""
    ) -> AsyncIterator[bytes]:
        """Content in pieces, however large; all of it or ``length`` bytes from ``offset``. Leaving the iterator ends the transfer."""
        check_user(user)
        files = self._link.services.files
        return self._link.iterate(files.read(self._sandbox, path, offset=offset, length=length, user=user))

    async def write(
        self,
        path: str,
        content: Content,
        *,
        mode: int = 0o644,
        append: bool = False,
        exclusive: bool = False,
        parents: bool = True,
        atomic: bool = False,
        user: str = "",
    ) -> Entry:
        """Write a file; what is told of it afterwards.

        Args:
            content: bytes, a binary file, or an iterator of bytes.
            mode: permission bits of a new file. append: after what is there. exclusive: an existing one is an error.
            parents: make missing directories. atomic: readers see the old content or the whole new one.
        """
        check_user(user)
        options = WriteOptions(mode=mode, append=append, exclusive=exclusive, parents=parents, atomic=atomic)
        source = content_of(content)
        return await self._link.call(
            self._link.services.files.write(self._sandbox, path, source, options=options, user=user)
        )

    async def stat(self, path: str, *, follow: bool = True, user: str = "") -> Entry:
        """What is there; with ``follow`` a symlink's target."""
        check_user(user)
        check_flag("follow", follow)
        return await self._link.call(
            self._link.services.files.stat(self._sandbox, path, follow=follow, user=user)
        )

    async def exists(self, path: str, *, user: str = "") -> bool:
        """Something is there (a symlink's target counts)."""
        check_user(user)
        try:
            await self.stat(path, user=user)
        except FileNotFoundError:
            return False
        return True

    async def list(self, path: str = ".", *, limit: int = 100_000, user: str = "") -> tuple[Entry, ...]:
        """Entries of a directory, sorted by name, the first ``limit`` of them (at most 1,000,000)."""
        check_user(user)
        listing = await self._link.call(
            self._link.services.files.list(self._sandbox, path, limit=limit, user=user)
        )
        return listing.entries

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True, user: str = "") -> None:
        """Make a directory with the permission bits ``mode``; with ``parents`` the missing ones above too, and an existing one is no error."""
        check_user(user)
        change = MakeDir(path, mode, parents)
        await self._link.call(self._link.services.files.change(self._sandbox, change, user=user))

    async def move(self, source: str, target: str, *, replace: bool = True, user: str = "") -> None:
        """Rename ``source`` to ``target``; without ``replace`` an existing target is an error."""
        check_user(user)
        change = Rename(source, target, replace)
        await self._link.call(self._link.services.files.change(self._sandbox, change, user=user))

    async def remove(self, path: str, *, recursive: bool = False, user: str = "") -> None:
        """Remove a file or an empty directory, or with ``recursive`` a tree."""
        check_user(user)
        change = Remove(path, recursive)
        await self._link.call(self._link.services.files.change(self._sandbox, change, user=user))

    async def watch(
        self, path: str = ".", *, recursive: bool = False, user: str = ""
    ) -> AsyncIterator[FileEvent]:
        """What happens in a directory, with ``recursive`` also in those below it, from the moment on at which this returns. Leaving the iterator ends it.

        Raises:
            SandboxFailed, UnknownOutcome: while iterating, the sandbox ended.
        """
        check_user(user)
        check_flag("recursive", recursive)
        work = self._link.services.files.watch(self._sandbox, path, recursive=recursive, user=user)
        return await self._link.make(work, self._link.iterate, closed)

    async def upload(self, local: str | Path, path: str, *, user: str = "") -> Transfer:
        """Copy a file or directory ``local`` of this machine to ``path``.  Raises: TooLarge. OSError: it cannot be read here."""
        check_user(user)
        return await self._link.call(
            self._link.services.trees.upload(self._sandbox, local_path("local", local), path, user=user)
        )

    async def download(self, path: str, local: str | Path, *, user: str = "") -> Transfer:
        """Copy a file or directory of the sandbox to ``local``; nothing outside it is written.  Raises: TooLarge. Conflict: a file of a directory is there already. OSError: it cannot be written here."""
        check_user(user)
        return await self._link.call(
            self._link.services.trees.download(self._sandbox, path, local_path("local", local), user=user)
        )

    async def unpack(self, archive: Content, path: str, *, user: str = "") -> Transfer:
        """Unpack a tar ``archive`` (bytes, a binary file, or an iterator of bytes) below ``path``.  Raises: TooLarge. BadRequest: a member would escape, or it is no archive."""
        check_user(user)
        source = streamed(archive, "archive")
        return await self._link.call(self._link.services.trees.unpack(self._sandbox, source, path, user=user))

    def pack(self, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        """A tar archive of ``path``, in pieces."""
        check_user(user)
        return self._link.iterate(self._link.services.trees.pack(self._sandbox, path, user=user))
