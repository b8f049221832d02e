"""Back from the canonical form of a template, as it is kept.

This is not :func:`dsec.templates.document.parse`: JSON is not quite YAML (it writes some characters as pairs of surrogates, and others as they
are that YAML must escape), and what was accepted once is read again whatever the bounds of documents are today.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from dsec.errors import BadRequest
from dsec.model.sandbox import Limits, Volume
from dsec.model.template import Resources, Template


def restore(form: Mapping[str, Any]) -> Template:
    """The template whose :func:`~dsec.templates.dump.canonical` form this is, or was before fields were added: those have their defaults.

    Raises:
        BadRequest: it is no such form.
    """
    try:
        restored = _restored(Template, form)
    except BadRequest:
        raise
    except (TypeError, KeyError, ValueError, AttributeError) as exc:
        raise BadRequest(
            f"template: not the canonical form of one: {type(exc).__name__}: {str(exc)[:200]}",
            hint="read documents with dsec.templates.document",
        ) from None
    assert isinstance(restored, Template)
    return restored


def _restored(hint: Any, value: Any) -> Any:
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if bare is Resources:
        limits = {name: item for name, item in value.items() if name != "profile"}
        profile = get_type_hints(Resources)["profile"](value["profile"])
        return Resources(profile=profile, limits=Limits(**limits))
    if bare is Volume:
        form = dict(value)
        source = form.pop("name") if "name" in form else Path(form.pop("source"))
        return Volume(source, **form)
    if is_dataclass(bare):
        assert isinstance(bare, type)
        hints = get_type_hints(bare, include_extras=True)
        return bare(**{name: _restored(hints[name], item) for name, item in value.items()})
    if get_origin(bare) is tuple:
        return tuple(_restored(get_args(bare)[0], item) for item in _listed(value))
    if isinstance(bare, type) and issubclass(bare, StrEnum | Path):
        return bare(value)
    return value


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):  # the characters of a text are no list
        raise TypeError(f"{type(value).__name__} is not a list")
    return value
