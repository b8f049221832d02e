"""The levels of an engine. One that this machine cannot have is kept with its reason, and refused with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from dsec.errors import (
    DsecError,
    IsolationUnavailable,
    StorageFull,
    Unsupported,
)
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Flag, Level, Metrics
from dsec.node.pool import Pool
from dsec.node.ready import ReadyRuntime
from dsec.node.steps import plan_for
from dsec.ports.guest import Guest
from dsec.ports.runtime import OnEnded, Plan, Running, Runtime
from dsec.ports.storage import Images
from dsec.runtimes import cgroups
from dsec.runtimes.container import ContainerRuntime, Mounts
from dsec.runtimes.host_paths import HostPaths
from dsec.runtimes.process import ProcessRuntime, require_landlock
from dsec.runtimes.spawned import SpawnedRuntime
from dsec.runtimes.spawner import SpawnerConfig
from dsec.stores import mounts
from dsec.stores.layers import BtrfsLayers
from dsec.wiring.settings import Settings, programs
from dsec.wiring.state import UID_LOCKS, StateDirectory


class Refused(Runtime):
    """A level that this machine cannot have, with the reason."""

    def __init__(self, level: Level, reason: DsecError) -> None:
        self.level = level
        self.flags: frozenset[Flag] = frozenset()
        self._reason = reason

    async def create(self, plan: Plan) -> Running:
        raise self._refusal(plan) from self._reason

    async def rehearse(self, plan: Plan) -> None:
        raise self._refusal(plan) from self._reason

    def _refusal(self, plan: Plan) -> DsecError:
        if isinstance(self._reason, StorageFull):
            return StorageFull(self._reason.message, hint=self._reason.hint)
        return IsolationUnavailable(
            f"level {plan.level.value!r} is not available here: {self._reason.message}",
            hint=self._reason.hint,
        )

    async def destroy(self, sandbox: SandboxId) -> None:
        del sandbox

    async def list(self) -> tuple[Running, ...]:
        """Nobody knows what runs: nothing may be taken for lost."""
        raise IsolationUnavailable(self._reason.message, hint=self._reason.hint)

    async def freeze(self, sandbox: SandboxId, frozen: bool) -> None:
        raise Unsupported(f"{sandbox} cannot be {'paused' if frozen else 'resumed'}: {self._reason.message}")

    async def deadline(self, sandbox: SandboxId, at: float) -> None:
        del sandbox, at

    async def connect(self, sandbox: SandboxId) -> Guest:
        raise IsolationUnavailable(self._reason.message, hint=self._reason.hint, sandbox=sandbox)

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        del sandbox
        return Metrics()

    def memory(self, sandbox: SandboxId) -> int:
        del sandbox
        return -1


@dataclass(slots=True)
class Parts:
    """What was opened, to be closed in reverse."""

    stack: contextlib.AsyncExitStack
    images: Images
    runtimes: dict[Level, Runtime] = field(default_factory=dict)
    layers: BtrfsLayers | None = None
    pool: Pool | None = None


def _config(state: StateDirectory, level: Level, hierarchies: tuple[cgroups.Hierarchy, ...]) -> SpawnerConfig:
    root = os.geteuid() == 0
    if root:
        UID_LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)
    return SpawnerConfig(
        level=level,
        directory=state.part(level.value),
        sockets=state.run / level.value,
        programs=programs(),
        durable=state.durable,
        cgroups=[h.argument() for h in hierarchies],
        uids=UID_LOCKS if root else None,
    )


def _hierarchies(state: StateDirectory, level: Level) -> tuple[cgroups.Hierarchy, ...]:
    return cgroups.prepare(f"{state.tag}-{level.value}") if os.geteuid() == 0 else ()


async def _container(state: StateDirectory, settings: Settings, on_ended: OnEnded, parts: Parts) -> None:
    if os.geteuid() != 0:
        raise IsolationUnavailable(
            "level 'container' needs root", hint="run as root, or use level='process', which does not"
        )
    layers = await BtrfsLayers.open(
        state.path, size_bytes=settings.pool_bytes, shelf=settings.shelf, durable=state.durable
    )
    parts.stack.push_async_callback(layers.close)

    def build() -> ContainerRuntime:
        groups = _hierarchies(state, Level.CONTAINER)
        return ContainerRuntime(
            _config(state, Level.CONTAINER, groups),
            groups,
            on_ended=on_ended,
            images=parts.images,
            layers=layers,
            mounts=Mounts(mounts.mount_image, mounts.clone_detached),
            volumes=layers.volumes,
            host=HostPaths(settings.host_paths),
        )

    await _add(await asyncio.to_thread(build), settings, parts)
    parts.layers = layers


async def _process(state: StateDirectory, settings: Settings, on_ended: OnEnded, parts: Parts) -> None:
    def build() -> ProcessRuntime:
        require_landlock()
        groups = _hierarchies(state, Level.PROCESS)
        config = _config(state, Level.PROCESS, groups)
        return ProcessRuntime(config, groups, on_ended=on_ended, homes=state.homes)

    await _add(await asyncio.to_thread(build), settings, parts)


async def _add(runtime: SpawnedRuntime, settings: Settings, parts: Parts) -> None:
    parts.stack.push_async_callback(runtime.close)
    await runtime.start()
    parts.runtimes[runtime.level] = runtime
    if settings.pool:
        if parts.pool is None:
            parts.pool = Pool(settings.pool, settings.pool_memory)
        parts.stack.push_async_callback(parts.pool.close)  # before the runtime; twice is no error
        parts.runtimes[runtime.level] = ReadyRuntime(runtime, plan_for, parts.pool)


_Maker = Callable[[StateDirectory, Settings, OnEnded, Parts], Awaitable[None]]
LEVELS: Final[dict[Level, _Maker]] = {Level.CONTAINER: _container, Level.PROCESS: _process}
