"""From DSec's errors to those that Inspect's interface names, with file names where its tools look for them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from inspect_ai.util import SandboxUnavailableError

from dsec.errors import (
    BadRequest,
    Busy,
    Conflict,
    FileKind,
    FileProblem,
    NotFound,
    RuntimeUnavailable,
    SandboxFailed,
)

_GONE: Final = (SandboxFailed, NotFound, Conflict, RuntimeUnavailable, Busy)


@contextmanager
def sandbox_errors() -> Iterator[None]:
    """Around any act.  Raises: SandboxUnavailableError: the sandbox does not run, or could not be reached."""
    try:
        yield
    except _GONE as error:
        raise SandboxUnavailableError(str(error)) from error


@contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Around one act on one file.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: as the kernel inside said; no such name.
        SandboxUnavailableError: as :func:`sandbox_errors`.
    """
    try:
        with sandbox_errors():
            yield
    except FileKind as error:  # a device or FIFO: it exists and may not be read or written as a file
        raise PermissionError(errno.EACCES, error.message, path) from error
    except FileProblem as error:
        raise _os_error(error, path) from error
    except BadRequest as error:  # a path that no file can have
        raise FileNotFoundError(errno.ENOENT, error.message, path) from error


def _os_error(error: FileProblem, path: str) -> OSError:
    number = error.facts.get("errno")
    code = number if isinstance(number, int) and number > 0 else errno.EIO
    if code in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):  # no file is reached by that name
        return FileNotFoundError(errno.ENOENT, os.strerror(code), path)
    if code == errno.EROFS:
        return PermissionError(errno.EACCES, os.strerror(code), path)
    return OSError(code, os.strerror(code), path)  # becomes the subclass of its number
