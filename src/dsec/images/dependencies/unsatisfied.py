"""What pip's log says of requirements that no wheels satisfy."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from dsec.errors import BadRequest, DsecError, Unsupported
from dsec.images.dependencies.target import PythonTarget

_LINES: Final = 20_000  # the last ones of the log are looked at,
_END: Final = 400  # and of these the last ones for what it ended with
_SHOWN: Final = 10  # versions
_CAUSES: Final = 6
_NO_VERSION: Final = re.compile(r"ERROR: No matching distribution found for (.{1,300})")
_VERSIONS: Final = re.compile(
    r"ERROR: Could not find a version that satisfies .{1,500} \(from versions: (.{1,9000}?)(?:\)|$)",
    re.MULTILINE,
)
_FILE: Final = re.compile(r"/([^/\s#?]{1,300}\.(?:whl|zip|tar\.\w{1,4}|tgz))(?:[#?\s]|$)")
_CONFLICT: Final = "The conflict is caused by:"
_WORDS: Final = (
    (re.compile(r"The user requested \(constraint\) (.+)"), r"a constraint of this machine says \1"),
    (re.compile(r"The user requested (.+)"), r"\1 is required"),
    (re.compile(r"(.+) depends on (.+)"), r"\1 needs \2"),
)


def unsatisfied(log: Iterable[str], target: PythonTarget) -> DsecError | None:
    """Why the requirements and the index do not agree; None: the log does not say so."""
    lines = deque(log, _LINES)
    text = "".join(islice(lines, max(0, len(lines) - _END), None))
    if match := _NO_VERSION.search(text):
        versions = _VERSIONS.search(text)
        return _nothing_found(match[1].strip(), versions[1] if versions else "", lines, target)
    if _CONFLICT in text:
        return BadRequest(
            f"the requirements contradict one another: {_causes(text)}",
            hint="loosen one of them",
            field="requirements",
        )
    return None


def _causes(text: str) -> str:
    """Who wants what, in one sentence."""
    told = text.rpartition(_CONFLICT)[2].lstrip("\n").partition("\n\n")[0]
    causes = list(dict.fromkeys(_worded(line.strip()) for line in told.splitlines() if line.strip()))
    left = len(causes) - _CAUSES
    more = f" (and {left} more such)" if left > 0 else ""
    return ", but ".join(cause[:300] for cause in causes[:_CAUSES]) + more


def _worded(cause: str) -> str:
    for pattern, words in _WORDS:
        if pattern.fullmatch(cause):
            return pattern.sub(words, cause)
    return cause


def _nothing_found(wanted: str, versions: str, lines: Iterable[str], target: PythonTarget) -> DsecError:
    """No wheel satisfies ``wanted``: there is no such package, none of that version, or none for this Python."""
    name, allowed = _read(wanted)
    usable = sorted(filter(None, map(_version, versions.split(","))))
    passed_over = [line for line in lines if "Skipping link: " in line and _names(line, name)]
    others = [(line, version) for line in passed_over for version in [_version_of(line)] if version]
    fitting = [line for line, version in others if allowed.contains(version, prereleases=True)]
    if not fitting and (usable or others):
        return _no_such_version(wanted, name, usable, [version for _, version in others])
    python = (
        f"CPython {target.python} ({target.abi}) with {target.libc} {target.libc_version} on {target.machine}"
    )
    there = f"; versions with a wheel: {_listed(usable)}" if usable else ""
    if any("No sources permitted" in line for line in fitting or passed_over):
        return Unsupported(
            f"requirement {wanted!r}: {name} has no wheel for {python}, only source that would have to be built{there}",
            hint="nothing is built here, since that runs the package's code; require a version with a wheel, or build one and "
            "offer it through find-links",
            requirement=wanted,
        )
    if passed_over:
        return Unsupported(
            f"requirement {wanted!r}: {name} has no wheel for {python}{there}",
            hint="require a version that has one, or take another base",
            requirement=wanted,
        )
    return BadRequest(
        f"requirement {wanted!r}: no package of that name is in the index",
        hint="check the name",
        field="requirements",
        requirement=wanted,
    )


def _no_such_version(wanted: str, name: str, usable: list[Version], others: list[Version]) -> BadRequest:
    newest = max([*usable, *others])
    hint = (
        f"versions with a wheel for this Python: {_listed(usable)}"
        if usable
        else "none has a wheel for this Python"
    )
    return BadRequest(
        f"requirement {wanted!r}: no such version; the newest of {name} is {newest}",
        hint=hint,
        field="requirements",
        requirement=wanted,
    )


def _read(wanted: str) -> tuple[str, SpecifierSet]:
    """The name of a requirement as pip writes it, and which versions it allows."""
    try:
        requirement = Requirement(wanted)
    except InvalidRequirement:
        return re.split(r"[\s<>=!~;\[(]", wanted, maxsplit=1)[0], SpecifierSet()
    return requirement.name, requirement.specifier


def _version(text: str) -> Version | None:
    try:
        return Version(text.strip())
    except InvalidVersion:
        return None


def _version_of(line: str) -> Version | None:
    """Of the file that a line passes over."""
    match = _FILE.search(line)
    assert match is not None
    try:
        return (
            parse_wheel_filename(match[1])[1]
            if match[1].endswith(".whl")
            else parse_sdist_filename(match[1])[1]
        )
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _listed(versions: list[Version]) -> str:
    """The newest of them, in their order."""
    earlier = "..., " if len(versions) > _SHOWN else ""
    return earlier + ", ".join(map(str, versions[-_SHOWN:]))


def _names(line: str, name: str) -> bool:
    """Whether a line passes over a file of this package."""
    if "wrong project name" in line or (match := _FILE.search(line)) is None:
        return False
    return re.sub(r"[-_.]+", "-", match[1]).lower().startswith(re.sub(r"[-_.]+", "-", name).lower() + "-")
