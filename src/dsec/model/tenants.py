"""Who asks: principals, what they may do, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar

from dsec.errors import BadRequest
from dsec.model.actors import LOCAL
from dsec.model.checks import check_count, shown
from dsec.model.ids import KeyId, SandboxId
from dsec.model.volumes import DEFAULT_PROJECT

E = TypeVar("E", bound=StrEnum)

KEY_MARKS: Final = ("dsec", "dst", "e2b")
"""With which keys begin, an underscore behind it: ``dst`` those of one sandbox."""
MOST_OF_QUOTA: Final = 2**53
MOST_RATE: Final = 1e6


class Scope(StrEnum):
    """What a key is good for; each includes those below it."""

    ADMIN = "admin"  # everything of every project: keys, quotas, images, metrics, the journal
    DEVELOPER = "developer"  # everything within one project
    SANDBOX = "sandbox"  # acts in one sandbox, and ends with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who acts.

    Attributes:
        id: of the key, or ``local`` for the owner of the engine on its own machine; journal records name it as actor.
        scope: what it may do. project: within which project; an admin's is the one that is meant when none is named.
        sandbox: the only one that a sandbox-scoped token reaches, else "".
    """

    id: str
    scope: Scope
    project: str = DEFAULT_PROJECT
    sandbox: SandboxId | None = None


OWNER: Final = Principal(id=LOCAL, scope=Scope.ADMIN)
"""Whoever owns the state directory: the embedded SDK, and the unix socket's own user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one project may have at once. 0 = no bound of its own.

    Attributes:
        sandboxes: running, paused and being made. dormant: hibernated and cold ones.
        cpu_millis, memory_mib: of running ones together, as their limits say. disk_mib: of all writable layers, snapshots and volumes,
            as their limits say.
        journal_mib: payload of its records. rate: requests a second, burst of twice that.
        share: its weight when creations wait, 1 as a rule.
    """

    sandboxes: int = 0
    dormant: int = 0
    cpu_millis: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    journal_mib: int = 0
    rate: float = 0.0
    share: int = 1

    def __post_init__(self) -> None:
        for name in ("sandboxes", "dormant", "cpu_millis", "memory_mib", "disk_mib", "journal_mib"):
            check_count(f"quota.{name}", getattr(self, name), 0, MOST_OF_QUOTA)
        rate: object = self.rate
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= MOST_RATE:
            raise BadRequest(
                f"quota.rate: {shown(rate)} is not a number of requests a second from 0 to {MOST_RATE:g}",
                field="quota.rate",
            )
        check_count("quota.share", self.share, 1, 1000)


class Coinage(StrEnum):
    """How a key is written."""

    DSEC = "dsec"  # dsec_ and 43 of A-Za-z0-9
    E2B = "e2b"  # e2b_ and 40 hexadecimal digits: what SDKs of that maker take for a key


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """What is known of a key; the key itself is known to nobody but whom it was shown to. Times are seconds since the epoch, 0 = never.

    Attributes:
        id: ``ky-…``; journal records name it as actor. scope: what it may do. project: within which project. label: its maker's own words.
        created_at: when it was made. used_at: when it was last let in, to the minute. expires_at: from when on it is no good. revoked_at: when it was revoked.
        sandbox: the one that a sandbox-scoped token is bound to, else None.
    """

    id: KeyId
    scope: Scope
    project: str = DEFAULT_PROJECT
    label: str = ""
    created_at: float = 0.0
    used_at: float = 0.0
    expires_at: float = 0.0
    revoked_at: float = 0.0
    sandbox: SandboxId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key that was just made.

    Attributes:
        key: the key itself, shown this once. info: what is kept of it.
    """

    key: str = field(repr=False)
    info: KeyInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectInfo:
    """A project.

    Attributes:
        name: of the project. quota: what it may have. created_at: when it was made, 0 = with the server.
    """

    name: str
    quota: Quota = Quota()
    created_at: float = 0.0


def scope_of(text: object) -> Scope:
    """Raises: BadRequest."""
    return _chosen(Scope, "scope", text)


def coinage_of(text: object) -> Coinage:
    """Raises: BadRequest."""
    return _chosen(Coinage, "coinage", text)


def _chosen(kind: type[E], field: str, text: object) -> E:
    try:
        return kind(str(text) if isinstance(text, str) else "")
    except ValueError:
        have = ", ".join(kind)
        raise BadRequest(
            f"{field}: there is no {field} {shown(text)}", hint=f"choose one of {have}", field=field
        ) from None
