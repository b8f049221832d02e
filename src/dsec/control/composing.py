"""From what a template says and was made of to what is kept of it; the same for one that is built, promoted or imported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dsec.control.template_store import digest_of
from dsec.errors import Unsupported
from dsec.model.built import Built, Note
from dsec.model.sandbox import SandboxSpec
from dsec.model.snapshots import SnapshotInfo
from dsec.model.template import Template
from dsec.templates.dump import digest as blueprint_of
from dsec.templates.enforcement import unenforced
from dsec.templates.faults import Place
from dsec.templates.versions import floating

_NO_PLACES: Final[Mapping[str, Place]] = MappingProxyType({})


def known_base(snapshot: SnapshotInfo) -> SandboxSpec:
    """Of its sandbox.  Raises: Unsupported: it was taken before sandboxes recorded what their files lie over."""
    if not snapshot.spec.base_digest:
        raise Unsupported(
            f"snapshot {snapshot.id}: it is not known what its files lie over",
            hint="make a sandbox of it, and a snapshot of that",
        )
    return snapshot.spec


def floats(template: Template, places: Mapping[str, Place] = _NO_PLACES) -> tuple[Note, ...]:
    """Dependencies whose version is not pinned; ``places``: of the document that the template was read from."""
    return tuple(
        Note(field=each.field, line=each.place.line, text=each.requirement, why=each.why)
        for each in floating(template, places)
    )


def composed(
    template: Template,
    *,
    base: str,
    base_digest: str,
    layers: tuple[str, ...],
    lock: str,
    packages: tuple[str, ...] = (),
    origin: str = "",
    places: Mapping[str, Place] = _NO_PLACES,
) -> Built:
    """What was built of a template, its digest and its notes computed here. Arguments: see :class:`~dsec.model.built.Built`."""
    blueprint = blueprint_of(template)
    declared = tuple(
        Note(field=each.field, line=each.place.line, text=str(each.value), why=each.why)
        for each in unenforced(template, places)
    )
    return Built(
        digest=digest_of(blueprint, base_digest, layers, lock),
        blueprint=blueprint,
        template=template,
        base=base,
        base_digest=base_digest,
        layers=layers,
        lock=lock,
        packages=packages,
        origin=origin,
        unenforced=declared,
        floating=floats(template, places),
        built_at=time.time(),
    )
