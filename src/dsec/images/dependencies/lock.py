"""A lock: exactly which wheels a template's requirements mean for one Python, in a text that is the same everywhere."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from dsec.errors import BadRequest, Conflict
from dsec.images.dependencies.target import PythonTarget
from dsec.model.checks import check_count, check_text, shown

_FORMAT: Final = 1
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_WHEEL: Final = re.compile(r"[A-Za-z0-9._+!-]{1,250}\.whl")
_LARGEST: Final = 16 * 2**20  # characters of a lock's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """One package of a lock.

    Attributes:
        name: normalised. version: of the package. file: name of its wheel. sha256: of that file, hexadecimal.
        size: of that file, bytes. required_by: who asked for it, sorted: a requirement as it was given, or ``package version: requirement``.

    Raises:
        BadRequest: a field is not of that form.
    """

    name: str
    version: str
    file: str
    sha256: str
    size: int
    required_by: tuple[str, ...]

    def __post_init__(self) -> None:
        check_text("lock", self.name, self.version, self.file, self.sha256, *self.required_by)
        check_count("lock size", self.size, 1, 2**50)
        if not _SHA256.fullmatch(self.sha256):
            raise BadRequest(
                f"lock sha256: {shown(self.sha256)} is not 64 hexadecimal digits", field="sha256"
            )
        try:
            name, version, _, _ = parse_wheel_filename(self.file)
        except InvalidWheelFilename as exc:
            raise BadRequest(
                f"lock file: {shown(self.file)} is not the name of a wheel", field="file"
            ) from exc
        named = (self.name, self.version) == (canonicalize_name(name), str(version))
        if not named or not _WHEEL.fullmatch(self.file):
            raise BadRequest(
                f"lock file: {shown(self.file)} is no wheel of {shown(self.name)} {shown(self.version)}",
                field="file",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """Every wheel that the requirements need, sorted by name, and the Python they are for. No URL is in it.

    Attributes:
        target: the Python. requirements: as given, in canonical order. packages: sorted by name.

    Raises:
        BadRequest: not sorted, or a package is there twice.
    """

    target: PythonTarget
    requirements: tuple[str, ...] = ()
    packages: tuple[Locked, ...] = field(default=())

    def __post_init__(self) -> None:
        names = [each.name for each in self.packages]
        if names != sorted(set(names)):
            raise BadRequest("lock packages: not sorted by name, or one is there twice", field="packages")
        if list(self.requirements) != sorted(set(self.requirements)):
            raise BadRequest("lock requirements: not sorted, or one is there twice", field="requirements")

    @property
    def text(self) -> str:
        """Canonical JSON: equal locks have equal text."""
        packages = [
            {
                "name": each.name,
                "version": each.version,
                "file": each.file,
                "sha256": each.sha256,
                "size": each.size,
                "required_by": list(each.required_by),
            }
            for each in self.packages
        ]
        value = {
            "format": _FORMAT,
            "target": self.target.facts(),
            "requirements": list(self.requirements),
            "packages": packages,
        }
        return json.dumps(value, indent=1, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """``sha256:…`` of the text."""
        return f"sha256:{hashlib.sha256(self.text.encode()).hexdigest()}"

    @property
    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(each.size for each in self.packages)

    def check_target(self, target: PythonTarget) -> None:
        """Raises: Conflict: the lock is for another Python than this one, or for other places of its packages."""
        mine, other = self.target.facts(), target.facts()
        different = sorted(name for name, value in mine.items() if other[name] != value)
        if different:
            told = ", ".join(f"{name} {other[name]} instead of {mine[name]}" for name in different)
            raise Conflict(
                f"the requirements are locked for another Python than the image has: {told}",
                hint="lock them again for this image",
                different=different,
            )


def parse_lock(text: str) -> Lock:
    """A lock from its text.  Raises: BadRequest: it is not one, or one of a later version."""
    check_text("lock", text)
    if len(text) > _LARGEST:
        raise BadRequest(f"lock: more than {_LARGEST} characters", field="lock")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise BadRequest(f"lock: not JSON: {exc}", field="lock") from exc
    top = _exactly("lock", value, {"format", "target", "requirements", "packages"})
    if top["format"] != _FORMAT:
        raise BadRequest(
            f"lock: format {shown(top['format'])}, and this version reads {_FORMAT}",
            hint="lock the requirements again",
            field="format",
        )
    target = _exactly("target", top["target"], set(PythonTarget.__dataclass_fields__))
    return Lock(
        target=PythonTarget(**{name: str(each) for name, each in target.items()}),
        requirements=_texts("requirements", top["requirements"]),
        packages=tuple(_package(each) for each in _list("packages", top["packages"])),
    )


def _package(value: object) -> Locked:
    found = _exactly("package", value, set(Locked.__dataclass_fields__))
    size = found["size"]
    check_count("lock size", size, 1, 2**50)
    return Locked(
        name=str(found["name"]),
        version=str(found["version"]),
        file=str(found["file"]),
        sha256=str(found["sha256"]),
        size=int(str(size)),
        required_by=_texts("required_by", found["required_by"]),
    )


def _exactly(what: str, value: object, names: set[str]) -> Mapping[str, object]:
    if not isinstance(value, dict) or set(value) != names:
        raise BadRequest(
            f"lock: {what} must have exactly the fields {', '.join(sorted(names))}",
            hint="lock again",
            field=what,
        )
    return value


def _list(what: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise BadRequest(f"lock: {what}: {shown(value)} is not a list", field=what)
    return value


def _texts(what: str, value: object) -> tuple[str, ...]:
    found = _list(what, value)
    check_text(f"lock {what}", *found)
    return tuple(str(each) for each in found)
