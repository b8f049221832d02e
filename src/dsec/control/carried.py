"""What a file says of the sandbox that a snapshot in it was taken of. It is a format of its own: what the journal keeps may change without it.

Said is what means something elsewhere: not paths of the host, volumes, templates by reference, marks of the engine, or for how long it was to
live. Whoever reads passes over what a newer release says beside that.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from dsec.errors import BadRequest
from dsec.model.sandbox import RESERVED, WORKSPACE, Level, Limits, SandboxSpec
from dsec.model.template import Runtime

_PLAIN: Final = ("base", "base_digest", "workdir", "user", "read_only")
_LIMITS: Final = tuple(Limits.__dataclass_fields__)


def facts_of(spec: SandboxSpec) -> dict[str, Any]:
    """As JSON has it."""
    return {
        **{name: getattr(spec, name) for name in _PLAIN},
        "level": spec.level.value,
        "layers": list(spec.layers),
        "limits": {name: getattr(spec.limits, name) for name in _LIMITS},
        "env": dict(spec.env),
        "labels": _own(spec.labels),
    }


def spec_of(facts: Mapping[str, Any]) -> SandboxSpec:
    """Back. Digests and the name of the base are not looked at.  Raises: BadRequest, and what Python raises of values that are none."""
    limits, env, labels = dict(facts["limits"].items()), dict(facts["env"].items()), _own(facts["labels"])
    plain = {name: facts[name] for name in _PLAIN}
    if not all(isinstance(each, str) for each in (*labels, *labels.values())):
        raise BadRequest("labels: one of them is no text")
    spec = SandboxSpec(
        level=Level(facts["level"]),
        layers=tuple(facts["layers"]),
        limits=Limits(**{name: limits[name] for name in _LIMITS if name in limits}),
        env=MappingProxyType(env),
        labels=MappingProxyType(labels),
        **plain,
    )
    Runtime(  # for its checks
        base=spec.base,
        level=spec.level,
        env=spec.env,
        user=spec.user or "user",
        workdir=spec.workdir or WORKSPACE,
    )
    return spec


def _own(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if not name.startswith(RESERVED)}
