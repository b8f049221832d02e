"""What of a template is enforced today, and what is only declared: data for whoever builds one or shows one.

A field that is declared is checked, kept and part of the digest; nothing makes a sandbox keep to it. It is never dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from dsec.model.template import Template
from dsec.templates.dump import leaves
from dsec.templates.faults import NOWHERE, Place, Places

_NO_PLACES: Final[Mapping[str, Place]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a field is enforced. ``why``: by what, or why not."""

    enforced: bool
    why: str


def _enforced(why: str) -> Standing:
    return Standing(True, why)


def _declared(why: str) -> Standing:
    return Standing(False, why)


_NO_TOOLS: Final = "there are no tools yet that an agent could call"
_NO_MEMORY: Final = "there are no stores of memory yet"
_NO_BUDGET: Final = "acts of an agent are not counted yet"
_LIMIT: Final = "the limits of a sandbox that is asked for without any"

STANDINGS: Final[Mapping[str, Standing]] = MappingProxyType(
    {
        "name": _enforced("names the blueprint"),
        "version": _enforced("names the blueprint"),
        "runtime.base": _enforced(
            "found or made when the template is built, and kept by its digest; one that cannot be had is refused"
        ),
        "runtime.level": _enforced(
            "the level unless another is asked for; one that cannot be had is refused"
        ),
        "runtime.dependencies": _enforced("locked when the template is built, and installed over the base"),
        "runtime.packages": _enforced(
            "installed by the base's apt-get when the template is built, in a sandbox without network: only what the base brings can be"
        ),
        "runtime.setup": _enforced("run when the template is built, as root of a sandbox without network"),
        "runtime.env": _enforced("variables of the sandbox, under those that are asked for"),
        "runtime.user": _enforced(
            "the user of commands that name none; refused where the level has no such user"
        ),
        "runtime.workdir": _enforced(
            "the directory of commands that name none; a build refuses one that the base does not have"
        ),
        "tools.allowed": _declared(_NO_TOOLS),
        "memory.type": _declared(_NO_MEMORY),
        "memory.short_term": _declared(_NO_MEMORY),
        "memory.long_term": _declared(_NO_MEMORY),
        "strategy.model": _declared("models are called by the agent, outside of the sandbox"),
        "strategy.max_steps": _declared(_NO_BUDGET),
        "strategy.max_seconds": _declared("a sandbox ends with its ttl, whatever the template says"),
        "strategy.max_cost_usd": _declared("what an agent costs is not known here yet"),
        "strategy.timezone": _enforced(
            "the variable TZ unless runtime.env sets it; a base without time zone data reads it as UTC"
        ),
        "resources.profile": _enforced("the limits that the others are given over"),
        "resources.cpu_millis": _enforced(_LIMIT),
        "resources.memory_mib": _enforced(_LIMIT),
        "resources.pids": _enforced(_LIMIT),
        "resources.disk_mib": _enforced(_LIMIT),
        "resources.open_files": _enforced(_LIMIT),
        "resources.output_bytes": _enforced(_LIMIT),
        "volumes": _enforced(
            "volumes of the sandbox, but for targets that are asked for beside it; a missing name is refused, and so is a path of the host unless "
            "the operator allows it"
        ),
        "network.allow": _declared(
            "a sandbox reaches nothing but its own loopback, not even what is allowed"
        ),
        "isolation.workdir": _enforced("every sandbox begins with one of its own"),
        "isolation.tmp": _enforced("every sandbox begins with one of its own"),
        "isolation.session_id": _enforced("every sandbox has a SESSION_ID of its own"),
        "isolation.volumes": _enforced("a template with a writable volume is refused unless it says shared"),
        "isolation.scratch_exec": _declared(
            "a command runs in a throw-away copy when it asks for that itself"
        ),
        "isolation.hibernate": _enforced(
            "read where the engine puts to rest what nobody uses; a level that keeps no files without a sandbox freezes it at most"
        ),
        "skills": _declared("there are no skills yet"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Something that a template says and nothing enforces.

    Attributes:
        field: its path. value: what it says, in the canonical form. why: it is not enforced.
        place: where it is written, ``NOWHERE`` for a template made in Python.
    """

    field: str
    value: Any
    why: str
    place: Place


def unenforced(template: Template, places: Places = _NO_PLACES) -> tuple[Declared, ...]:
    """What a template declares and nothing enforces today, in the order of the model.

    Declared is what differs from the default, and what was written although it is the default; the latter needs the ``places`` of the
    document that the template was read from.
    """
    defaults = leaves(Template(name=template.name, version=template.version))
    return tuple(
        Declared(field=field, value=value, why=STANDINGS[field].why, place=places.get(field, NOWHERE))
        for field, value in leaves(template).items()
        if not STANDINGS[field].enforced and (value != defaults[field] or field in places)
    )
