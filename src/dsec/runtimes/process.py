"""Level ``process``: no root needed, no namespaces. Landlock, seccomp, limits; as root also a private user id and cgroups.

What it does not give (a root file system, layers, quota, a network of its own…) is the absence of flags.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from dsec.errors import CleanupFailed, IsolationUnavailable, Unsupported
from dsec.model.health import Status
from dsec.model.ids import SandboxId
from dsec.model.sandbox import MIB, Flag, Level, Place, SandboxSpec
from dsec.ports.runtime import OnEnded, Plan
from dsec.runtimes import probe
from dsec.runtimes.cgroups import Hierarchy, flags
from dsec.runtimes.homes import Homes
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
        super().__init__(replace(config, readable=READABLE), hierarchies, on_ended, self._no_disk)
        root = os.geteuid() == 0
        private = {Flag.PRIVATE_UID} if root else set()
        self.flags = base_flags(flags(hierarchies) | {Flag.NO_SOCKETS} | private)
        self._homes = Homes(homes)

    async def _no_disk(self, sandbox: SandboxId) -> int:
        del sandbox
        return -1

    async def _attach_trees(self, spawner: Spawner) -> None:
        del spawner

    def home(self, sandbox: SandboxId) -> Path:
        """The one directory that the sandbox may write."""
        return self._homes.path(sandbox)

    def reserve(self, spec: SandboxSpec) -> SandboxId:
        """See :class:`Runtime`."""
        del spec
        return self._homes.reserve()

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
        home = await self._homes.make(plan.id)
        request = CreateRequest(
            id=plan.id,
            hostname="sandbox",
            memory=plan.limits.memory_mib * MIB,
            pids=plan.limits.pids + 1,
            cpu_millis=plan.limits.cpu_millis,
            open_files=plan.limits.open_files,
            deadline=int(plan.deadline * 1e9),
            directory=str(home),
        )
        return request, []

    def _traces(self) -> set[SandboxId]:
        return super()._traces() | self._homes.all()

    async def _discard(self, sandbox: SandboxId) -> None:
        try:
            await self._homes.remove(sandbox)
        except OSError as error:
            raise CleanupFailed(f"sandbox {sandbox}: {error.filename}: {error.strerror}") from error

    async def close(self) -> None:
        """See :class:`SpawnedRuntime`."""
        await super().close()
        await asyncio.to_thread(self._homes.close)
