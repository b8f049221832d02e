"""Images that are mounted for sandboxes to be made from: those in use, and the last few that were."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from dsec.model.ids import SandboxId
from dsec.ports.storage import Image

SPARE: Final = 64
"""Images that stay mounted although no sandbox uses them."""

Attach = Callable[[str, int], Awaitable[None]]
"""Gives the spawner a detached mount under a name; one that it has already is no error."""


class MountedImages:
    """What the spawner has attached, and our own mount of each, from which a successor of the spawner gets it again.

    An image that a sandbox uses, or is being made from, is not detached: nothing would break (the sandbox's overlay holds
    the file system), but the next sandbox of that image would mount it, and have it in memory, once more.

    Args:
        mount: a detached mount of an image file (blocking). clone: another mount of it, of the descriptor.
        attach, detach: at the spawner, started when it does not run.
        spare: images that may stay mounted unused.
    """

    def __init__(
        self,
        *,
        mount: Callable[[Path], int],
        clone: Callable[[int], int],
        attach: Attach,
        detach: Callable[[str], Awaitable[None]],
        spare: int = SPARE,
    ) -> None:
        self._mount_file = mount
        self._clone = clone
        self._attach_there = attach
        self._detach_there = detach
        self._spare = spare
        self._fds: dict[str, int] = {}  # least recently used first
        self._mounting: dict[str, asyncio.Task[None]] = {}
        self._of: dict[SandboxId, tuple[str, ...]] = {}
        self._uses: Counter[str] = Counter()
        self._changing = asyncio.Lock()

    async def take(self, sandbox: SandboxId, images: Sequence[Image]) -> tuple[str, ...]:
        """The names of their trees at the spawner, which stay until :meth:`release`, also when this fails.

        Raises:
            OSError, Unsupported: an image cannot be mounted (FileNotFoundError: it left the store). RuntimeUnavailable.
        """
        names = tuple(map(_tree, images))
        self._unuse(sandbox)
        self._of[sandbox] = names
        self._uses.update(names)
        await self._mount_all(names, images)
        return names

    def has(self, image: Image) -> bool:
        """Whether it is mounted now."""
        return _tree(image) in self._fds

    async def ready(self, images: Sequence[Image]) -> None:
        """Mount them, for nobody in particular.  Raises: as :meth:`take`."""
        await self._mount_all(tuple(map(_tree, images)), images)
        await self._trim()

    async def release(self, sandbox: SandboxId) -> None:
        """It is no more. One that took nothing is no error.  Raises: RuntimeUnavailable: there are some too many still."""
        self._unuse(sandbox)
        await self._trim()

    async def attach_all(self, attach: Attach) -> None:
        """Give a spawner that was just connected what is mounted here.  Raises: RuntimeUnavailable."""
        for name in tuple(self._fds):
            if name in self._fds:  # or it was detached meanwhile
                await self._attach(name, attach)

    async def close(self) -> None:
        """Unmount ours. The spawner goes on with its own, if it goes on."""
        await asyncio.gather(*self._mounting.values(), return_exceptions=True)
        async with self._changing:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def _unuse(self, sandbox: SandboxId) -> None:
        for name in self._of.pop(sandbox, ()):
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
                if name in self._fds:
                    self._fds[name] = self._fds.pop(name)

    async def _mount_all(self, names: Sequence[str], images: Sequence[Image]) -> None:
        for name, image in zip(names, images, strict=True):
            if name in self._mounting or name not in self._fds:
                await self._mount(name, image.path)

    async def _mount(self, name: str, path: Path) -> None:
        """Once, for all who wait; a descriptor that nobody waits for any more is not lost."""
        task = self._mounting.get(name)
        if task is None:
            task = self._mounting[name] = asyncio.get_running_loop().create_task(self._do_mount(name, path))
            task.add_done_callback(_heard)
        await asyncio.shield(task)

    async def _do_mount(self, name: str, path: Path) -> None:
        try:
            async with self._changing:  # it may be on its way out
                self._fds[name] = await asyncio.to_thread(self._mount_file, path)
                try:
                    await self._attach(name, self._attach_there)
                except BaseException:
                    os.close(self._fds.pop(name))
                    raise
        finally:
            del self._mounting[name]

    async def _attach(self, name: str, attach: Attach) -> None:
        clone = self._clone(self._fds[name])
        try:
            await attach(name, clone)
        finally:
            os.close(clone)

    async def _trim(self) -> None:
        if len(self._fds) - len(self._uses) <= self._spare:
            return
        async with self._changing:
            unused = [name for name in self._fds if name not in self._uses]
            for name in unused[: max(0, len(unused) - self._spare)]:
                if name not in self._uses:  # still: others go on while one is detached
                    await self._unmount(name)

    async def _unmount(self, name: str) -> None:
        """From here on whoever wants it mounts it anew. Ours goes last, in a thread: it takes the file system with it."""
        fd = self._fds.pop(name)
        try:
            await self._detach_there(name)
        finally:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, os.close, fd))


def _tree(image: Image) -> str:
    return image.digest.replace(":", "-")


def _heard(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
