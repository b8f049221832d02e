"""Which dependencies of a template are not what they were tomorrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from dsec.model.template import Template
from dsec.templates.faults import NOWHERE, Place, Places

_NO_PLACES: Final[Mapping[str, Place]] = MappingProxyType({})
_EXACT: Final = ("==", "===")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floating:
    """A dependency whose version may be another one when it is installed again.

    Attributes:
        field: its path. requirement: as it is written. place: where it is written, ``NOWHERE`` for a template made in Python.
        why: what floats.
    """

    field: str
    requirement: str
    place: Place
    why: str


def floating(template: Template, places: Places = _NO_PLACES) -> tuple[Floating, ...]:
    """The dependencies that float, in their order; ``places`` are those of the document that the template was read from.

    Only ``==`` (or ``===``) without a wildcard is fixed, and a URL only with the digest of what it names.
    """
    return tuple(_floating(template, places))


def _floating(template: Template, places: Places) -> Iterator[Floating]:
    for index, text in enumerate(template.runtime.dependencies):
        why = _why(Requirement(text))
        if why:
            field = f"runtime.dependencies[{index}]"
            yield Floating(field=field, requirement=text, place=places.get(field, NOWHERE), why=why)


def _why(requirement: Requirement) -> str:
    if requirement.url is not None:
        fragment = urlsplit(requirement.url).fragment
        return "" if "sha256=" in fragment else "the URL has no #sha256=, so what it names may change"
    if not requirement.specifier:
        return "no version is given"
    wildcard = False
    for each in requirement.specifier:
        if each.operator in _EXACT:
            if not each.version.endswith(".*"):
                return ""
            wildcard = True
    return "the version has a wildcard" if wildcard else f"{requirement.specifier} admits several versions"
