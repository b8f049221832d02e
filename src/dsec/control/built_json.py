"""A built template as JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from dsec.model.built import Built, Note
from dsec.templates.dump import canonical_json
from dsec.templates.restore import restore

_NOTES: Final = ("unenforced", "floating")


def to_json(built: Built) -> dict[str, Any]:
    """All of one, as JSON has it."""
    notes = {name: [asdict(note) for note in getattr(built, name)] for name in _NOTES}
    template = json.loads(canonical_json(built.template))
    plain = {each.name: getattr(built, each.name) for each in fields(built)}
    return {**plain, **notes, "template": template, "layers": list(built.layers)}


def from_json(value: Mapping[str, Any]) -> Built:
    """Back; its digest is not looked at.  Raises: BadRequest, and what Python raises of values that are none."""
    facts = dict(value)
    facts["template"] = restore(facts["template"])
    facts["layers"] = tuple(facts["layers"])
    facts["packages"] = tuple(facts.get("packages", ()))
    for name in _NOTES:
        facts[name] = tuple(Note(**note) for note in facts[name])
    return Built(**facts)
