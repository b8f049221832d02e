"""Snapshots: what a sandbox was at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dsec.model.ids import SandboxId, SnapshotId
from dsec.model.sandbox import SandboxSpec

MOST_CHILDREN: Final = 1000
"""Of one fork."""


class SnapshotKind(StrEnum):
    """Parts of a sandbox that a snapshot can hold."""

    FILES = "files"  # its writable layer: every change to its files since it began


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """One snapshot, whole and durable.

    Attributes:
        id: its own. sandbox: whose files it holds; that one may be long gone. kind: what it holds.
        spec: of that sandbox; a sandbox made from the snapshot begins with its base and, unless told otherwise, its other values.
        created_at: seconds since the epoch.
        paused: seconds for which the sandbox stood still while it was taken; 0 when it was paused anyway.
    """

    id: SnapshotId
    sandbox: SandboxId
    kind: SnapshotKind
    spec: SandboxSpec
    created_at: float
    paused: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """What forking a sandbox made. ``paused``: seconds for which the parent stood still."""

    children: tuple[SandboxId, ...]
    paused: float
