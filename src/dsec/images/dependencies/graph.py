"""Who needs whom, judged for the target alone: the proof that a resolver answered for that Python and no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dsec.errors import Unsupported
from dsec.images.dependencies.requirements import applies
from dsec.images.dependencies.wheel import Described

_OTHER: Final = (
    "another version of pip may do better; this is a fault of pip or of an index, not of the requirements"
)


def required_by(
    given: Iterable[Requirement], packages: Mapping[str, Described], markers: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Of every package, who asked for it, sorted.

    Args:
        given: what the template requires. packages: the answer, by normalised name. markers: of the target.

    Raises:
        Unsupported: something needed is missing or of a wrong version, or something is there that nobody needs.
    """
    reasons: dict[str, set[str]] = {name: set() for name in packages}
    extras: dict[str, set[str]] = {}
    pending: list[str] = []

    def need(requirement: Requirement, who: str) -> None:
        name = canonicalize_name(requirement.name)
        _satisfied(requirement, packages.get(name), who)
        reasons[name].add(f"{who}{requirement}")
        known = extras.get(name)
        wanted = {canonicalize_name(each) for each in requirement.extras}
        if known is None or not wanted <= known:
            extras[name] = (known or set()) | wanted
            pending.append(name)

    for requirement in given:
        if applies(requirement, markers):
            need(requirement, "")
    while pending:
        package = packages[pending.pop()]
        for requirement in package.requires:
            if applies(requirement, markers, {"", *extras[package.name]}):
                need(requirement, f"{package.name} {package.version}: ")
    idle = sorted(name for name, why in reasons.items() if not why)
    if idle:
        raise Unsupported(
            f"pip chose {', '.join(idle)[:500]}, which nothing needs on this Python",
            hint=_OTHER,
            packages=idle,
        )
    return {name: tuple(sorted(why)) for name, why in reasons.items()}


def _satisfied(requirement: Requirement, package: Described | None, who: str) -> None:
    """Raises: Unsupported."""
    if package is not None and requirement.specifier.contains(package.version, prereleases=True):
        return
    found = "left it out" if package is None else f"chose version {package.version}"
    raise Unsupported(
        f"{who}{requirement} is needed on this Python, and pip {found}",
        hint=_OTHER,
        requirement=str(requirement),
    )
