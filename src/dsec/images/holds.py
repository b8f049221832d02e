"""Who needs an image: the references in ``held`` of a store, each of which ends with what it is of.

That of an engine is a file that names its home, and the device on which that lies: when the home is gone, so is the need. That of a built
template (``template-<digest>``, or ``template-<digest>-<project>`` of one that is not everybody's) counts for as long as the template's own
record is there; before the record is written it counts for a few minutes, so that whoever is killed in between holds nothing for long.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsec.errors import DsecError
from dsec.images.disk import read_small

TEMPLATES: Final = "templates"
"""Directory of built templates in a store."""
BUILT: Final = "built"
"""Directory of their records, ``<digest>.json``, in that."""
HOME_BYTES: Final = 8192
PROJECTS: Final = "projects"
"""Directory of those that have templates of their own, in the one of built templates: ``<project>/built/<digest>.json``."""
_TEMPLATE: Final = re.compile(r"template-([0-9a-f]{64})(?:-([a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?))?")
_YOUNG: Final = 600.0  # seconds


def reference_of(home: Path | None) -> bytes:
    """What the file of a reference says: "" without a home.  Raises: OSError: there is nothing in which the home could be."""
    if home is None:
        return b""
    home = home.absolute()
    return b"%s\0%d" % (os.fsencode(home), _device(os.fsencode(home)))


def held(root: Path) -> set[str]:
    """The 64 digits of the digests of all images that are needed.

    What is being written is no hold yet: who writes it looks for the image afterwards.
    """
    return {_digest(path) for path in references(root) if not path.name.startswith(".") and is_living(path)}


def holders(root: Path) -> Mapping[str, tuple[str, ...]]:
    """By the 64 digits of an image's digest who needs it: owners, with the home of those that have one.  Raises: OSError."""
    found: dict[str, list[str]] = {}
    for path in references(root):
        if path.name.startswith(".") or not is_living(path):
            continue
        home, owner = _said(path)[0], path.name.partition(".")[2]
        found.setdefault(_digest(path), []).append(f"{owner} ({os.fsdecode(home)})" if home else owner)
    return {digest: tuple(owners) for digest, owners in found.items()}


def references(root: Path) -> tuple[Path, ...]:
    """The files of all, also of those that are being written.  Raises: OSError."""
    directory = root / "held"
    return tuple(sorted(directory.iterdir())) if directory.is_dir() else ()


def is_living(path: Path) -> bool:
    """Whether who has a reference may still need it; what cannot be known counts as yes."""
    template = _TEMPLATE.fullmatch(path.name.partition(".")[2])
    if template is not None:
        root = path.parents[1] / TEMPLATES
        if template[2]:
            root = root / PROJECTS / template[2]
        record = root / BUILT / f"{template[1]}.json"
        return _is_young(path) or not _is_gone(record)
    home, device = _said(path)
    if not home.startswith(b"/") or not _is_gone(home):
        return True
    # Gone, or not mounted? Then it is another device on which it would have to be.
    try:
        return device != b"%d" % _device(home)
    except OSError:
        return True


def _said(path: Path) -> tuple[bytes, bytes]:
    """Home and device of the engine that has a reference; "" when it has none, or it cannot be read."""
    try:
        home, _, device = read_small(path, HOME_BYTES).partition(b"\0")
    except (OSError, DsecError):
        return b"", b""
    return home, device


def _device(home: bytes) -> int:
    """On which lies the nearest directory that is there and that the home is in, or would be.  Raises: OSError."""
    above = os.path.dirname(home)
    while _is_gone(above) and above != b"/":
        above = os.path.dirname(above)
    return os.stat(above).st_dev


def _is_gone(path: bytes | Path) -> bool:
    """Whether there certainly is no such file."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _is_young(path: Path) -> bool:
    """Dates in the future count as well."""
    try:
        return time.time() - path.lstat().st_mtime < _YOUNG
    except OSError:
        return True


def _digest(path: Path) -> str:
    return path.name.lstrip(".").partition(".")[0]
