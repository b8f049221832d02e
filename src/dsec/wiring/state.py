"""StateDirectory directories: a *private* engine has one that goes with it, a *durable* one a home that one process at a time may own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dsec.errors import (
    BadRequest,
    Busy,
    Conflict,
    Denied,
)
from dsec.handover import handed
from dsec.model.sandbox import Level
from dsec.runtimes import cgroups

_RUN: Final = Path("/run/dsec")  # in memory, for root
UID_LOCKS: Final = _RUN / "uids"
_HOMES: Final = Path("/var/lib/dsec-homes")  # root's, and others may enter it: private users live below
_PREFIX: Final = "dsec-"
_OWNER: Final = ".owner"
_TRIES: Final = 5
_MADE: Final = re.compile(r"dsec-[a-z0-9_]{8}")  # as `mkdtemp` names them
_UNLOCKED: Final = 60.0  # seconds for which a directory that was made may not be locked yet
JOURNAL: Final = "journal"
KEYS: Final = "keys"
KEY: Final = "journal.key"


@dataclass(slots=True)
class StateDirectory:
    """A state directory that we own.

    ``tag`` names its cgroups; ``homes`` holds the directories of level ``process``, ``run`` the sockets.
    """

    path: Path
    homes: Path
    run: Path
    tag: str
    durable: bool
    lock: int
    alive: int | None = None

    def part(self, name: str) -> Path:
        """A private directory in it."""
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def release(self) -> None:
        """A private state directory goes; a durable one is only unlocked."""
        if not self.durable:
            for path in (self.run, self.homes, self.path):
                shutil.rmtree(path, ignore_errors=True)
            self.run.with_name(f"{self.run.name}{_OWNER}").unlink(missing_ok=True)
        else:
            for path in (*(self.run / level.value for level in Level), self.run, self.homes):
                with contextlib.suppress(OSError):
                    path.rmdir()  # only an empty one goes: what runs on keeps its own
        os.close(self.lock)
        if self.alive is not None:
            os.close(self.alive)


def _lock(path: Path) -> int | None:
    """The lock of a state directory, or None when somebody has it."""
    fd = os.open(path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _homes(tag: str, state: Path) -> Path:
    """Where directories of level ``process`` are made: as root their private users must be able to reach it."""
    if os.geteuid() != 0:
        path = state / "homes"
        path.mkdir(mode=0o700, exist_ok=True)
        return path
    path = _HOMES / tag
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    path.parent.chmod(0o711)  # whatever the umask
    path.mkdir(mode=0o711, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != 0:
        raise Conflict(f"{path} is not ours", hint="remove it")
    path.chmod(0o711)
    return path


def _run(tag: str, state: Path) -> Path:
    """Where sockets are made."""
    if os.geteuid() != 0:
        return state / "run"
    path = _RUN / tag
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def private_state() -> StateDirectory:
    base = Path(tempfile.gettempdir())
    sweep(base)
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = _lock(path)
        if lock is not None:  # else another engine's sweep found it in the moment before it was locked
            return _begun(path, lock)
    raise Busy(f"{_TRIES} state directories in {base} were taken by other engines at once")


def _begun(path: Path, lock: int) -> StateDirectory:
    """What belongs to a private engine's directory, which is locked; all of it, or nothing is left."""
    state = StateDirectory(path, _HOMES / path.name, _RUN / path.name, path.name, False, lock)
    try:
        state.alive = _claim(path.name)
        state.homes, state.run = _homes(path.name, path), _run(path.name, path)
    except BaseException:
        state.release()
        raise
    return state


def _claim(tag: str) -> int | None:
    """A private engine's sign of life for as long as it lives, apart from its state directory; None without root."""
    if os.geteuid() != 0:
        return None
    _RUN.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(_RUN / f"{tag}{_OWNER}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _sweep_orphans() -> None:
    """Remove what is left of dead private engines whose whole state directory somebody removed. Their lock tells that they are dead."""
    for path in _RUN.glob(f"{_PREFIX}*{_OWNER}") if os.geteuid() == 0 else ():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _forget(path.name.removesuffix(_OWNER))
            finally:
                os.close(fd)


def _forget(tag: str) -> bool:
    """Remove cgroups, sockets and directories of level ``process``; False: some processes do not die yet."""
    ended = [cgroups.remove(f"{tag}-{level.value}") for level in Level]
    if not all(ended):
        return False
    shutil.rmtree(_HOMES / tag, ignore_errors=True)
    shutil.rmtree(_RUN / tag, ignore_errors=True)
    (_RUN / f"{tag}{_OWNER}").unlink(missing_ok=True)
    return True


def sweep(base: Path) -> tuple[Path, ...]:
    """Remove what private engines left that were killed together with their spawner; what was removed."""
    _sweep_orphans()
    swept = []
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            if not (path / "owner.lock").exists():
                if _MADE.fullmatch(path.name) and time.time() - info.st_mtime > _UNLOCKED:
                    path.rmdir()  # an empty one: whoever made it was killed before it was locked
                continue
            lock = _lock(path)
            if lock is None:
                continue
            if os.geteuid() == 0 and not _forget(path.name):  # the next sweep tries again
                os.close(lock)
                continue
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            swept.append(path)
    return tuple(swept)


def _make_home(home: Path) -> str:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        kind = Denied if isinstance(error, PermissionError) else BadRequest
        raise kind(
            f"home: {home} is not a directory and cannot be made one: {error.strerror}",
            hint="name a directory that is there or can be made",
        ) from error
    return _PREFIX + hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]


async def durable_state(home: Path, wait: float) -> StateDirectory:
    tag = await asyncio.to_thread(_make_home, home)
    deadline = asyncio.get_running_loop().time() + wait
    while (lock := _lock(home)) is None:
        if asyncio.get_running_loop().time() > deadline:
            raise Conflict(
                f"{home} is in use by another engine",
                hint="connect to that engine instead, or name another home",
                home=str(home),
            )
        await asyncio.sleep(0.02)
    return await handed(partial(_durable, home, tag, lock), StateDirectory.release)


def _durable(home: Path, tag: str, lock: int) -> StateDirectory:
    """What belongs to a home that is locked; all of it, or the lock is let go."""
    try:
        return StateDirectory(home, _homes(tag, home), _run(tag, home), tag, True, lock)
    except BaseException:
        os.close(lock)
        raise
