"""What a client needs of an engine, in this process or across a wire.

Every method that takes a sandbox id raises:
    NotFound: there is no such sandbox (or no more).
    SandboxFailed: it died; the reason is in the message.
    Conflict: it is paused, being made or being destroyed, and the act needs one that runs.

A sandbox that is dormant (hibernated, cold, or frozen because nobody used it) is woken first by every act that needs one that runs; what such an act then
raises beside is what :meth:`SandboxService.create` raises. Looking (get, list, events, metrics), extending and destroying wake nothing.
    StorageFull, StoreDamaged: the act could not be recorded.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from dsec.model.built import Built, Tagged
from dsec.model.execs import Chunk, ExecInfo, ExecRequest, ExecResult, PtySize
from dsec.model.files import Change, Entry, FileEvent, Listing, Transfer, WriteOptions
from dsec.model.ids import ExecId, SandboxId, SnapshotId
from dsec.model.images import Freed, ImageInfo
from dsec.model.journal import Json, Record
from dsec.model.paging import PAGE, Page
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import Metrics, Problem, SandboxInfo, SandboxSpec, State
from dsec.model.snapshots import Fork, SnapshotInfo, SnapshotKind
from dsec.model.volumes import VolumeInfo
from dsec.ports.admission import Admission, Always
from dsec.ports.storage import Fill
from dsec.ports.tenants import NoTenants, TenantService


class SandboxService(ABC):
    """Lifecycle. Work that has begun is finished (or undone) whether or not the caller still waits."""

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        """Make a sandbox, completely or not at all.

        Raises:
            IsolationUnavailable: this machine or user cannot have that level.
            NotFound: a volume of that name. Conflict: another sandbox may write to a volume that this one is to write to; ``facts["holder"]`` is its id.
            Denied: a path of the host that is not allowed here.
            Busy: a bound is reached now.
            RuntimeUnavailable: the isolation machinery failed.
        """

    @abstractmethod
    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        """What is recorded, ended sandboxes included."""

    @abstractmethod
    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        """Those in these states, oldest first; by default all that are not gone."""

    @abstractmethod
    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        """A part of those in these states (by default all that are not gone) of a project ("" = of all), oldest first.

        Whoever reads on from ``next`` meets each that is there all the while exactly once, whatever comes and goes meanwhile.

        Raises:
            BadRequest: ``after`` is not from an earlier page, or ``limit`` is not from 1 to 1,000.
        """

    @abstractmethod
    async def destroy(self, sandbox: SandboxId, *, reason: str = "asked") -> None:
        """End it and remove everything. Doing so twice is not an error.

        Raises:
            CleanupFailed: something is left; it is recorded and will be retried.
        """

    @abstractmethod
    async def pause(self, sandbox: SandboxId) -> SandboxInfo:
        """Stop all its processes. Pausing a paused one is not an error.  Raises: Unsupported."""

    @abstractmethod
    async def resume(self, sandbox: SandboxId) -> SandboxInfo:
        """Let them go on; time-outs of commands did not run meanwhile. One that is dormant is woken.  Raises: Unsupported."""

    @abstractmethod
    async def create_cold(self, spec: SandboxSpec, count: int) -> tuple[SandboxId, ...]:
        """Record that many sandboxes and make none: the first act of each makes it. All of them, or none.

        Raises: as :meth:`create`, as far as it can be known now. BadRequest: ``count``.
        """

    @abstractmethod
    async def hibernate(self, sandbox: SandboxId) -> SandboxInfo:
        """Keep its files and nothing else: every process ends, and what commands in flight were doing is recorded as cut off. One that is dormant stays so.

        The next act wakes it: the same id, session and files, with its time to live going on.  Raises: Unsupported: its level keeps no files.
        """

    @abstractmethod
    async def extend(self, sandbox: SandboxId, ttl: float) -> SandboxInfo:
        """Let it live ``ttl`` seconds from now, 0 = without end."""


class SnapshotService(ABC):
    """What sandboxes were, and more sandboxes made of that. Snapshots of a private engine end with it."""

    @abstractmethod
    async def take(self, sandbox: SandboxId, kind: SnapshotKind) -> SnapshotInfo:
        """Keep the files of a running or paused sandbox as they are at one moment, for which it stands still.

        When this returns, the snapshot is whole, and what the engine's durability asks for.

        Raises:
            Unsupported: its level has no snapshots, or not of that kind. StorageFull.
        """

    @abstractmethod
    async def create(self, snapshot: SnapshotId, spec: SandboxSpec) -> SandboxInfo:
        """A sandbox whose files begin as the snapshot's.

        Raises:
            NotFound: there is no such snapshot. Conflict: ``spec`` has another level or base than it.
            As :meth:`SandboxService.create`.
        """

    @abstractmethod
    async def fork(self, sandbox: SandboxId, count: int) -> Fork:
        """That many sandboxes whose files begin as this one's at one moment: all of them, or none.

        Raises: as :meth:`take` and :meth:`create`.
        """

    @abstractmethod
    async def rollback(self, sandbox: SandboxId, snapshot: SnapshotId) -> SandboxInfo:
        """Make its files the snapshot's again. Its processes end first; what they were doing is recorded as cut off.

        Raises:
            NotFound: there is no such snapshot. Conflict: it is of another level or base, or the sandbox is paused. Unsupported.
        """

    @abstractmethod
    async def get(self, snapshot: SnapshotId) -> SnapshotInfo:
        """Raises: NotFound."""

    @abstractmethod
    async def list(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        """Those of one sandbox, ended ones included, or of one project, or all; oldest first."""

    @abstractmethod
    async def remove(self, snapshot: SnapshotId) -> None:
        """Remove it; sandboxes that began with it keep their files. Twice is no error."""


class Changes(ABC):
    """What sandboxes and snapshots hold that their images do not, as directories of this machine."""

    @abstractmethod
    def changes(self, of: SandboxId | SnapshotId) -> AbstractAsyncContextManager[Path]:
        """A directory as an overlay keeps it, of one moment; it stays the same while it is looked at. Its content is a stranger's.

        Raises:
            NotFound: there is no such snapshot. Unsupported: the sandbox's level keeps none. StorageFull.
        """


class Arrivals(ABC):
    """Snapshots that were not taken here."""

    @abstractmethod
    async def adopt(self, spec: SandboxSpec, kind: SnapshotKind, fill: Fill, size: int) -> SnapshotInfo:
        """A new snapshot, whole and durable when this returns, as of a sandbox of that specification that nobody knows.

        Args:
            fill: writes what the sandbox changed into an empty directory, as an overlay keeps it; called in a thread.
            size: bytes that it writes at most.

        Raises:
            Unsupported: no level here has snapshots. StorageFull. What ``fill`` raises.
        """


@dataclass(frozen=True, slots=True)
class Workplace:
    """What is needed to build in sandboxes, and to share what they left."""

    sandboxes: SandboxService
    execs: ExecService
    snapshots: SnapshotService
    changes: Changes
    arrivals: Arrivals


class VolumeService(ABC):
    """Files that outlive sandboxes, by name within a project: what one project has, no other one finds. Those of a private engine end with it."""

    @abstractmethod
    async def create(self, project: str, name: str, size_mib: int) -> VolumeInfo:
        """Make an empty one, which may come to hold ``size_mib``.

        Raises:
            Conflict: the project has one of that name. Unsupported: no level here has volumes. StorageFull, also when the engine holds its maximum.
        """

    @abstractmethod
    async def get(self, project: str, name: str) -> VolumeInfo:
        """One, with its figures and those who use it.  Raises: NotFound."""

    @abstractmethod
    async def list(self, project: str) -> tuple[VolumeInfo, ...]:
        """Those of the project, by name."""

    @abstractmethod
    async def remove(self, project: str, name: str) -> None:
        """Remove it with all its files. Twice is no error.  Raises: Conflict: a sandbox uses it. CleanupFailed: call again."""


class TemplateService(ABC):
    """Blueprints, built once and run many times. A reference is ``name``, ``name:tag`` or ``name@sha256:…``.

    Every method that takes a reference raises:
        BadRequest: it is none. NotFound: no such template was built.
    """

    @abstractmethod
    async def build(self, text: bytes, *, source: str, tag: str, strict: bool, update: bool) -> Built:
        """Build what a document says, and let a tag mean it. The same document over the same base gives the same digest.

        Args:
            source: the document's name, for errors. tag: that means it afterwards.
            strict: refuse dependencies that float, and a base that can change. update: lock dependencies anew.

        Raises:
            BadRequest: the document, every error of it with line and field; dependencies that contradict one another.
            Unsupported: something that cannot be built here.
            NotFound: the base. RuntimeUnavailable: an index does not answer. StorageFull, TooLarge, TimedOut, Busy.
        """

    @abstractmethod
    async def promote(self, snapshot: SnapshotId, *, name: str, tag: str) -> Built:
        """Let a tag mean what a snapshot holds, over what it was taken of. Sandboxes of it need neither the snapshot nor its engine.

        Raises:
            NotFound: there is no such snapshot. BadRequest: the name, or the tag. Unsupported: a file that no layer can keep.
            TooLarge, StorageFull, Busy.
        """

    @abstractmethod
    async def find(self, reference: str) -> Built:
        """What a reference means now."""

    @abstractmethod
    async def list(self) -> tuple[Tagged, ...]:
        """What every tag means, by name."""

    @abstractmethod
    async def history(self, name: str) -> tuple[Tagged, ...]:
        """Each time that a tag of that name was set, oldest first."""

    @abstractmethod
    async def tag(self, reference: str, tag: str) -> Built:
        """Let a tag mean what a reference means now; readers see the old meaning or the new one."""

    @abstractmethod
    async def rollback(self, reference: str) -> Built:
        """Let a tag mean what it meant before.  Raises: Conflict: it never meant anything else."""

    @abstractmethod
    async def remove(self, reference: str) -> None:
        """Take a tag away. With the last tag of a name goes everything that was built under it. Twice is no error. Sandboxes live on."""


class ImageService(ABC):
    """The images that sandboxes stand on, shared by all engines of a user. They are asked for by name, or by ``sha256:…``.

    Every method that takes a name raises:
        BadRequest: it is none. NotFound: there is no such image. StoreDamaged, Denied.
    """

    @abstractmethod
    async def list(self) -> tuple[ImageInfo, ...]:
        """What is stored, by name; what no name stands for comes last."""

    @abstractmethod
    async def get(self, name: str) -> ImageInfo:
        """The image of that name, built or fetched first when it is not stored.  Raises: as :meth:`dsec.ports.storage.Images.get`."""

    @abstractmethod
    async def refresh(self, name: str) -> ImageInfo:
        """Built or fetched anew, also when it is stored. Sandboxes and templates keep what they have.  Raises: as :meth:`get`."""

    @abstractmethod
    async def verify(self, name: str) -> ImageInfo:
        """All of its file read, and found to be what was stored.  Raises: StoreDamaged: it is not."""

    @abstractmethod
    async def remove(self, name: str) -> ImageInfo:
        """Take a name away, and the image when no other name stands for it; given a digest, the image and all its names.

        Raises: Conflict: templates, or engines with sandboxes or snapshots, need it; all are named.
        """

    @abstractmethod
    async def collect(self, budget: int | None) -> Freed:
        """Remove what nothing needs; with a ``budget`` of bytes also what nobody holds beyond it, the longest unused first."""


class SharingService(ABC):
    """Templates and snapshots as files, with all the images that they stand on, from one engine to another.

    What comes in is not believed: every tree is unpacked where it can do no harm, and known by the digest that is computed then.
    Every import raises:
        BadRequest: it is no such file, was damaged, or was made to do harm; nothing of it is kept.
        TooLarge, StorageFull, Unsupported, Denied, Busy, RuntimeUnavailable, StoreDamaged. What ``file`` raises.
    """

    @abstractmethod
    def export_template(self, reference: str) -> AsyncIterator[bytes]:
        """A built template in pieces of a file; the same bytes for the same template.

        Raises: NotFound, BadRequest: the reference. StorageFull, StoreDamaged, Denied, Busy.
        """

    @abstractmethod
    async def import_template(self, file: AsyncIterator[bytes], *, tag: str) -> Built:
        """Take one in under its own name, and let a tag mean it; "" = ``latest``.

        Raises: Conflict: no tag was given, and ``latest`` means another one of that name.
        """

    @abstractmethod
    def export_snapshot(self, snapshot: SnapshotId) -> AsyncIterator[bytes]:
        """A snapshot in pieces of a file.

        Raises:
            NotFound: there is no such snapshot. Unsupported: a file that cannot be kept, or it is not known what it lies over.
            TooLarge, StorageFull, StoreDamaged, Denied, Busy.
        """

    @abstractmethod
    async def import_snapshot(self, file: AsyncIterator[bytes]) -> SnapshotInfo:
        """Take one in, as a new snapshot with an id of its own."""


class ExecSession(ABC):
    """One command, as one client follows it. Dropping the session leaves the command alone."""

    id: ExecId
    pid: int

    @abstractmethod
    def output(self) -> AsyncIterator[Chunk]:
        """Output from the session's first offsets on. While this is iterated and not consumed, the command waits.

        It does not wait for ever when somebody waits for its end: a reader who then takes nothing for some seconds is
        handed what is kept of what he missed, and offsets show what is not.
        """

    @abstractmethod
    async def wait(self) -> ExecResult:
        """How it ended.

        Raises:
            UnknownOutcome: its init was lost, or the sandbox destroyed, while it ran.
        """

    @abstractmethod
    async def signal(self, signo: int, *, tree: bool = False) -> None:
        """Signal the command, or kill its whole tree. One that has ended is not an error."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Standard input; waits while the command does not read.  Raises: Conflict: it has no open standard input."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """End of standard input."""

    @abstractmethod
    async def resize(self, size: PtySize) -> None:
        """Tell its terminal a new size."""


class ExecService(ABC):
    """Commands."""

    @abstractmethod
    async def run(
        self, sandbox: SandboxId, request: ExecRequest, stdin: AsyncIterator[bytes] | None = None
    ) -> ExecResult:
        """Run one command to its end. When the caller stops waiting, its process tree is killed.

        Raises:
            RuntimeUnavailable: the command was never reached.
            UnknownOutcome: its init was lost, or the sandbox destroyed, while it ran.
            Busy, Unsupported.
        """

    @abstractmethod
    async def start(self, sandbox: SandboxId, request: ExecRequest) -> ExecSession:
        """Start one command; it goes on whether or not anybody waits, and its result is recorded."""

    @abstractmethod
    async def attach(
        self, sandbox: SandboxId, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0
    ) -> ExecSession:
        """Follow a command from these offsets on; what is no longer kept shows as a gap.  Raises: NotFound."""

    @abstractmethod
    async def list(self, sandbox: SandboxId) -> tuple[ExecInfo, ...]:
        """The latest thousand commands, oldest first, running ones included."""


class FileService(ABC):
    """Files. A relative path is below the sandbox's working directory. ``user``: as for a command.

    Every method raises:
        FileMissing, FileDenied, FileIsDirectory, FileKind, QuotaExceeded, FileProblem: as the kernel inside said.
        BadRequest: the path.
    """

    @abstractmethod
    def read(
        self, sandbox: SandboxId, path: str, *, offset: int = 0, length: int = 2**63 - 1, user: str = ""
    ) -> AsyncIterator[bytes]:
        """Content in pieces. Leaving early ends the transfer."""

    @abstractmethod
    async def write(
        self,
        sandbox: SandboxId,
        path: str,
        content: bytes | AsyncIterator[bytes],
        *,
        options: WriteOptions,
        user: str = "",
    ) -> Entry:
        """Write all of ``content``."""

    @abstractmethod
    async def stat(self, sandbox: SandboxId, path: str, *, follow: bool = True, user: str = "") -> Entry:
        """One entry."""

    @abstractmethod
    async def list(self, sandbox: SandboxId, path: str, *, limit: int = 100_000, user: str = "") -> Listing:
        """Entries of a directory, sorted by name."""

    @abstractmethod
    async def change(self, sandbox: SandboxId, change: Change, *, user: str = "") -> None:
        """Make a directory, rename, remove, or set attributes."""

    @abstractmethod
    async def watch(
        self, sandbox: SandboxId, path: str, *, recursive: bool = False, user: str = ""
    ) -> AsyncIterator[FileEvent]:
        """Events from the moment on at which this returns; closing the iterator ends it."""


class TreeService(ABC):
    """Whole trees, up and down, as directories of this machine or as tar archives. Raises as :class:`FileService`, and TooLarge."""

    @abstractmethod
    async def upload(self, sandbox: SandboxId, local: Path, path: str, *, user: str = "") -> Transfer:
        """Copy a local file or directory to ``path``."""

    @abstractmethod
    async def download(self, sandbox: SandboxId, path: str, local: Path, *, user: str = "") -> Transfer:
        """Copy a file or directory of the sandbox to ``local``; nothing outside ``local`` is written."""

    @abstractmethod
    async def unpack(
        self, sandbox: SandboxId, archive: AsyncIterator[bytes], path: str, *, user: str = ""
    ) -> Transfer:
        """Unpack a tar archive below ``path``."""

    @abstractmethod
    def pack(self, sandbox: SandboxId, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        """A tar archive of ``path``."""


class ObserveService(ABC):
    """What happens, without changing it."""

    @abstractmethod
    async def metrics(self, sandbox: SandboxId) -> Metrics:
        """Figures now."""

    @abstractmethod
    async def events(self, sandbox: SandboxId, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        """Its records in the journal, ended sandboxes included."""

    @abstractmethod
    async def problems(self) -> tuple[Problem, ...]:
        """Clean-ups that failed and are being retried."""

    @abstractmethod
    async def wait(self, sandbox: SandboxId) -> SandboxInfo:
        """Wait until it has ended (gone, failed or lost)."""

    @abstractmethod
    async def decide(self, sandbox: SandboxId, decision: Mapping[str, Json]) -> Record:
        """Keep in its journal what whoever acts in it decided, and why: an object of JSON of their own. It need not run, and is not woken.

        Raises:
            BadRequest: not JSON, or nested deeper than 32. TooLarge: over 32 KiB.
        """


class PortService(ABC):
    """Network services that run inside sandboxes."""

    @abstractmethod
    async def connect(self, sandbox: SandboxId, port: int) -> socket.socket:
        """A TCP socket, not blocking and the caller's own, connected to 127.0.0.1:``port`` inside. The other end is a stranger's.

        Raises:
            BadRequest: no port. Unsupported: its level has no network of its own.
            Conflict: nothing listens there. TimedOut: what listens does not take the connection. Busy: it has too many.
        """


class PoolService(ABC):
    """Ready sandboxes: whole ones that nobody has used, so that creating one is claiming one."""

    @abstractmethod
    async def info(self) -> PoolInfo:
        """What the pool holds now, and what became of creates since the engine was opened."""

    @abstractmethod
    async def warm(self, spec: SandboxSpec, count: int) -> int:
        """Have ``count`` sandboxes of that kind ready, as far as the pool's bounds allow; how many are.

        Raises:
            Unsupported: this engine keeps none ready, or none of that kind.
            As :meth:`SandboxService.create`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """An open engine. ``close`` ends the connection to it, and a private engine with all its sandboxes."""

    sandboxes: SandboxService
    snapshots: SnapshotService
    volumes: VolumeService
    templates: TemplateService
    sharing: SharingService
    images: ImageService
    execs: ExecService
    files: FileService
    trees: TreeService
    observe: ObserveService
    ports: PortService
    pool: PoolService
    close: Callable[[], Awaitable[None]]
    admission: Admission = field(default_factory=Always)
    tenants: TenantService = field(default_factory=NoTenants)
