"""Small files of a store, read with suspicion: a torn disk or somebody else may have put anything in their place."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dsec.errors import Busy, Denied, DsecError, StorageFull, StoreDamaged

MOST_BYTES: Final = 4 * 2**20
"""More than any file that is written here for its content."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM})
_SPENT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


def read_small(path: Path, most: int = MOST_BYTES) -> bytes:
    """Content of a regular file; never waits, whatever else is there.

    Raises:
        FileNotFoundError, Denied.
        StoreDamaged: it is no file, too large, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise damaged(path, "is no file")
            data = file.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise of_disk(error, path) from error
    if len(data) > most:
        raise damaged(path, f"is larger than {most} bytes")
    return data


def damaged(path: Path, what: str) -> StoreDamaged:
    """``what``: goes on after the path."""
    return StoreDamaged(
        f"{path} {what}", hint=f"remove {path}; what it was of is built again", path=str(path)
    )


def of_disk(error: OSError, place: Path) -> DsecError:
    """What an error of the disk below ``place`` means to whoever asked."""
    if isinstance(error, DsecError):
        return error
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(place)
    words = f"{path}: {error.strerror or error}"
    facts = {"path": path, "errno": error.errno}
    if error.errno in _FULL:
        return StorageFull(words, hint=f"free space below {place}", **facts)
    if error.errno == errno.EROFS:
        return Denied(words, hint=f"mount {place} writable, or name another place", **facts)
    if error.errno in _FORBIDDEN:
        return Denied(words, hint=f"let {path} belong to whoever runs this, and be writable", **facts)
    if error.errno in _SPENT:
        return Busy(words, hint="try again later", **facts)
    return StoreDamaged(words, hint=f"remove {path}; what it was of is built again", **facts)


@contextmanager
def typed(place: Path) -> Iterator[None]:
    """Errors of the disk leave as errors of this project.  Raises: StorageFull, Denied, Busy, StoreDamaged."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DsecError):
            raise
        raise of_disk(error, place) from error
