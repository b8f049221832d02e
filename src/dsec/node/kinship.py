"""Which sandboxes a snapshot's files can be of, and what a child of a sandbox is."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from dsec.errors import Conflict
from dsec.model.sandbox import RESERVED, Level, SandboxInfo, SandboxSpec
from dsec.model.snapshots import SnapshotInfo

FORK_LABEL: Final = "dsec.fork-of"


def check_same(snapshot: SnapshotInfo, spec: SandboxSpec) -> None:
    """Raises: Conflict: the snapshot's files mean nothing over another base."""
    if _beneath(snapshot.spec) != _beneath(spec):
        raise Conflict(
            f"snapshot {snapshot.id} is of level {snapshot.spec.level} and base {_told(snapshot.spec)}, "
            f"not of {spec.level} and {_told(spec)}",
            hint="use it with what it was taken of",
            snapshot=snapshot.id,
        )


def _beneath(spec: SandboxSpec) -> tuple[Level, str, tuple[str, ...]]:
    """What the files of a writable layer are changes to."""
    return spec.level, spec.base_digest or spec.base, spec.layers


def _told(spec: SandboxSpec) -> str:
    return f"{spec.base!r} ({spec.base_digest})" if spec.base_digest else repr(spec.base)


def child_of(parent: SandboxInfo) -> SandboxSpec:
    """As its parent; what of the host both see, neither child nor sibling changes."""
    own = {name: value for name, value in parent.spec.labels.items() if not name.startswith(RESERVED)}
    return replace(
        parent.spec,
        volumes=tuple(replace(volume, read_only=True) for volume in parent.spec.volumes),
        labels=MappingProxyType({**own, FORK_LABEL: parent.id}),
    )
