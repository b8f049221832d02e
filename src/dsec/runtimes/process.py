"""Level ``process``: no root needed, no namespaces. Landlock, seccomp, limits; as root also a private user id and cgroups.

What it does not give (a root file system, layers, quota, a network of its own…) is the absence of flags.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.errors import CleanupFailed, IsolationUnavailable, Unsupported
from dsec.model.health import Status
from dsec.model.ids import SandboxId
from dsec.model.sandbox import MIB, Flag, Level, Place
from dsec.ports.runtime import OnEnded, Plan
from dsec.runtimes import probe
from dsec.runtimes.cgroups import Hierarchy, flags
from dsec.runtimes.spawned import SpawnedRuntime, base_flags
from dsec.runtimes.spawner import Spawner, SpawnerConfig
from dsec.wire.spawn import CreateRequest

FIRST_UID: Final = 0x4000_0000  # as the spawner counts them
SLOT_IDS: Final = 65_536
READABLE: Final = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/ssl/certs",
    "/etc/python3",
    "/proc",
)


def require_landlock() -> None:
    """Ask before anything is made for this level.

    Raises:
        IsolationUnavailable: this kernel has no Landlock, or one that cannot keep signals inside.
    """
    landlock = probe.landlock()
    if landlock.status is not Status.ACTIVE:
        raise IsolationUnavailable(
            f"level 'process' needs all of Landlock: {landlock.detail}", hint=landlock.hint
        )


class ProcessRuntime(SpawnedRuntime):
    """See the module.

    Args:
        homes: where the directories of sandboxes are made; every component must be enterable by others when root makes private users.
    """

    level = Level.PROCESS

    def __init__(
        self, config: SpawnerConfig, hierarchies: tuple[Hierarchy, ...], *, on_ended: OnEnded, homes: Path
    ) -> None:
        super().__init__(config, hierarchies, on_ended, self._no_disk)
        root = os.geteuid() == 0
        private = {Flag.PRIVATE_UID} if root else set()
        self.flags = base_flags(flags(hierarchies) | {Flag.NO_SOCKETS} | private)
        self._homes = homes

    async def _no_disk(self, sandbox: SandboxId) -> int:
        del sandbox
        return -1

    async def _attach_trees(self, spawner: Spawner) -> None:
        del spawner

    def home(self, sandbox: SandboxId) -> Path:
        """The one directory that the sandbox may write."""
        return self._homes / sandbox

    def place(self, sandbox: SandboxId) -> Place:
        """See :class:`Runtime`. The user id is known once the sandbox runs."""
        home = self.home(sandbox)
        uid, gid = os.geteuid(), os.getegid()
        if uid == 0 and self.slot(sandbox) >= 0:
            uid = gid = FIRST_UID + self.slot(sandbox) * SLOT_IDS
        inside = {"home": str(home / "home"), "tmp": str(home / "tmp")}
        return Place(workdir=str(home), user="sandbox", uid=uid, gid=gid, **inside)

    async def _request(self, plan: Plan) -> tuple[CreateRequest, list[int]]:
        for field, given in (("read_only", plan.read_only), ("volumes", plan.volumes)):
            if given:
                raise Unsupported(f"{field}: level 'process' cannot do that", hint="use level='container'")
        home = self.home(plan.id)
        await asyncio.to_thread(_make_home, home)
        request = CreateRequest(
            id=plan.id,
            hostname="sandbox",
            memory=plan.limits.memory_mib * MIB,
            pids=plan.limits.pids + 1,
            cpu_millis=plan.limits.cpu_millis,
            open_files=plan.limits.open_files,
            deadline=int(plan.deadline * 1e9),
            directory=str(home),
            readable=READABLE,
        )
        return request, []

    def _traces(self) -> set[SandboxId]:
        return super()._traces() | {SandboxId(home.name) for home in self._homes.iterdir()}

    async def _discard(self, sandbox: SandboxId) -> None:
        try:
            await asyncio.to_thread(_remove_home, self.home(sandbox))
        except OSError as error:
            raise CleanupFailed(f"sandbox {sandbox}: {error.filename}: {error.strerror}") from error


def _make_home(home: Path) -> None:
    home.mkdir(mode=0o700)
    for name in ("tmp", "home"):
        (home / name).mkdir(mode=0o700)


def _remove_home(home: Path) -> None:
    """Remove a tree that a hostile command made, whose processes are all dead: of any depth, with any modes.

    Directories are moved up to the top before they are emptied, so neither recursion nor descriptors grow with the depth.
    Raises: OSError.
    """
    try:
        top = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
