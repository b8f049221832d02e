"""What sandbox a request means."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from dsec.client.requests import BASE, spec_of, volume_of
from dsec.errors import BadRequest, Denied
from dsec.model.built import Built
from dsec.model.checks import shown
from dsec.model.ids import SnapshotId, is_snapshot, parse_snapshot_id
from dsec.model.sandbox import RESERVED, Limits, SandboxSpec, Volume
from dsec.model.tenants import Principal, Scope
from dsec.model.volumes import DEFAULT_PROJECT
from dsec.ports.engine import Services
from dsec.server.shapes import CreateBody, LimitsBody, VolumeBody

REQUEST_LABEL: Final = f"{RESERVED}request"
"""Of a sandbox: the digest of the request that made it."""
_WITH_SPEC: Final = ("spec", "snapshot", "cold", "count")


async def meant(
    body: CreateBody, services: Services, caller: Principal, mark: str = ""
) -> tuple[SandboxSpec, SnapshotId | None]:
    """The specification, and the snapshot that its files begin as.

    Args:
        mark: of the request, kept as a label; "" = none.

    Raises:
        BadRequest, NotFound: the template or snapshot. Denied: another project.
    """
    if body.spec is None:
        spec, snapshot = await _described(body, services, caller)
    else:
        spec, snapshot = _given(body, body.spec)
        spec = replace(spec, project=_project(spec.project, caller))
    if mark:
        spec = replace(spec, labels={**spec.labels, REQUEST_LABEL: mark})
    return spec, snapshot


def _given(body: CreateBody, spec: SandboxSpec) -> tuple[SandboxSpec, SnapshotId | None]:
    """As the SDK sends it, which has resolved everything."""
    others = [
        name for name in body.__struct_fields__ if name not in _WITH_SPEC and getattr(body, name) is not None
    ]
    if others:
        raise BadRequest(
            f"{others[0]}: it cannot be given beside spec", hint="put it into spec", field=others[0]
        )
    _own_labels(spec)
    return spec, parse_snapshot_id(body.snapshot) if body.snapshot is not None else None


def _own_labels(spec: SandboxSpec) -> None:
    reserved = next((name for name in spec.labels if name.startswith(RESERVED)), None)
    if reserved is not None:
        raise BadRequest(f"labels: {shown(reserved)} begins with {RESERVED!r}, which is DSec's own")


async def _described(
    body: CreateBody, services: Services, caller: Principal
) -> tuple[SandboxSpec, SnapshotId | None]:
    """As people write it."""
    if body.snapshot is not None:
        raise BadRequest("snapshot: it goes with spec", hint="template may be the id of a snapshot")
    template = body.template or BASE
    snapshot = parse_snapshot_id(template) if is_snapshot(template) else None
    begun: SandboxSpec | Built | None = None
    if snapshot is not None:
        begun = (await services.snapshots.get(snapshot)).spec
    elif template != BASE:
        begun = await services.templates.find(template)
    before = spec_of(
        begun, level=None, limits=None, ttl=0, idle=0, read_only=False, env=None, volumes=(), labels=None
    )
    spec = spec_of(
        begun,
        level=body.level,
        limits=_limits(body.limits, before.limits),
        ttl=body.ttl or 0.0,
        idle=body.idle or 0.0,
        read_only=bool(body.read_only),
        env=body.env,
        volumes=[_volume(volume) for volume in body.volumes or ()],
        labels=body.labels,
        project=caller.project if body.project is None else _project(body.project, caller),
    )
    return spec, snapshot


def _limits(given: LimitsBody | None, before: Limits) -> Limits | None:
    if given is None:
        return None
    named = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
    return replace(before, **named)


def _volume(given: str | VolumeBody) -> Volume:
    """Raises: BadRequest. A path that is relative would be relative to the server, which no client can know."""
    source = given.partition(":")[0] if isinstance(given, str) else given.source
    if source.startswith("."):
        raise BadRequest(
            f"volumes: {shown(source)} is not an absolute path", hint="a name, or /path/on/the/server"
        )
    return volume_of(given) if isinstance(given, str) else Volume(given.source, given.target, given.read_only)


def _project(named: str, caller: Principal) -> str:
    """Raises: Denied: it is not the caller's."""
    if caller.scope is Scope.ADMIN or named == caller.project:
        return named
    if named == DEFAULT_PROJECT:
        return caller.project
    raise Denied(
        f"project: this key is of another project than {shown(named)}",
        hint="leave project out",
        field="project",
    )
