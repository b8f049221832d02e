"""Keys and projects: who may come in, as what, and how much they may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from dsec.errors import Unsupported
from dsec.model.ids import KeyId, SandboxId
from dsec.model.tenants import Coinage, KeyInfo, NewKey, ProjectInfo, Quota, Scope


class TenantService(ABC):
    """Everything about keys is recorded in the journal's chain ``engine``, with who did it.

    Every method raises:
        Denied: this is not for whoever asks.
        StorageFull: nothing was changed. StoreDamaged, RuntimeUnavailable, Busy: the control database.
    """

    @abstractmethod
    async def create_key(
        self,
        scope: Scope,
        *,
        project: str,
        label: str = "",
        ttl: float = 0.0,
        coinage: Coinage = Coinage.DSEC,
    ) -> NewKey:
        """A new key, which is shown this once; its project is made where it is not there.

        Args:
            scope: ``admin`` or ``developer``; that of a sandbox is made by :meth:`token`. ttl: seconds for which it is good, 0 = until it is revoked.

        Raises: BadRequest.
        """

    @abstractmethod
    async def keys(self, project: str = "", *, after: str = "", limit: int = 1000) -> tuple[KeyInfo, ...]:
        """Those of one project or of all, revoked and expired ones of the last month included, without tokens of sandboxes; by id, those after ``after``."""

    @abstractmethod
    async def revoke_key(self, key: KeyId) -> KeyInfo:
        """It is no good from now on. Twice is no error.  Raises: NotFound."""

    @abstractmethod
    async def token(self, sandbox: SandboxId, *, ttl: float = 0.0) -> NewKey:
        """A key for acts in one sandbox, which ends with it.  Raises: NotFound: there is no such sandbox. Conflict: it has as many as it may have."""

    @abstractmethod
    async def projects(self) -> tuple[ProjectInfo, ...]:
        """All, by name."""

    @abstractmethod
    async def project(self, name: str) -> ProjectInfo:
        """Raises: NotFound, BadRequest."""

    @abstractmethod
    async def set_quota(self, name: str, quota: Quota) -> ProjectInfo:
        """What a project may have from now on; it is made where it is not there. What it has beyond that it keeps.  Raises: BadRequest."""


class NoTenants(TenantService):
    """Of an engine that only its owner can reach."""

    async def create_key(
        self,
        scope: Scope,
        *,
        project: str,
        label: str = "",
        ttl: float = 0.0,
        coinage: Coinage = Coinage.DSEC,
    ) -> NewKey:
        raise _none()

    async def keys(self, project: str = "", *, after: str = "", limit: int = 1000) -> tuple[KeyInfo, ...]:
        raise _none()

    async def revoke_key(self, key: KeyId) -> KeyInfo:
        raise _none()

    async def token(self, sandbox: SandboxId, *, ttl: float = 0.0) -> NewKey:
        raise _none()

    async def projects(self) -> tuple[ProjectInfo, ...]:
        raise _none()

    async def project(self, name: str) -> ProjectInfo:
        raise _none()

    async def set_quota(self, name: str, quota: Quota) -> ProjectInfo:
        raise _none()


def _none() -> Unsupported:
    return Unsupported(
        "this engine has no keys and no projects: nobody but its owner reaches it",
        hint="`dsec serve` has them",
    )


class KeyRecords(ABC):
    """Which keys and projects there are. A key is known by its SHA-256 alone. Raises: StorageFull, StoreDamaged, RuntimeUnavailable, Busy."""

    @abstractmethod
    async def find(self, digest: bytes) -> KeyInfo | None:
        """The one with that digest, however good it still is."""

    @abstractmethod
    async def get(self, key: KeyId) -> KeyInfo | None:
        """The one of that id, likewise."""

    @abstractmethod
    async def add(self, info: KeyInfo, digest: bytes) -> None:
        """Raises: Conflict: there are too many."""

    @abstractmethod
    async def page(self, project: str, *, after: str, limit: int) -> tuple[KeyInfo, ...]:
        """By id, those after ``after``, without tokens of sandboxes; ``project`` "" = of all."""

    @abstractmethod
    async def revoke(self, key: KeyId, at: float) -> KeyInfo | None:
        """As it is afterwards; None: there is none."""

    @abstractmethod
    async def used(self, used: Mapping[KeyId, float]) -> frozenset[KeyId]:
        """Record when keys were used last, seconds since the epoch; those of them that are no good any more."""

    @abstractmethod
    async def with_tokens(self, after: str, limit: int) -> tuple[SandboxId, ...]:
        """Sandboxes that have tokens, by id, those after ``after``."""

    @abstractmethod
    async def drop(self, *, before: float = 0.0, sandboxes: Sequence[SandboxId] = ()) -> int:
        """Forget keys that were no good any more ``before``, and all tokens of these sandboxes; how many there were."""

    @abstractmethod
    async def projects(self) -> tuple[ProjectInfo, ...]:
        """All, by name."""

    @abstractmethod
    async def put_project(self, info: ProjectInfo) -> ProjectInfo:
        """Set its quota, whether or not it is there; as it is afterwards.  Raises: Conflict: there are too many."""


class Cursors(ABC):
    """How far readers of the journal have come, by their names."""

    @abstractmethod
    async def position(self, name: str) -> int:
        """0 = it has read nothing yet.  Raises: StoreDamaged, RuntimeUnavailable."""

    @abstractmethod
    async def advance(self, name: str, position: int) -> None:
        """Durable when this returns; a position behind the known one changes nothing.  Raises: StorageFull, StoreDamaged, RuntimeUnavailable."""
