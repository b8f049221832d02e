"""A whole engine over fakes, for tests of what the engine decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dsec.client.aio import AsyncDsec
from dsec.core.residence import ALL_STAY, Residence
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Level
from dsec.node.engine import Engine
from dsec.ports.engine import Services
from dsec.testing.fakes import FakeRuntime, HandClock, MemoryStore, NoTrees
from dsec.testing.image_service import FakeImageService
from dsec.testing.sharing import NoSharing
from dsec.testing.snapshots import FakeSnapshots, MemorySnapshots
from dsec.testing.templates import FakeTemplates
from dsec.testing.volumes import FakeVolumes, MemoryVolumes


@dataclass(slots=True)
class Harness:
    """Fakes that outlive the engines opened over them, as a machine outlives processes."""

    runtime: FakeRuntime = field(default_factory=FakeRuntime)
    clock: HandClock = field(default_factory=HandClock)
    system_clock: bool = False
    store: MemoryStore = field(init=False)
    snapshots: MemorySnapshots = field(init=False)
    kept: FakeSnapshots = field(default_factory=FakeSnapshots)
    volumes: MemoryVolumes = field(init=False)
    stored: FakeVolumes = field(default_factory=FakeVolumes)
    templates: FakeTemplates = field(default_factory=FakeTemplates)
    images: FakeImageService = field(default_factory=FakeImageService)
    engine: Engine = field(init=False)
    durable: bool = False
    retry: float = 0.01
    residence: Residence = ALL_STAY

    def __post_init__(self) -> None:
        self.store = MemoryStore(lambda: self.clock.now().wall)
        self.snapshots = MemorySnapshots(self.store)
        self.volumes = MemoryVolumes(self.store)

    async def connect(self) -> Services:
        """Open an engine."""
        self.engine = Engine(
            runtimes={Level.CONTAINER: self.runtime},
            journal=self.store,
            sandboxes=self.store,
            snapshots=self.snapshots,
            volumes=self.volumes,
            templates=lambda _: self.templates,
            sharing=lambda _: NoSharing(),
            images=self.images,
            kept=self.kept,
            stored=self.stored,
            trees=NoTrees(),
            durable=self.durable,
            clock=None if self.system_clock else self.clock,
            retry=self.retry,
            residence=self.residence,
            memory_left=lambda: 1.0,
        )
        self.runtime.on_ended = self.engine.ended
        return await self.engine.open()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncDsec]:
        """An open client of a new engine."""
        async with AsyncDsec(self.connect) as dsec:
            yield dsec

    async def vanish(self) -> None:
        """The engine's process is killed: nothing is recorded, nothing destroyed, its connections close."""
        work = self.engine.kit.work
        self.engine.lifecycle.closing = True
        await work.close()
        for sandbox in self.runtime.sandboxes.values():
            for guest in sandbox.guests:
                await guest.cut()

    async def acts(self, sandbox: SandboxId) -> list[str]:
        """What the journal says of a sandbox: ``act:phase``, and for results how they came out."""
        words = []
        for record in await self.store.read(sandbox):
            outcome = record.payload.get("outcome", "")
            words.append(f"{record.act}:{record.phase}" + (f":{outcome}" if outcome else ""))
        return words


async def until(condition: Callable[[], object], seconds: float = 3.0) -> None:
    """Wait for something that a background job brings about.  Raises: TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - seen from outside only
            await asyncio.sleep(0.005)
