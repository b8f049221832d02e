"""Requirements as a template states them (PEP 508), checked once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement

from dsec.errors import BadRequest
from dsec.model.checks import shown

_MOST: Final = 1000
_LONGEST: Final = 2000  # characters of one
_ARCHIVES: Final = (
    *(".whl", ".zip", ".tar", ".tgz", ".tbz", ".txz", ".tlz"),
    *(".tar.gz", ".tar.bz2", ".tar.xz", ".tar.lz", ".tar.lzma"),
)


def parse(requirements: Iterable[str]) -> tuple[Requirement, ...]:
    """The requirements in canonical order, each once.

    Raises:
        BadRequest: not a requirement, or one that names a URL; the message quotes it.
    """
    if isinstance(requirements, str):
        raise BadRequest(
            "requirements: one str, where a list of them belongs", hint='["redis>=5"]', field="requirements"
        )
    texts = list(requirements)
    if len(texts) > _MOST:
        raise BadRequest(f"requirements: {len(texts)}, and {_MOST} are the most", field="requirements")
    found = {str(each): each for each in map(_parse_one, texts)}
    return tuple(found[text] for text in sorted(found))


def floating(requirements: Iterable[str], *, strict: bool = False) -> tuple[str, ...]:
    """The requirements that a later day may answer with another version: all that are not ``== version`` exactly.

    Args:
        strict: refuse them.

    Raises:
        BadRequest: not a requirement; or, when ``strict``, one that floats: the message names them all.
    """
    found = tuple(str(each) for each in parse(requirements) if not pinned(each))
    if strict and found:
        raise BadRequest(
            f"requirements: not pinned exactly: {', '.join(found)[:1000]}",
            hint="pin each with `==` and a version, or use the lock",
            field="requirements",
            floating=list(found),
        )
    return found


def pinned(requirement: Requirement) -> bool:
    """Whether one version only can satisfy it."""
    exact = [each for each in requirement.specifier if each.operator in ("==", "===")]
    return any(not each.version.endswith(".*") for each in exact)


def applies(requirement: Requirement, markers: Mapping[str, str], extras: Iterable[str] = ()) -> bool:
    """Whether it is meant for the Python with these markers, when these extras of its owner are wanted.

    Raises: BadRequest: the marker compares what cannot be compared.
    """
    if requirement.marker is None:
        return True
    try:
        return any(
            requirement.marker.evaluate({**markers, "extra": extra}) for extra in (set(extras) or {""})
        )
    except (UndefinedComparison, UndefinedEnvironmentName, ValueError) as exc:
        raise BadRequest(
            f"requirement {shown(str(requirement))}: its marker means nothing: {exc}",
            field="requirements",
        ) from exc


def _parse_one(text: object) -> Requirement:
    if not isinstance(text, str) or len(text) > _LONGEST or not text.isprintable():
        raise BadRequest(
            f"requirement {shown(text)} is not one line of at most {_LONGEST} characters",
            field="requirements",
        )
    try:
        requirement = Requirement(text)
    except InvalidRequirement as exc:
        raise BadRequest(
            f"requirement {shown(text)} cannot be read: {str(exc).splitlines()[0]}",
            hint="name, name>=1.0, name[extra]==1.0, name; python_version < '3.12'",
            field="requirements",
        ) from exc
    if requirement.name.lower().endswith(_ARCHIVES):
        raise BadRequest(
            f"requirement {shown(text)}: pip takes that for the name of a file",
            hint="name the package, not its file",
            field="requirements",
        )
    if requirement.url is not None:
        # A URL may carry a password, and what lies behind it may be anything tomorrow.
        raise BadRequest(
            f"requirement {requirement.name!r} names a URL: only packages of an index can be locked",
            hint="name it with its version; wheels of your own are found through find-links",
            field="requirements",
        )
    return requirement
