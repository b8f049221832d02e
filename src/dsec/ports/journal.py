"""The journal and the table of sandboxes: one database, one writer, one transaction for a state change and its record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsec.model.ids import ExecId, SandboxId
from dsec.model.journal import Draft, Finding, Json, Record
from dsec.model.sandbox import SandboxInfo, State


class Journal(ABC):
    """Append-only, hash-chained per ``chain``, durable when ``append`` returns.

    Every method raises:
        StorageFull: nothing was stored.
        StoreDamaged: the database is not one of ours or is broken.
    """

    @abstractmethod
    async def append(self, *drafts: Draft) -> tuple[Record, ...]:
        """Store all or none."""

    @abstractmethod
    async def read(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        """Records of one chain in order, ``seq`` greater than ``after``."""

    @abstractmethod
    async def verify(self) -> tuple[Finding, ...]:
        """Every chain against its digests and its signed checkpoints; empty = sound. Names the first bad record of each bad chain, and cut tails."""


class Sandboxes(ABC):
    """The recorded state of every sandbox of this engine. Raises as :class:`Journal`."""

    @abstractmethod
    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        """Record a new sandbox together with its intent.  Raises: Conflict: the id exists."""

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
        """All, or those in these states, oldest first."""

    @abstractmethod
    async def prune(self, keep: int = 10_000) -> int:
        """Drop the longest ended of the gone and failed, gone ones first, until ``keep`` are left; how many were dropped. Their records stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExec:
    """One exec as the journal knows it: how it began and, once that is known, how it ended.

    Attributes:
        argv: as far as it was recorded; ``intent.payload`` says when it was cut.
        result: None while it is open.
    """

    id: ExecId
    argv: tuple[str, ...]
    intent: Record
    result: Record | None = None


class Execs(ABC):
    """Execs of every sandbox, kept as records with act ``exec`` and the exec id as ``ref``. Raises as :class:`Journal`."""

    @abstractmethod
    async def exec_started(
        self,
        sandbox: SandboxId,
        exec_id: ExecId,
        argv: Sequence[str],
        *,
        actor: str = "local",
        details: Mapping[str, Json] | None = None,
    ) -> Record:
        """Record the intent. Undecodable bytes of ``argv`` are surrogate escapes; over 16 KiB only its head, size and digest are kept.

        Raises:
            Conflict: this exec id was used in this sandbox before.
            TooLarge: ``details`` are too large.
        """

    @abstractmethod
    async def exec_ended(
        self, sandbox: SandboxId, exec_id: ExecId, outcome: Mapping[str, Json], *, actor: str = "local"
    ) -> Record:
        """Record the result.

        Raises:
            NotFound: it was never started.
            Conflict: its result is recorded already.
        """

    @abstractmethod
    async def get_exec(self, sandbox: SandboxId, exec_id: ExecId) -> StoredExec:
        """Raises: NotFound."""

    @abstractmethod
    async def open_execs(self, sandbox: SandboxId) -> tuple[StoredExec, ...]:
        """Those with an intent and no result, oldest first."""
