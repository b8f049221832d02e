"""Building one image once: locks between processes, and directories that a dead builder leaves to nobody."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import anyio

from dsec.errors import Busy
from dsec.images.attended import attended
from dsec.images.disk import typed
from dsec.images.tools import Check, unstoppable

_WAIT_SECONDS: Final = 1800.0
_SHORT_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.05


@contextmanager
def locked(
    path: Path, *, seconds: float = _WAIT_SECONDS, check: Check = unstoppable, shared: bool = False
) -> Iterator[None]:
    """Alone among all processes, or ``shared``: together with others who share, and never with one who is alone. Blocking.

    Raises:
        Busy: another one has it, and does not end.
        Denied, StorageFull, StoreDamaged: the lock cannot be made.
    """
    descriptor = open_lock(path)
    try:
        deadline = time.monotonic() + seconds
        while not try_lock(descriptor, shared=shared):
            if time.monotonic() > deadline:
                raise _held(path, seconds)
            check()
            time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(descriptor)


@asynccontextmanager
async def alone(path: Path, *, seconds: float = _WAIT_SECONDS) -> AsyncIterator[None]:
    """As :func:`locked`, and no thread is held: neither by those that wait nor by the one that has it."""
    opened: list[int] = []
    try:
        await attended(lambda _: opened.append(open_lock(path)))
        deadline = time.monotonic() + seconds
        while not try_lock(opened[0]):
            if time.monotonic() > deadline:
                raise _held(path, seconds)
            await anyio.sleep(_LOOK_SECONDS)
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _held(path: Path, seconds: float) -> Busy:
    return Busy(
        f"another process has been building with {path} for {seconds:.0f} s",
        hint="try again later",
        seconds=seconds,
    )


@contextmanager
def work_directory(root: Path) -> Iterator[Path]:
    """A new directory in ``root/building``, gone afterwards; what dead builders left there goes first. Blocking."""
    with locked(root / "lock", seconds=_SHORT_SECONDS), typed(root):
        for path in abandoned(root / "building"):
            remove(path)
        work = root / "building" / secrets.token_hex(8)
        work.mkdir(mode=0o700)
        descriptor = os.open(work / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(descriptor)


def abandoned(building: Path) -> Iterator[Path]:
    """Directories whose builder is dead; call with ``lock`` held, so that none is just beginning."""
    for path in sorted(building.iterdir()) if building.is_dir() else ():
        try:
            descriptor = os.open(path / "alive", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # not even begun
            yield path
            continue
        try:
            dead = try_lock(descriptor)
        finally:
            os.close(descriptor)
        if dead:
            yield path


def remove(path: Path) -> None:
    """A file, or a directory with all in it; absent is no error.  Raises: OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_lock(path: Path) -> int:
    """A descriptor that can be locked; the file is made when absent.  Raises: Denied, StorageFull, StoreDamaged, Busy."""
    with typed(path.parent):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Whether it is ours now."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
