"""Names of fields: their paths, and which one was meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, Final, get_type_hints

from dsec.model.checks import shown
from dsec.model.sandbox import Limits
from dsec.model.template import Resources, Template

_LONGEST_NAME: Final = 100  # characters of a field's name in a message


def path_of(field: str, name: str) -> str:
    """The path of a field. Names are whatever a document says: long and unprintable ones are shown as such."""
    name = name if len(name) <= _LONGEST_NAME and name.isprintable() else shown(name[:_LONGEST_NAME])
    return f"{field}.{name}" if field else name


def suggestion(name: str, field: str, hints: Mapping[str, Any]) -> str:
    """The known field that was most likely meant: one of here, or one of that name elsewhere."""
    if name == "<<":
        return "write the fields out: nothing is merged"
    if near := get_close_matches(name[:64], hints, n=1):
        return f"did you mean {near[0]}?"
    sections = {"": Template, **{k: v for k, v in get_type_hints(Template).items() if is_dataclass(v)}}
    for section, cls in sections.items():
        known = {"profile", *get_type_hints(Limits)} if cls is Resources else set(get_type_hints(cls))
        if section != field and name in known:
            return (
                f"did you mean {section}.{name}?" if section else f"did you mean {name}, outside of {field}?"
            )
    return f"known here: {', '.join(hints)}"
