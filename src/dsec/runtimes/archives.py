"""What an archive or tree may be, whichever way it goes: its bounds, its names, its links, and what it says when it fails.

Both ends are hostile: an archive may name anything, and so may a sandbox. Every name is checked before it is used.
"""

from __future__ import annotations

import errno
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from dsec.errors import BadRequest, Conflict, Denied, DsecError, StorageFull, TooLarge

PIECE: Final = 256 * 1024  # bytes of content moved at once
BATCH_OPS: Final = 512  # entries made at once
MODE_BITS: Final = 0o777
UNREADABLE: Final = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)
_MAX_NAME: Final = 255
_MAX_PATH: Final = 4095
_LOCAL: Final[dict[int, type[DsecError]]] = {
    errno.EEXIST: Conflict,
    errno.ELOOP: Conflict,
    errno.ENOTDIR: Conflict,
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
    errno.EACCES: Denied,
    errno.EPERM: Denied,
}


class ArchiveRefused(BadRequest):
    """An entry of an archive or tree may not be taken; ``facts["entry"]`` names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveBounds:
    """What one transfer may be.  ``max_bytes``: of all file contents together."""

    max_bytes: int = 16 * 2**30
    max_entries: int = 1_000_000


@dataclass(slots=True)
class Transfer:
    """What was moved, and which entries were left out, with why (at most 1,000 are named)."""

    entries: int = 0
    bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    skipped_count: int = 0

    def skip(self, name: str, why: str) -> None:
        """Leave an entry out."""
        self.skipped_count += 1
        if len(self.skipped) < 1000:
            self.skipped.append((name, why))

    def count(self, name: str, size: int, bounds: ArchiveBounds) -> None:
        """Raises: TooLarge: with this entry a bound is passed."""
        self.entries += 1
        self.bytes += size
        if self.entries > bounds.max_entries:
            raise TooLarge(f"more than {bounds.max_entries} entries, at {name!r}", entry=name)
        if self.bytes > bounds.max_bytes:
            raise TooLarge(f"more than {bounds.max_bytes} bytes, at {name!r}", entry=name)


def safe_name(name: str) -> str:
    """The name without leading ``./`` and trailing ``/``; "" for the root itself.

    Raises:
        ArchiveRefused: absolute, ``..`` in it, a NUL, or too long.
    """
    if name.startswith("/"):
        raise ArchiveRefused(f"entry {name[:200]!r} is absolute", entry=name)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ArchiveRefused(f"entry {name[:200]!r} has '..' in it", entry=name)
    clean = "/".join(parts)
    try:
        raw = os.fsencode(clean)
    except UnicodeEncodeError:
        raise ArchiveRefused(f"entry {name[:200]!r} cannot be encoded", entry=name) from None
    if "\0" in clean or len(raw) > _MAX_PATH or any(len(os.fsencode(part)) > _MAX_NAME for part in parts):
        raise ArchiveRefused(f"entry {name[:200]!r} has a NUL or is too long", entry=name)
    return clean


def check_link(name: str, target: str) -> None:
    """A symlink may only point to inside the tree that it comes with.

    Raises:
        ArchiveRefused: the target is absolute or climbs out.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    # '..' after a name could climb out through another symlink; at the front it climbs real directories only.
    if (
        not target
        or "\0" in target
        or target.startswith("/")
        or climbs > name.count("/")
        or ".." in parts[climbs:]
    ):
        raise ArchiveRefused(f"symlink {name[:200]!r} points out of the tree: {target[:200]!r}", entry=name)
    if len(os.fsencode(target)) > _MAX_PATH:
        raise ArchiveRefused(f"symlink {name[:200]!r} has a target that is too long", entry=name)


@contextmanager
def local_problem(what: str) -> Iterator[None]:
    """Failures of the local file system as ours.

    Raises:
        Conflict: something exists or a symlink is in the way. StorageFull. Denied. BadRequest: anything else.
    """
    try:
        yield
    except DsecError:
        raise
    except UNREADABLE as wrong:
        raise ArchiveRefused(f"the archive cannot be read: {wrong}") from wrong
    except OSError as wrong:
        kind = _LOCAL.get(wrong.errno or 0, BadRequest)
        named = os.fsdecode(wrong.filename) if isinstance(wrong.filename, str | bytes) else ""
        raise kind(f"{what}: {named}: {wrong.strerror}", errno=wrong.errno) from wrong
