"""Extended attributes of what an overlay wrote: which of them are the files' own, and which say how layers lie over one another.

The spawner mounts overlays with markers in ``trusted.overlay.*``, a namespace in which nobody inside a sandbox can write. So
``user.overlay.*`` is an attribute like any other, and a marker is always the kernel's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dsec.errors import TooLarge, Unsupported

OPAQUE: Final = "trusted.overlay.opaque"
OPAQUE_VALUE: Final = b"y"
MAX_BYTES: Final = 2**16
"""Of names and values of one entry."""
_ACCESS_LISTS: Final = ("system.posix_acl_access", "system.posix_acl_default")
# Where a file was copied from, and the kernel's other notes to itself: they mean nothing in a copy.
_NOTES: Final = frozenset(
    f"trusted.overlay.{name}" for name in ("impure", "nlink", "origin", "protattr", "upper", "uuid")
)
# Labels of the machine, and capabilities: nobody inside can set any, and no overlay of ours would heed them (nosuid).
_FOREIGN: Final = "security."
_NO_ATTRIBUTES: Final = (errno.ENOTSUP, errno.ENODATA)
_NO_PLACE: Final = (errno.ENOSPC, errno.E2BIG, errno.ERANGE)
_SMALL: Final = 2048  # bytes that every file system has a place for


@dataclass(frozen=True, slots=True)
class Attributes:
    """Of one entry. ``opaque``: a directory that hides what lower layers have in its place."""

    values: Mapping[str, bytes]
    opaque: bool


def is_whiteout(info: os.stat_result) -> bool:
    """Whether an entry says that there is nothing, whatever lower layers have."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_kept(name: str) -> bool:
    """Whether an attribute is the file's own, and part of a copy."""
    return name.startswith("user.") or name in _ACCESS_LISTS


def read(path: str | int) -> Attributes:
    """Of an open file, or of what a path names (a link is not followed).

    Raises:
        TooLarge: more than :data:`MAX_BYTES`.
        Unsupported: markers of an overlay that ours are not. OSError.
    """
    values: dict[str, bytes] = {}
    opaque, size = False, 0
    for name in _names(path):
        if name.startswith(_FOREIGN) or name in _NOTES:
            continue
        value = _value(path, name)
        size += len(os.fsencode(name)) + len(value)
        if size > MAX_BYTES:
            raise _too_many()
        if is_kept(name):
            values[name] = value
        elif name == OPAQUE and value == OPAQUE_VALUE:
            opaque = True
        else:
            raise Unsupported(
                f"an entry has the attribute {name[:100]!r}, which says what no overlay here means",
                hint="let the kernel's module `overlay` have redirect_dir and metacopy off",
                attribute=name[:100],
            )
    return Attributes(values, opaque)


def write(path: str | int, values: Mapping[str, bytes]) -> None:
    """Raises: TooLarge: the file system has no place for that many. OSError."""
    for name in sorted(values):
        try:
            os.setxattr(path, name, values[name], **_still(path))
        except OSError as error:
            if error.errno in _NO_PLACE and sum(map(len, values.values())) > _SMALL:
                raise _too_many() from error
            raise


def _names(path: str | int) -> list[str]:
    try:
        return os.listxattr(path, **_still(path))
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            return []
        if error.errno in _NO_PLACE:
            raise _too_many() from error
        raise


def _value(path: str | int, name: str) -> bytes:
    try:
        return os.getxattr(path, name, **_still(path))
    except OSError as error:
        if error.errno in _NO_PLACE:
            raise _too_many() from error
        raise


def _still(path: str | int) -> dict[str, bool]:
    """A descriptor cannot be told not to be followed."""
    return {} if isinstance(path, int) else {"follow_symlinks": False}


def _too_many() -> TooLarge:
    return TooLarge(
        f"the extended attributes of one file are too large ({MAX_BYTES} bytes at most)",
        hint="take some away",
        limit=MAX_BYTES,
    )
