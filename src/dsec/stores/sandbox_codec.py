"""Sandboxes as rows: the specification is JSON, the rest has columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from dsec.errors import BadRequest, DsecError, StoreDamaged, TooLarge
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Flag, Hibernate, Level, Limits, SandboxInfo, SandboxSpec, State, Volume
from dsec.stores.chain import canonical

MAX_SPEC: Final = 2**18  # more than the variables that any command can be given
MAX_REASON: Final = 4096
_LIMITS: Final = tuple(Limits.__dataclass_fields__)
_limits_of: Final = attrgetter(*_LIMITS)

Row = tuple[str, str, float, float, str, float, str, bytes, str, float, str, str]
"""Name, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, spec."""


def spec_to_json(spec: SandboxSpec) -> str:
    """Every field of a specification, as ASCII JSON.  Raises: TooLarge: over 256 KiB."""
    limits = spec.limits
    value = {
        "level": spec.level.value,
        "base": spec.base,
        "base_digest": spec.base_digest,
        "template": spec.template,
        "layers": list(spec.layers),
        "workdir": spec.workdir,
        "user": spec.user,
        "hostname": spec.hostname,
        "limits": dict(zip(_LIMITS, _limits_of(limits), strict=True)),
        "ttl": spec.ttl,
        "idle": spec.idle,
        "read_only": spec.read_only,
        "env": dict(spec.env),
        "volumes": [[str(volume.source), volume.target, volume.read_only] for volume in spec.volumes],
        "labels": dict(spec.labels),
        "project": spec.project,
        "lent": list(spec.lent),
        "hibernate": spec.hibernate.value,
    }
    text = canonical(value)
    if len(text) > MAX_SPEC:
        raise TooLarge(
            f"spec: {len(text)} bytes of JSON, the bound is {MAX_SPEC}", hint="make env and labels smaller"
        )
    return text


def spec_from_json(text: str) -> SandboxSpec:
    """Raises: StoreDamaged: it is not a specification."""
    try:
        value = json.loads(text)
        return SandboxSpec(
            level=Level(value.pop("level")),
            limits=Limits(**value.pop("limits")),
            layers=tuple(value.pop("layers")),
            env=MappingProxyType(value.pop("env")),
            volumes=tuple(_volume(*volume) for volume in value.pop("volumes")),
            lent=tuple(value.pop("lent", ())),
            hibernate=Hibernate(value.pop("hibernate", Hibernate.AUTO)),
            labels=MappingProxyType(value.pop("labels")),
            **value,
        )
    except (ValueError, KeyError, TypeError, AttributeError, DsecError) as exc:
        raise StoreDamaged(f"a stored sandbox specification cannot be read: {exc}") from exc


def _volume(source: str, target: str, read_only: bool) -> Volume:
    """Paths are absolute, and no name begins with a slash."""
    return Volume(Path(source) if source.startswith("/") else source, target, read_only)


def to_row(info: SandboxInfo) -> Row:
    """Raises: BadRequest: a field cannot be stored. TooLarge."""
    return _row(info, flags=_flags(info), spec=spec_to_json(info.spec))


def to_rows(infos: Iterable[SandboxInfo]) -> list[Row]:
    """Of many; what they have in common is put into words once.  Raises: as :func:`to_row`."""
    rows: list[Row] = []
    before, flags, spec = None, "", ""
    for info in infos:
        if before is None or info.spec is not before.spec or info.flags is not before.flags:
            before, flags, spec = info, _flags(info), spec_to_json(info.spec)
        rows.append(_row(info, flags=flags, spec=spec))
    return rows


def _flags(info: SandboxInfo) -> str:
    return " ".join(sorted(info.flags))


def _row(info: SandboxInfo, *, flags: str, spec: str) -> Row:
    times = (info.ended_at, info.expires_at, info.created_at, info.created_boot)
    if not all(map(math.isfinite, times)):
        raise BadRequest(f"{info.id}: one of its times is none: {times}")
    return (
        info.id,
        info.state.value,
        float(info.ended_at),
        float(info.expires_at),
        clean_reason(info.reason),
        float(info.created_at),
        info.session_id,
        _encode_path(info.workdir),
        info.boot_id,
        float(info.created_boot),
        flags,
        spec,
    )


def from_row(row: tuple[Any, ...], decode: Callable[[str], SandboxSpec] = spec_from_json) -> SandboxInfo:
    """Raises: StoreDamaged: the row is not one of ours."""
    sandbox, state, ended, expires, reason, created, session, workdir, boot, boot_at, flags, spec = row
    try:
        return SandboxInfo(
            id=SandboxId(sandbox),
            state=State(state),
            spec=decode(spec),
            flags=frozenset(map(Flag, flags.split())),
            created_at=created,
            expires_at=expires,
            ended_at=ended,
            reason=reason,
            session_id=session,
            workdir=workdir.decode("utf-8", "surrogateescape"),
            boot_id=boot,
            created_boot=boot_at,
        )
    except (ValueError, TypeError, AttributeError) as exc:
        raise StoreDamaged(f"the stored row of sandbox {sandbox!r} cannot be read: {exc}") from exc


def changed(
    info: SandboxInfo, *, state: State, ended_at: float, expires_at: float, reason: str
) -> SandboxInfo:
    """The same sandbox with what can change of it. (``dataclasses.replace`` takes longer than the rest of a change.)"""
    return SandboxInfo(
        id=info.id,
        state=state,
        spec=info.spec,
        flags=info.flags,
        created_at=info.created_at,
        expires_at=expires_at,
        ended_at=ended_at,
        reason=reason,
        session_id=info.session_id,
        workdir=info.workdir,
        boot_id=info.boot_id,
        created_boot=info.created_boot,
    )


def clean_reason(reason: str) -> str:
    """Words for people: bounded, and always storable."""
    return reason[:MAX_REASON].replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _encode_path(path: str) -> bytes:
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise BadRequest(f"workdir: {path!r} is not a path") from exc


LIVE: Final = frozenset({"pending", "running", "paused", "stopping"})


def class_of(state: State) -> str:
    """What indexes see of a state: see schema.py."""
    return "live" if state.value in LIVE else state.value
