"""The journal and the table of sandboxes: one database, one writer, one transaction for a state change and its record."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from dsec.errors import BadRequest, RuntimeUnavailable, TooLarge
from dsec.model.ids import SandboxId, SnapshotId
from dsec.model.journal import Draft, Finding, Record
from dsec.model.paging import PAGE, Page
from dsec.model.sandbox import Level, SandboxInfo, State
from dsec.model.snapshots import SnapshotInfo
from dsec.model.volumes import VolumeInfo

MOST_AT_ONCE: Final = 1000
"""Sandboxes that :meth:`Sandboxes.add_many` takes."""


class Receipt(NamedTuple):
    """Where a record was stored: its number in its chain, when (seconds since the epoch), and its digest."""

    seq: int
    at: float
    digest: str


class Standing(NamedTuple):
    """Images on which sandboxes stand: of which level, the digest of the base ("" = not known), and those of the layers over it."""

    level: Level
    base_digest: str
    layers: tuple[str, ...]


class Unsettled(RuntimeUnavailable):
    """A change was sent to the database, and nobody knows yet whether it was stored. The fact ``unknown`` says so to others.

    Attributes:
        fate: what the change gives, when it is found to be stored; cancelled when it was not, or when nobody will find out. It takes as long as
            the database stays away, and no other change is stored before.
    """

    def __init__(self, message: str, *, fate: asyncio.Future[Any], hint: str = "") -> None:
        super().__init__(message, hint=hint, unknown=True)
        self.fate = fate


class Journal(ABC):
    """Append-only, hash-chained per ``chain``, durable when ``append`` returns.

    Every method that changes something raises:
        Unsettled: it may have been stored, or not.
    Every method raises:
        StorageFull: nothing was stored.
        StoreDamaged: the database is not one of ours or is broken.
    """

    @abstractmethod
    async def append(self, *drafts: Draft) -> tuple[Receipt, ...]:
        """Store all or none."""

    @abstractmethod
    async def read(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        """Records of one chain in order, ``seq`` greater than ``after``."""

    @abstractmethod
    async def latest(
        self, chain: str, act: str, *, ref: str | None = None, limit: int = 1000
    ) -> tuple[Record, ...]:
        """Records of one chain with this act, and with this ``ref`` where one is given, newest first."""

    @abstractmethod
    async def unanswered(self, chain: str) -> tuple[Record, ...]:
        """Intents of one chain that have a ``ref`` and no result yet, in order."""

    @abstractmethod
    async def tail(self, after: int, limit: int = 1000) -> tuple[tuple[int, Record], ...]:
        """Records of all chains that are still kept, each with its position: in the order in which they were stored, position above ``after``.

        Positions only ever grow, also across restarts; a record that is stored later has a greater one. Some are left out.
        """

    @abstractmethod
    async def verify(self) -> tuple[Finding, ...]:
        """Every chain against its digests and its signed checkpoints; empty = sound. Names the first bad record of each bad chain, and cut tails."""


class Sandboxes(ABC):
    """The recorded state of every sandbox of this engine. Drafts are of the sandbox's own chain. Raises as :class:`Journal`."""

    @abstractmethod
    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        """Record a new sandbox together with its intent, the first record of its chain.  Raises: Conflict: the id exists."""

    @abstractmethod
    async def add_many(self, infos: Sequence[SandboxInfo], drafts: Sequence[Draft]) -> None:
        """Record many new sandboxes, each with the draft at its place: all or none, in one transaction. Waits while too many heads wait for a signature.

        Raises:
            Conflict: one of the ids exists. TooLarge: more than :data:`MOST_AT_ONCE`. BadRequest: not as many drafts as sandboxes.
        """

    @abstractmethod
    async def move(
        self, sandbox: SandboxId, *, seen: State, to: State, draft: Draft, reason: str = ""
    ) -> SandboxInfo:
        """Compare and set, in one transaction with its record.  Raises: Conflict: it is no longer ``seen``. NotFound."""

    @abstractmethod
    async def expire_at(self, sandbox: SandboxId, at: float, draft: Draft) -> SandboxInfo:
        """Change when it expires (seconds since the epoch, 0 = never).  Raises: NotFound."""

    @abstractmethod
    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        """Raises: NotFound."""

    @abstractmethod
    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        """All, or those in these states, oldest first. Of states that few are in: where they may be millions, see :meth:`page`."""

    @abstractmethod
    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        """A part of those in these states (by default all that are not gone) of a project ("" = of all), in the order in which they were recorded.

        Whoever reads on from ``next`` meets each that is there all the while exactly once, whatever comes and goes meanwhile.

        Raises:
            BadRequest: ``after`` is not from here, or ``limit`` not from 1 to :data:`~dsec.model.paging.MOST_IN_PAGE`.
        """

    @abstractmethod
    async def count(self, project: str = "") -> Mapping[State, int]:
        """How many there are in each state, in a project or in all; states that none is in are left out. Costs nothing."""

    @abstractmethod
    async def expiring(self, before: float, limit: int = 1000) -> tuple[SandboxInfo, ...]:
        """Those that are hibernated or cold and expire before that time (seconds since the epoch), the earliest first."""

    @abstractmethod
    async def standing(self) -> frozenset[Standing]:
        """What all that are not gone stand on, each once: few, however many sandboxes there are."""

    @abstractmethod
    async def prune(self, keep: int = 10_000) -> int:
        """Drop the longest ended of the gone and failed, gone ones first, until ``keep`` are left; how many were dropped. Their records stay."""


class SnapshotRecords(ABC):
    """Which snapshots there are. A row and the record of what made or removed it are one transaction. Raises as :class:`Journal`."""

    @abstractmethod
    async def keep(self, info: SnapshotInfo, draft: Draft) -> None:
        """Record one that was taken.  Raises: Conflict: the id exists."""

    @abstractmethod
    async def forget(self, snapshot: SnapshotId, draft: Draft) -> None:
        """Record that it is being removed.  Raises: NotFound."""

    @abstractmethod
    async def find(self, snapshot: SnapshotId) -> SnapshotInfo:
        """Raises: NotFound."""

    @abstractmethod
    async def all(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        """Those of one sandbox, or of one project, or all, oldest first."""


class VolumeRecords(ABC):
    """Which volumes there are. A row and the record of what made or removed it are one transaction. Raises as :class:`Journal`."""

    @abstractmethod
    async def keep(self, info: VolumeInfo, draft: Draft) -> None:
        """Record one that was made.  Raises: Conflict: the project has one of that name. Busy: there are too many."""

    @abstractmethod
    async def forget(self, project: str, name: str, draft: Draft) -> None:
        """Record that it is being removed.  Raises: NotFound."""

    @abstractmethod
    async def find(self, project: str, name: str) -> VolumeInfo:
        """Raises: NotFound."""

    @abstractmethod
    async def all(self, project: str | None = None) -> tuple[VolumeInfo, ...]:
        """Those of one project, or of all, by project and name."""


def check_many(infos: Sequence[SandboxInfo], drafts: Sequence[Draft]) -> None:
    """Of :meth:`Sandboxes.add_many`.  Raises: TooLarge, BadRequest."""
    if len(infos) > MOST_AT_ONCE:
        raise TooLarge(
            f"{len(infos)} sandboxes at once, the bound is {MOST_AT_ONCE}", hint="add them in parts"
        )
    if len(infos) != len(drafts):
        raise BadRequest(f"{len(infos)} sandboxes with {len(drafts)} drafts")
