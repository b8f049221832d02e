"""A runtime makes and ends sandboxes of one level."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dsec.errors import Unsupported
from dsec.model.ids import SandboxId, SnapshotId, VolumeId, new_sandbox_id
from dsec.model.sandbox import Flag, Level, Limits, Metrics, Place, SandboxSpec, Volume
from dsec.ports.guest import Guest


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a runtime needs to make one sandbox; nothing in it is looked up again.

    Attributes:
        image: name or digest of the base, which the runtime resolves through its image store. layers: digests of images over it, topmost first.
        deadline: CLOCK_BOOTTIME seconds at which the sandbox must end whoever is alive, 0 = none.
        hostname: of the sandbox, where the level has one.
        stored: which volume each name among ``volumes`` means. lent: targets of volumes that a template named: of the host they show only what was allowed.
        files_of: what this one's files begin as: those of a snapshot, or of a running or paused sandbox, which is stopped for that moment.
        parked: its files are those that :meth:`Runtime.park` left under its id; what fails leaves them there.
    """

    id: SandboxId
    level: Level
    limits: Limits
    image: str = "system"
    layers: tuple[str, ...] = ()
    read_only: bool = False
    volumes: tuple[Volume, ...] = ()
    stored: Mapping[str, VolumeId] = field(default_factory=lambda: MappingProxyType({}))
    lent: tuple[str, ...] = ()
    deadline: float = 0.0
    hostname: str = "sandbox"
    files_of: SandboxId | SnapshotId | None = None
    parked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A sandbox that a runtime found: its id and the pid of its init on the host."""

    id: SandboxId
    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Told when a sandbox ended without being asked to. ``reason``: words; ``oom``: init fell to the memory limit."""

    id: SandboxId
    reason: str
    oom: bool = False


OnEnded = Callable[[Ended], None]


class Runtime(ABC):
    """One level. A runtime keeps no durable state: after a restart, ``list`` is the truth."""

    level: Level
    flags: frozenset[Flag]

    def place(self, sandbox: SandboxId) -> Place:
        """Where its commands run and as whom. ``workdir`` depends on nothing but the id; asked before and after ``create``."""
        return Place()

    def reserve(self, spec: SandboxSpec) -> SandboxId:
        """The id under which the next sandbox of that kind is to be created."""
        del spec
        return new_sandbox_id()

    async def pin(self, spec: SandboxSpec) -> SandboxSpec:
        """The same, with the digest of the image that its base means now, so that nothing is looked up by name again.

        Raises: as :meth:`create`.
        """
        return spec

    @abstractmethod
    async def create(self, plan: Plan) -> Running:
        """Make it, completely or not at all.

        Raises:
            IsolationUnavailable: this machine or user cannot have it; the reason is in the message.
            Busy: a bound is reached now.
            RuntimeUnavailable: it failed; nothing is left behind.
        """

    async def rehearse(self, plan: Plan) -> None:
        """Whether ``create`` would find all that it needs: asked before a sandbox is ended in order to be made again.

        Raises:
            DsecError: what ``create`` would raise.
        """
        del plan

    @abstractmethod
    async def destroy(self, sandbox: SandboxId) -> None:
        """End every process and remove everything. Absent sandboxes are not an error.

        Raises:
            CleanupFailed: something is left; call again.
        """

    async def park(self, sandbox: SandboxId) -> None:
        """End every process, and keep its files and nothing else of it. Absent sandboxes, and parked ones, are not an error.

        Raises:
            Unsupported: this level keeps no files. CleanupFailed: something is left; call again.
        """
        raise Unsupported(f"level {self.level} cannot keep the files of {sandbox} while it does not run")

    def keeps(self, sandbox: SandboxId) -> bool:
        """Whether there are files of it, running or parked."""
        del sandbox
        return False

    def spare(self, sandbox: SandboxId) -> bool:
        """Whether it was made ahead and is nobody's yet: it is recorded nowhere, and is not listed."""
        del sandbox
        return False

    @abstractmethod
    async def list(self) -> tuple[Running, ...]:
        """What runs now and is ours."""

    @abstractmethod
    async def freeze(self, sandbox: SandboxId, frozen: bool) -> None:
        """Stop or continue all processes; returns when all are.  Raises: Unsupported, NotFound."""

    @abstractmethod
    async def deadline(self, sandbox: SandboxId, at: float) -> None:
        """Move the deadline that is enforced without us (CLOCK_BOOTTIME seconds, 0 = none).  Raises: NotFound."""

    @abstractmethod
    async def connect(self, sandbox: SandboxId) -> Guest:
        """Talk to the inside; a newer connection replaces the older.  Raises: NotFound, RuntimeUnavailable."""

    @abstractmethod
    async def metrics(self, sandbox: SandboxId) -> Metrics:
        """Figures now.  Raises: NotFound."""

    @abstractmethod
    def memory(self, sandbox: SandboxId) -> int:
        """Bytes that it takes now, -1 unknown: one figure that the kernel has at hand, read without waiting.  Raises: NotFound."""

    async def dial(self, sandbox: SandboxId, port: int, timeout: float) -> socket.socket:
        """A TCP socket, not blocking, connected to 127.0.0.1:``port`` inside the sandbox, and nowhere else whatever became of it.

        Raises:
            Unsupported: the level has no network of its own. NotFound.
            Conflict: nothing listens there. TimedOut: what listens did not take the connection within ``timeout`` seconds. Busy.
        """
        del port, timeout
        raise Unsupported(
            f"{sandbox}: level {self.level.value!r} has no network, not even of its own",
            hint="use level='container' for programs that listen",
        )
