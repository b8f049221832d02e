"""Who asks: principals, what they may do, and how much."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dsec.model.ids import SandboxId
from dsec.model.volumes import DEFAULT_PROJECT

LOCAL: Final = "local"


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
        cpu_millis, memory_mib: of running ones together, as their limits say. disk_mib: of all writable layers and volumes, as their limits say.
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
