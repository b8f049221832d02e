"""Files of this machine that an engine writes or reads piece by piece."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from dsec.errors import BadRequest, Denied, DsecError, NotFound, StorageFull
from dsec.handover import handed
from dsec.model.checks import local_path, shown

T = TypeVar("T")
_PIECE: Final = 1 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


async def saved(pieces: AsyncIterator[bytes], path: str | Path) -> None:
    """Write a stream to a file (mode 0600) that is there when it is whole.

    Raises: BadRequest, NotFound, Denied, StorageFull: the path. What ``pieces`` raises.
    """
    target = local_path("path", path)
    part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}")
    try:
        with _told(target):
            file = await handed(partial(_create, part), partial(_clean, part))
        try:
            async for piece in pieces:
                await _done(target, partial(file.write, piece))
            await _done(target, partial(_finish, file, part, target))
        finally:
            await asyncio.shield(asyncio.to_thread(_clean, part, file))
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            await close()


async def file_pieces(field: str, path: str | Path) -> AsyncIterator[bytes]:
    """The content of a file.  Raises: BadRequest, NotFound, Denied: the path."""
    source = local_path(field, path)
    file = await _done(source, partial(_open, source))
    try:
        while data := await _done(source, partial(file.read, _PIECE)):
            yield data
    finally:
        file.close()


async def _done(path: Path, work: Callable[[], T]) -> T:
    """In a thread."""
    with _told(path):
        return await asyncio.to_thread(work)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What a file's trouble means to whoever named it."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"path: there is no {shown(str(path))}", hint="the path of a file") from None
    except OSError as error:
        if isinstance(error, DsecError):
            raise
        kind = StorageFull if error.errno in _FULL else Denied if error.errno in _FORBIDDEN else BadRequest
        raise kind(f"path: {shown(str(path))}: {error.strerror}", hint="the path of a file") from error


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def _create(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")


def _finish(file: BinaryIO, part: Path, target: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    part.rename(target)


def _clean(part: Path, file: BinaryIO) -> None:
    """What is left of one that was not finished."""
    with suppress(OSError):
        file.close()
    part.unlink(missing_ok=True)
