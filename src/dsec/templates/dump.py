"""The canonical form of a template: every field written out, defaults and state isolation included (but for defaults of fields that came later). Its digest identifies the blueprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import yaml

from dsec.model.sandbox import Hibernate, Volume
from dsec.model.template import Resources, Template

LATER: Final = {("isolation", "hibernate"): Hibernate.AUTO.value}
"""Fields that came later, with their defaults, which are not written: templates that were built before keep their digests."""


def canonical(template: Template) -> dict[str, Any]:
    """The whole template as mappings, lists, text, numbers and truth values; equal templates give equal forms."""
    form = _whole(template)
    for (part, field), usual in LATER.items():
        if form[part][field] == usual:
            del form[part][field]
    return form


def _whole(template: Template) -> dict[str, Any]:
    form = _plain(template)
    assert isinstance(form, dict)
    return form


def canonical_json(template: Template) -> bytes:
    """What the digest is over: keys sorted, no white space, UTF-8."""
    text = json.dumps(
        canonical(template), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def digest(template: Template) -> str:
    """``sha256:`` and 64 hexadecimal digits. Spelling, comments and the order of fields do not count; the order of items does."""
    return f"sha256:{hashlib.sha256(canonical_json(template)).hexdigest()}"


def to_yaml(template: Template) -> str:
    """The canonical form as a document that reads as an equal template; fields in the order of the model."""
    return yaml.dump(canonical(template), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Dumper(yaml.SafeDumper):
    """Writes scripts as they are, and text that PyYAML would change with escapes."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Between single quotes PyYAML writes other ends of a line than \n as they are, and reads them as a space or as \n.
    if any(end in text for end in "\r\x85\u2028\u2029"):
        style = '"'
    else:
        style = "|" if "\n" in text.rstrip("\n") else ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style or None)


_Dumper.add_representer(str, _text)


def leaves(template: Template) -> dict[str, Any]:
    """Every field by its path, such as ``runtime.base``; a list or the variables are one field. In the order of the model."""
    found: dict[str, Any] = {}
    for name, value in _whole(template).items():
        if isinstance(value, dict):
            found.update({f"{name}.{field}": item for field, item in value.items()})
        else:
            found[name] = value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Volume) and value.name:
        return {"name": value.name, "target": value.target, "read_only": value.read_only}
    if isinstance(value, Resources):  # beside each other, as they are written
        return {"profile": value.profile.value, **_plain(value.limits)}
    if is_dataclass(value):
        hints = get_type_hints(type(value), include_extras=True)
        return {name: _number(hint, getattr(value, name)) for name, hint in hints.items()}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))
    return value


def _number(hint: Any, value: Any) -> Any:
    """600 and 600.0 are equal, and so are 0.0 and -0.0: each has one form."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return float(value) + 0.0 if bare is float else _plain(value)
