"""What lets sandboxes in, put together: turns, quotas and memory of one engine."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial

from dsec.control.accounts import Accounts
from dsec.control.admission import admitted
from dsec.control.allowance import Allowance, BuildTurns, ImageAccounts, ProjectAllowance
from dsec.control.counted import CountedSandboxes, CountedSnapshots, CountedVolumes
from dsec.control.counted_journal import CountedJournal
from dsec.control.pressure import Pressure
from dsec.control.turns import Turns
from dsec.core.quotas import Ledger
from dsec.model.tenants import Quota
from dsec.model.volumes import DEFAULT_PROJECT
from dsec.node.engine import Engine
from dsec.node.memory import MachineMemory, Measured
from dsec.ports.admission import QuotaSource
from dsec.ports.engine import Services
from dsec.ports.journal import Journal, Sandboxes, SnapshotRecords, VolumeRecords
from dsec.wiring.alerting import alerting
from dsec.wiring.settings import Settings
from dsec.wiring.templates import project_stores, weigh


@dataclass(slots=True)
class LateQuotas(QuotaSource):
    """Quotas of whoever keeps them, who is made after the engine whose journal he writes; nobody has any before."""

    source: QuotaSource | None = None

    def quota(self, project: str) -> Quota:
        return Quota() if self.source is None else self.source.quota(project)


@dataclass(slots=True)
class Reception:
    """What one shared engine is opened with, so that its sandboxes are let in. ``quotas.source`` is set by whoever keeps them."""

    settings: Settings
    quotas: LateQuotas = field(default_factory=LateQuotas)
    accounts: Accounts = field(init=False)
    pressure: Pressure = field(init=False)
    turns: Turns = field(init=False)
    builds: BuildTurns = field(init=False)
    images: ImageAccounts = field(init=False)
    _sandboxes: CountedSandboxes | None = None
    _snapshots: CountedSnapshots | None = None
    _volumes: CountedVolumes | None = None

    def __post_init__(self) -> None:
        self.accounts = Accounts(Ledger(self.quotas.quota))
        self.pressure = Pressure(MachineMemory().read, reserve=self.settings.memory_reserve)
        self.turns = Turns(
            self.quotas,
            self.accounts,
            self.pressure,
            at_once=self.settings.creations,
            queue=self.settings.creation_queue,
        )
        self.builds = BuildTurns(self.quotas)
        self.images = ImageAccounts(self.accounts.ledger, partial(weigh, self.settings.store))

    def sandboxes(self, records: Sandboxes) -> Sandboxes:
        """The records that the engine is to have instead of these."""
        self._sandboxes = CountedSandboxes(records, self.accounts)
        return self._sandboxes

    def journal(self, journal: Journal) -> Journal:
        """Likewise."""
        return CountedJournal(journal, self.accounts, self.quotas)

    def snapshots(self, records: SnapshotRecords) -> SnapshotRecords:
        """Likewise."""
        self._snapshots = CountedSnapshots(records, self.accounts)
        return self._snapshots

    def volumes(self, records: VolumeRecords) -> VolumeRecords:
        """Likewise."""
        self._volumes = CountedVolumes(records, self.accounts)
        return self._volumes

    async def load(self) -> None:
        """Count what is recorded, before the engine is opened."""
        if self._sandboxes is not None:
            await self._sandboxes.load(())
        for counted in (self._snapshots, self._volumes):
            if counted is not None:
                await counted.load()
        stores = await asyncio.to_thread(project_stores, self.settings.store)
        for project, store in stores.items():
            await self.images.load(project, store)

    def allowance(self, project: str) -> Allowance:
        """What the templates of a project may take; everybody's are changed by admins only."""
        return (
            Allowance() if project == DEFAULT_PROJECT else ProjectAllowance(project, self.builds, self.images)
        )

    def admit(self, services: Services, engine: Engine, stack: contextlib.AsyncExitStack) -> Services:
        """The engine, which has just been opened, with turns; from now on quotas count, and what runs is measured."""
        self.accounts.enforcing = True
        measured = Measured(engine.kit.table)
        learning = asyncio.get_running_loop().create_task(self.pressure.learn(measured.sample))
        stack.push_async_callback(self._close, learning)
        if self.settings.alert is not None:
            services = alerting(services, self.settings.alert, stack)
        return admitted(services, self.turns)

    async def _close(self, learning: asyncio.Task[None]) -> None:
        learning.cancel()
        await asyncio.wait([learning])
        self.turns.close()
        await self.pressure.close()
