"""What a volume is: files that outlive the sandboxes that use them, by name, within a project."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dsec.errors import BadRequest
from dsec.model.checks import check_count, shown
from dsec.model.ids import SandboxId, VolumeId

DEFAULT_PROJECT: Final = "default"
DEFAULT_SIZE_MIB: Final = 1024
MOST_VOLUMES: Final = 1000  # of one engine, in all its projects
SMALLEST_MIB: Final = 1
LARGEST_MIB: Final = 64 * 2**20
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_RULE: Final = "1 to 64 of a-z, 0-9 and, within, '.', '_' and '-'"


def check_volume_name(field: str, name: object) -> None:
    """Raises: BadRequest: not a name that a volume can have."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return
    path = isinstance(name, str) and ("/" in name or name.startswith("."))
    hint = "a path of this machine is a Path, or begins with / or ./ in SOURCE:TARGET" if path else _RULE
    raise BadRequest(f"{field}: {shown(name)} is not the name of a volume", hint=hint, field=field)


def check_project(field: str, project: object) -> None:
    """Raises: BadRequest: not a name that a project can have."""
    if not isinstance(project, str) or not _NAME.fullmatch(project):
        raise BadRequest(f"{field}: {shown(project)} is not the name of a project", hint=_RULE, field=field)


def check_size_mib(field: str, size: object) -> None:
    """Raises: BadRequest: not a number of MiB that a volume can be allowed."""
    check_count(field, size, SMALLEST_MIB, LARGEST_MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeInfo:
    """What is known of a volume.

    Attributes:
        id: of these files: a volume that is removed and made again has another. project: to which it belongs. name: unique in it.
        size_mib: what it may hold, metadata included, MiB. created_at: seconds since the epoch.
        used_bytes: what it holds now, -1 where nobody looked.
        writer: the sandbox that may write to it now, None = none. readers: those that see it read-only now.
    """

    id: VolumeId
    project: str
    name: str
    size_mib: int
    created_at: float
    used_bytes: int = -1
    writer: SandboxId | None = None
    readers: tuple[SandboxId, ...] = ()
