"""The directories of sandboxes of level ``process``: made ahead, and removed when every process is dead."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from dsec.model.ids import SandboxId, new_sandbox_id

AHEAD: Final = 8
BREATH: Final = 0.004  # seconds: whoever took one is about to make a sandbox, and both need the interpreter
PROMISED: Final = 64  # ids that were told and not used yet; older ones lose their directory


class Homes:
    """Below one directory, one for each sandbox, named as it is.

    A few are made ahead by a thread, under ids that are free: whoever reserves one of these ids finds its directory made.
    What an engine that died had made ahead is there like everything else that it left (:meth:`all`).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ready: deque[SandboxId] = deque()
        self._promised: deque[SandboxId] = deque()
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self._maker: threading.Thread | None = None

    def path(self, sandbox: SandboxId) -> Path:
        """Where a sandbox's directory is, or will be."""
        return self._directory / sandbox

    def all(self) -> set[SandboxId]:
        """Whose directories there are. Blocking."""
        return {SandboxId(home.name) for home in self._directory.iterdir()}

    def reserve(self) -> SandboxId:
        """A free id, if possible one whose directory is made."""
        if self._maker is None:
            self._maker = threading.Thread(target=self._work, name="dsec-homes", daemon=True)
            self._maker.start()
        self._orders.put(True)
        try:
            sandbox = self._ready.popleft()
        except IndexError:
            return new_sandbox_id()
        self._promised.append(sandbox)
        return sandbox

    async def make(self, sandbox: SandboxId) -> Path:
        """Its directory, now.  Raises: OSError."""
        home = self.path(sandbox)
        try:
            self._promised.remove(sandbox)
        except ValueError:
            await asyncio.to_thread(_make, home)
        return home

    async def remove(self, sandbox: SandboxId) -> None:
        """Absent is no error.  Raises: OSError."""
        home = self.path(sandbox)
        if not _removed_unused(home):
            await asyncio.to_thread(remove_tree, home)

    def close(self) -> None:
        """Remove what was made ahead. Blocking."""
        if self._maker is not None:
            self._orders.put(False)
            self._maker.join()
        for sandbox in (*self._ready, *self._promised):
            with suppress(OSError):  # the next engine finds it
                remove_tree(self.path(sandbox))
        self._ready.clear()
        self._promised.clear()

    def _work(self) -> None:
        while self._orders.get():
            enough = len(self._ready) > AHEAD // 2 and len(self._promised) <= PROMISED
            if enough or not self._orders.empty():
                continue
            if self._ready:
                time.sleep(BREATH)
            with suppress(OSError):  # a full disk is told to who needs a directory
                while len(self._promised) > PROMISED:
                    remove_tree(self.path(self._promised.popleft()))
                while len(self._ready) < AHEAD:
                    sandbox = new_sandbox_id()
                    _make(self.path(sandbox))
                    self._ready.append(sandbox)


def _make(home: Path) -> None:
    home.mkdir(mode=0o700)
    for name in ("tmp", "home"):
        (home / name).mkdir(mode=0o700)


def _removed_unused(home: Path) -> bool:
    """Remove one in which nothing is left. Three calls, so cheap that no thread is asked; False: it takes more."""
    for path in (home / "tmp", home / "home", home):
        try:
            os.rmdir(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EACCES):
                return False
            raise
    return True


def remove_tree(home: Path) -> None:
    """Remove a tree that a hostile command made, whose processes are all dead: of any depth, with any modes.

    Directories are moved up to the top before they are emptied, so neither recursion nor descriptors grow with the depth.
    Raises: OSError.
    """
    try:
        above = os.open(home.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            top = _opened(above, home.name)  # its own mode, too, is what the command left
        finally:
            os.close(above)
    except FileNotFoundError:
        return
    try:
        names = (
            f".{os.urandom(8).hex()}-{number}" for number in itertools.count()
        )  # none that is there already
        pending = _emptied(top, top, names)
        while pending:
            name = pending.pop()
            inside = _opened(top, name)
            try:
                pending += _emptied(inside, top, names)
            finally:
                os.close(inside)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    home.rmdir()


def _opened(parent: int, name: str) -> int:
    """A directory, made accessible first. Never through a symlink."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)


def _emptied(directory: int, top: int, names: Iterator[str]) -> list[str]:
    """Remove what is no directory; move the directories to ``top``, and tell their new names."""
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    moved: list[str] = []
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
            continue
        new = next(names)
        os.close(_opened(directory, name))  # its own ".." changes: it must be writable
        os.rename(name, new, src_dir_fd=directory, dst_dir_fd=top)
        moved.append(new)
    return moved
