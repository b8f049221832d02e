"""What a sandbox is: its level, limits, specification, state and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dsec.errors import BadRequest
from dsec.model.checks import check_count, check_flag, check_path, check_seconds, shown
from dsec.model.execs import check_variable
from dsec.model.ids import SandboxId
from dsec.model.volumes import DEFAULT_PROJECT, check_project, check_volume_name

MIB = 2**20
ROOT_UID = 0
USER_UID = 1000
USER_HOME = "/home/user"
WORKSPACE = "/workspace"
USERS = ("user", "root")  # whom every base has
BASE = "system"  # the image that is used when none is named
HOST_BASE = "host"  # shows programs of this machine: no content that could be kept
RESERVED = "dsec."  # labels that begin so are DSec's own


class Level(StrEnum):
    """How strongly a sandbox is isolated. A level that is not available is refused, never lowered."""

    PROCESS = "process"
    CONTAINER = "container"


class Flag(StrEnum):
    """What a level can guarantee. A missing flag is a guarantee that is *not* given."""

    ROOT_FS = "root_fs"  # a root file system of its own; host files are not visible
    LAYERS = "layers"  # base layers and a writable layer that can be thrown away
    DISK_QUOTA = "disk_quota"  # bytes written are limited by the kernel
    MEMORY_LIMIT = "memory_limit"  # of the whole sandbox, and OOM is reported
    PIDS_LIMIT = "pids_limit"  # of the whole sandbox
    CPU_LIMIT = "cpu_limit"
    PID_NAMESPACE = "pid_namespace"  # other processes are invisible; killing is atomic
    LOOPBACK = "loopback"  # a network of its own with `lo` only
    NO_SOCKETS = "no_sockets"  # instead of a network: socket() is refused
    USERS = "users"  # `user=` chooses who runs a command; root inside is nobody outside
    PAUSE = "pause"  # processes can be frozen
    HIBERNATE = "hibernate"  # its files can be kept while nothing of it runs
    SCRATCH = "scratch"  # one exec in a throw-away copy-on-write child
    SNAPSHOTS = "snapshots"  # its files can be kept as they are now, forked and rolled back
    PRIVATE_UID = "private_uid"  # a host uid that no other sandbox and nobody else has
    CROSS_EXEC_SIGNALS = "cross_exec_signals"  # commands of one sandbox can signal one another
    PTY = "pty"
    VOLUMES = "volumes"


class State(StrEnum):
    """The life of a sandbox."""

    PENDING = "pending"  # being made
    RUNNING = "running"
    PAUSED = "paused"  # its processes are frozen
    HIBERNATED = "hibernated"  # nothing of it runs or is mounted; its files are kept
    COLD = "cold"  # recorded only: it is made, with fresh files, by the first act
    STOPPING = "stopping"  # being destroyed
    GONE = "gone"  # destroyed, and nothing of it is left
    FAILED = "failed"  # it died by itself; `reason` tells
    LOST = "lost"  # it did not run any more when its engine came back


class Hibernate(StrEnum):
    """When a sandbox that nobody uses may be hibernated. Asked for by name, it always is."""

    AUTO = "auto"  # when no process of it is left; with processes it is frozen
    FILES = "files"  # also with processes, which end: only its files are kept
    NEVER = "never"  # it is frozen at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Hard ceilings. ``None`` never means "unlimited": every field has a value.

    Attributes:
        cpu_millis: thousandths of one CPU.
        memory_mib: memory of all processes and tmpfs files together, MiB.
        pids: processes and threads, without init itself. Each running command takes one more, for its monitor; for a second
            after a command up to two monitors may wait for the next one.
        disk_mib: what its writable layer may hold, MiB.
        open_files: descriptors per process.
        output_bytes: kept per stream of one exec; beyond it the result is ``truncated``.
    """

    cpu_millis: int = 1000
    memory_mib: int = 512
    pids: int = 256
    disk_mib: int = 1024
    open_files: int = 1024
    output_bytes: int = 10 * MIB

    def __post_init__(self) -> None:
        bounds = {
            "cpu_millis": (10, 1_024_000),
            "memory_mib": (8, 16 * 2**20),
            "pids": (4, 4_000_000),
            "disk_mib": (1, 64 * 2**20),
            "open_files": (16, 1_048_576),
            "output_bytes": (0, 2**31),
        }
        for name, (low, high) in bounds.items():
            check_count(f"limits.{name}", getattr(self, name), low, high)


if TYPE_CHECKING:
    Source = Path | str
else:  # what reads JSON by these annotations reads text here: `__post_init__` makes a path of what is one
    Source = Any


@dataclass(frozen=True, slots=True)
class Volume:
    """Files that are no part of a sandbox, shown inside: a named volume, or a directory or file of the host. Itself, not a copy.

    Attributes:
        source: name of a volume of the sandbox's project (a str), or absolute path on the host (a Path, or a str that begins with "/").
        target: absolute path inside; missing directories are made.
        read_only: nothing inside can change it. Otherwise, if it has a name, no other sandbox may have it writable.

    Raises:
        BadRequest: the message names the field.
    """

    source: Source
    target: str
    read_only: bool = False

    def __post_init__(self) -> None:
        source: object = self.source
        if isinstance(source, str) and source.startswith("/"):
            source = Path(source)
            object.__setattr__(self, "source", source)
        if isinstance(source, str):
            check_volume_name("volume source", source)
        elif not isinstance(source, Path) or not source.is_absolute():
            raise BadRequest(
                f"volume source: {shown(source)} is not an absolute Path", hint="Path(...).absolute()"
            )
        else:
            check_path("volume source", str(source))
        check_path("volume target", self.target)
        check_flag("volume read_only", self.read_only)
        target = self.target
        if not target.startswith("/"):
            raise BadRequest(f"volume target: {shown(target)} is not an absolute path below / without '..'")
        parts = [part for part in target.split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            raise BadRequest(f"volume target: {shown(target)} is not an absolute path below / without '..'")
        if parts[0] == "proc":
            raise BadRequest(
                f"volume target: {target!r}: /proc is the sandbox's own", hint="name another place for it"
            )
        object.__setattr__(self, "target", "/" + "/".join(parts))

    @classmethod
    def named(cls, name: str, target: str, *, read_only: bool = False) -> Volume:
        """A volume by its name.  Raises: BadRequest."""
        check_volume_name("volume source", name)
        return cls(name, target, read_only)

    @property
    def name(self) -> str:
        """Of the volume, "" for a path of the host."""
        return self.source if isinstance(self.source, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What was asked for when a sandbox was made.

    Attributes:
        level: how strongly it is isolated. base: the image its files began as. limits: hard ceilings.
        base_digest: of that image, whatever its name means later; "" = the level has none, or it is not known yet.
        hostname: the name of the machine that it takes itself for, "" = "sandbox".
        template: the built template that the other values are of, as ``name:tag@sha256:…``, "" = none.
        layers: digests of images over the base, topmost first.
        workdir: where commands run, "" = as the level has it. user: who runs them unless they say otherwise, "" = the ordinary one.
        ttl: seconds it was to live, 0 = without end. idle: seconds without any act that end it, 0 = none.
        read_only: only the working directory, home and /tmp can be written.
        env: variables of every command. volumes: named ones and what of the host is shown inside. labels: the caller's own.
        project: whose volumes the names mean. lent: targets of those volumes that the template named, and not whoever asked.
        hibernate: whether it may be hibernated when nobody uses it.
    """

    level: Level = Level.CONTAINER
    base: str = BASE
    base_digest: str = ""
    template: str = ""
    layers: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""
    hostname: str = ""
    limits: Limits = Limits()
    ttl: float = 0.0
    idle: float = 0.0
    read_only: bool = False
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    volumes: tuple[Volume, ...] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    project: str = DEFAULT_PROJECT
    lent: tuple[str, ...] = ()
    hibernate: Hibernate = Hibernate.AUTO

    def __post_init__(self) -> None:
        check_seconds("ttl", self.ttl)
        check_seconds("idle", self.idle)
        limits: object = self.limits
        if not isinstance(limits, Limits):
            raise BadRequest(f"limits: {shown(limits)} is not Limits", hint="Limits(memory_mib=256)")
        check_flag("read_only", self.read_only)
        check_project("project", self.project)
        for key, value in self.env.items():
            check_variable(key, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """What is known of a sandbox. Times are seconds since the epoch; 0 = not yet, or never.

    Attributes:
        id: of the sandbox. state: where it is in its life. spec: what was asked for. flags: what its level guarantees here.
        created_at: when it was asked for. ended_at: when it was gone, failed or lost. reason: why it is in this state, where that was not just asked for.
        expires_at: when its ``ttl`` is over, on the wall clock as it stood at ``created_at``: a step of that clock moves no deadline.
        session_id: ``SESSION_ID`` of its commands. workdir: their working directory, a path inside.
        boot_id: the boot of the machine it was made in. created_boot: the moment of ``created_at`` in CLOCK_BOOTTIME seconds of that boot.
        residence: whether it stays running, and why, in words; "" = nothing decides that here. Told of one sandbox, not in lists.
    """

    id: SandboxId
    state: State
    spec: SandboxSpec
    flags: frozenset[Flag]
    created_at: float
    expires_at: float = 0.0
    ended_at: float = 0.0
    reason: str = ""
    session_id: str = ""
    workdir: str = ""
    boot_id: str = ""
    created_boot: float = 0.0
    residence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures of a sandbox now. ``-1`` = this level cannot tell.

    Attributes:
        cpu_seconds: user and system time of all its processes.
        memory_bytes: charged now. memory_peak_bytes: the most ever.
        disk_bytes: in the writable layer.
        pids: processes and threads now, init included.
        oom_kills: processes killed for memory.
    """

    cpu_seconds: float = -1.0
    memory_bytes: int = -1
    memory_peak_bytes: int = -1
    disk_bytes: int = -1
    pids: int = -1
    oom_kills: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and as whom commands of a sandbox run by default. ``home``, ``tmp`` and ``workdir`` are paths inside it."""

    workdir: str = WORKSPACE
    home: str = USER_HOME
    tmp: str = "/tmp"
    user: str = "user"
    uid: int = USER_UID
    gid: int = USER_UID


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that could not be done yet, and is tried again.

    Attributes:
        sandbox: whose it is, "" = nobody's. what: what is left. since: of the first try, seconds since the epoch. attempts: until now.
        error: how the last one failed.
        kind: ``cleanup``, or ``alert`` when nobody can be told of problems. next_try: seconds since the epoch, 0 = not known. hint: what to do.
    """

    sandbox: SandboxId
    what: str
    since: float
    attempts: int
    error: str
    kind: str = "cleanup"
    next_try: float = 0.0
    hint: str = ""
