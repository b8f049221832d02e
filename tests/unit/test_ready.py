"""The pool of ready sandboxes over a fake runtime, with a clock moved by hand: every pass is made by the test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsec.core.warmth import IDLE
from dsec.errors import Busy, RuntimeUnavailable
from dsec.model.ids import SandboxId
from dsec.model.pool import PoolKind
from dsec.model.sandbox import Limits, Metrics, SandboxSpec, Volume
from dsec.node import tending
from dsec.node.kinds import MOST_KINDS
from dsec.node.memory import available
from dsec.node.pool import Pool
from dsec.node.ready import ReadyRuntime
from dsec.node.steps import plan_for
from dsec.node.tending import CHECK, OLD, UNTAKEN
from dsec.ports.runtime import Ended, Plan, Running
from dsec.testing.fakes import FakeRuntime

pytestmark = pytest.mark.anyio
SMALL = SandboxSpec(limits=Limits(memory_mib=64))
LARGE = SandboxSpec(limits=Limits(memory_mib=256))
MIB = 2**20


class Level(FakeRuntime):
    """A fake that says what a sandbox takes. ``full``: how many it makes at most."""

    bytes = MIB
    full = 1000
    making: Callable[[], None]

    async def create(self, plan: Plan) -> Running:
        self.making()
        if len(self.sandboxes) >= self.full:
            raise Busy("it was ordered to be full")
        return await super().create(plan)

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        return replace(await super().metrics(sandbox), memory_bytes=self.bytes)


class Table:
    """A pool whose passes a test makes."""

    def __init__(self, places: int = 4, memory: int = 64 * MIB) -> None:
        self.time = 1000.0
        self.left = 0.5
        self.level = Level()
        self.level.making = self._making
        self.pool = Pool(places, memory, clock=lambda: self.time, memory_left=lambda: self.left)
        self.runtime = ReadyRuntime(self.level, plan_for, self.pool)
        self.level.on_ended = self._ended
        self.told: list[SandboxId] = []

    def _making(self) -> None:
        self.time += 0.005

    def _ended(self, ended: Ended) -> None:
        if not self.pool.ended(ended):
            self.told.append(ended.id)

    async def tend(self, seconds: float = 1.0) -> None:
        """Let time pass, and do all that is due."""
        self.time += seconds
        for _ in range(200):
            if await self.pool.tending.tend() != 0:
                break
        await self.pool.stock.settle()

    async def create(self, spec: SandboxSpec = SMALL) -> SandboxId:
        """As the engine does it."""
        sandbox = self.runtime.reserve(spec)
        await self.runtime.create(plan_for(sandbox, spec))
        await self.runtime.connect(sandbox)
        return sandbox

    def kind(self, spec: SandboxSpec = SMALL) -> PoolKind:
        return next(one for one in self.pool.info().kinds if one.limits == spec.limits)


@pytest.fixture
async def table(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Table]:
    monkeypatch.setattr(Pool, "_poke", lambda self, seconds: None)  # the test makes every pass
    table = Table()
    yield table
    await table.pool.close()


async def test_a_second_create_is_a_claim(table: Table) -> None:
    await table.create()
    await table.tend()
    made = table.level.created
    await table.create()
    assert table.level.created == made
    info = table.pool.info()
    assert (info.hits, info.misses, info.wasted) == (1, 1, 0)


async def test_a_hundred_at_once_never_share(table: Table) -> None:
    table.pool.kinds.places = 100
    for _ in range(60):
        table.runtime.reserve(SMALL)
    await table.tend()
    assert table.pool.info().ready == 60
    ids = await asyncio.gather(*[table.create() for _ in range(100)])
    assert len(set(ids)) == 100
    assert set(ids) <= table.level.sandboxes.keys()


async def test_two_kinds_are_ready_beside_one_another(table: Table) -> None:
    for _ in range(4):
        await table.create(SMALL)
        await table.create(LARGE)
        await table.tend(5)
    assert table.kind(SMALL).ready == table.kind(LARGE).ready == 1
    assert (table.kind(SMALL).hits, table.kind(LARGE).hits) == (2, 3), "only the latest may have come once"


async def test_a_claim_is_of_the_very_kind(table: Table) -> None:
    await table.create(SMALL)
    await table.tend()
    sandbox = await table.create(LARGE)
    assert table.level.sandboxes[sandbox].plan.limits == LARGE.limits
    assert table.kind(LARGE).misses == 1


async def test_a_pinned_base_is_another_kind_than_an_unpinned_one(table: Table) -> None:
    await table.create(SMALL)
    await table.tend()
    await table.create(replace(SMALL, base_digest="sha256:" + "a" * 64))
    assert [kind.misses for kind in table.pool.info().kinds] == [1, 1]


async def test_what_nobody_asks_for_any_more_is_ended(table: Table) -> None:
    await table.create()
    await table.tend()
    assert table.pool.info().ready == 1
    await table.tend(IDLE + 1)
    info = table.pool.info()
    assert (info.ready, info.wasted, len(table.level.sandboxes)) == (0, 1, 1)
    assert await table.pool.tending.tend() is None, "an idle pool sleeps"


async def test_memory_bounds_the_pool_as_measured(table: Table) -> None:
    table.pool.kinds.places = 100
    table.level.bytes = 20 * MIB
    for _ in range(20):
        table.runtime.reserve(SMALL)
    await table.tend()
    info = table.pool.info()
    assert info.ready == 3
    assert info.memory_bytes == 60 * MIB <= info.memory_most


async def test_when_the_pool_is_full_the_least_valuable_kind_loses(table: Table) -> None:
    for _ in range(2):
        await table.create(LARGE)
        await table.tend()
    assert table.kind(LARGE).ready == 1
    for step in range(100):
        await table.create(SMALL)
        if step % 4 == 3:
            await table.tend()
    assert table.kind(SMALL).ready == 4
    assert (table.kind(LARGE).ready, table.kind(LARGE).wasted) == (0, 1)


async def test_kinds_that_come_once_stop_being_made_ahead(table: Table) -> None:
    for memory in range(64, 164):
        await table.create(SandboxSpec(limits=Limits(memory_mib=memory)))
        await table.tend()
    info = table.pool.info()
    assert len(info.kinds) == MOST_KINDS
    assert table.level.created <= 110
    assert info.misses == 100


async def test_volumes_are_never_made_ahead(table: Table, tmp_path: Path) -> None:
    spec = replace(SMALL, volumes=(Volume(tmp_path, "/data"),))
    await table.create(spec)
    await table.tend()
    assert table.level.created == 1
    assert table.pool.info().kinds == ()


# Health


async def test_one_whose_init_died_is_never_handed_out(table: Table) -> None:
    await table.create()
    await table.tend()
    (dead,) = table.pool.stock.all()
    await table.level.die(dead.id)
    assert await table.create() != dead.id
    assert table.told == []
    assert table.pool.info().wasted == 1


async def test_one_that_is_lost_unheard_is_never_handed_out(table: Table) -> None:
    await table.create()
    await table.tend()
    (one,) = table.pool.stock.all()
    table.level.sandboxes[one.id].dead = True
    assert await table.create() != one.id


async def test_one_that_does_not_answer_is_ended(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tending, "PING", 0.05)
    await table.create()
    await table.tend()
    (mute,) = table.pool.stock.all()
    table.level.sandboxes[mute.id].mute = True
    await table.tend(CHECK + 1)
    assert mute.id not in table.level.sandboxes
    assert table.pool.info().wasted == 1


async def test_a_claim_during_a_check_is_its_claimers(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tending, "PING", 0.05)
    await table.create()
    await table.tend()
    (one,) = table.pool.stock.all()
    table.level.sandboxes[one.id].mute = True
    table.time += CHECK + 1
    await table.pool.tending.tend()
    assert await table.create() == one.id
    await table.pool.stock.settle()
    assert one.id in table.level.sandboxes


async def test_one_that_is_old_is_replaced(table: Table) -> None:
    table.pool.kinds.places = 2
    table.runtime.reserve(SMALL)
    table.runtime.reserve(SMALL)
    await table.tend()
    first = {one.id for one in table.pool.stock.all()}
    assert len(first) == 2
    for _ in range(int(OLD / 100) + 2):
        for one in table.pool.stock.all():
            one.kind.demand.ask(table.time)  # asked for, and served by others
        await table.tend(100)
    assert first.isdisjoint({one.id for one in table.pool.stock.all()})
    assert first.isdisjoint(table.level.sandboxes)


async def test_one_that_dies_between_claim_and_create_is_made_anew(table: Table) -> None:
    await table.create()
    await table.tend()
    sandbox = table.runtime.reserve(SMALL)
    await table.level.die(sandbox)
    assert table.told == []
    await table.runtime.create(plan_for(sandbox, SMALL))
    assert not (await table.runtime.connect(sandbox)).lost
    assert not table.level.sandboxes[sandbox].dead


async def test_one_that_dies_after_it_was_created_is_news(table: Table) -> None:
    await table.create()
    await table.tend()
    sandbox = table.runtime.reserve(SMALL)
    await table.runtime.create(plan_for(sandbox, SMALL))
    await table.level.die(sandbox)
    assert table.told == [sandbox]


async def test_a_claim_that_was_never_created_is_ended(table: Table) -> None:
    await table.create()
    await table.tend()
    sandbox = table.runtime.reserve(SMALL)
    assert table.runtime.spare(sandbox)
    await table.tend(UNTAKEN + CHECK)
    assert sandbox not in table.level.sandboxes


async def test_what_is_nobodys_is_not_listed_and_is_spare(table: Table) -> None:
    mine = await table.create()
    await table.tend()
    (ready,) = table.pool.stock.all()
    assert [one.id for one in await table.runtime.list()] == [mine]
    assert table.runtime.spare(ready.id)
    assert not table.runtime.spare(mine)


# Failures


async def test_a_failure_backs_off_and_disturbs_no_create(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    await table.create()
    table.level.broken = True
    with caplog.at_level(logging.WARNING, "dsec.pool"):
        for _ in range(600):
            await table.tend(0.1)
    assert table.level.created < 12
    assert len(caplog.records) == 1
    table.level.broken = False
    await table.create()
    await table.tend(61)
    assert table.pool.info().ready == 1


async def test_ready_ones_that_keep_dying_are_made_later_and_later(table: Table) -> None:
    await table.create()
    for _ in range(600):
        await table.tend(0.1)
        for one in table.pool.stock.all():
            await table.level.die(one.id)
    await table.pool.stock.settle()
    assert 2 < table.level.created < 12
    assert len(table.level.sandboxes) == 1


async def test_failing_for_days_stays_a_failure(table: Table) -> None:
    await table.create()
    (kind,) = table.pool.kinds
    kind.failures = 5000
    kind.put_off(table.time)
    assert kind.retry == table.time + 60


async def test_nothing_is_made_while_the_machine_is_short_of_memory(table: Table) -> None:
    await table.create()
    await table.tend()
    table.left = 0.01
    await table.tend(2)
    assert table.pool.info().short
    assert table.pool.info().ready == 0
    await table.create()
    await table.tend(2)
    assert table.pool.info().ready == 0
    table.left = 0.5
    await table.tend(2)
    assert table.pool.info().ready == 1


async def test_ready_ones_give_way_to_a_create_that_meets_a_bound(table: Table) -> None:
    await table.create(SMALL)
    await table.tend()
    table.level.full = len(table.level.sandboxes)
    sandbox = await table.create(LARGE)
    assert sandbox in table.level.sandboxes
    assert table.pool.info().ready == 0
    with pytest.raises(Busy):  # nothing is left that could give way
        await table.create(LARGE)


async def test_one_that_cannot_be_ended_troubles_nobody(table: Table) -> None:
    await table.create()
    await table.tend()
    (one,) = table.pool.stock.all()
    table.level.undead.add(one.id)
    await table.tend(IDLE + 1)
    assert not table.runtime.spare(one.id), "the reconciler may take it"
    await table.create()
    table.level.undead.clear()


# Asked for ahead


async def test_some_are_ready_before_anybody_comes() -> None:
    table = Table()
    try:
        assert await table.runtime.warm(SMALL, 3) == 3
        for _ in range(3):
            await table.create()
        assert (table.pool.info().hits, table.pool.info().misses) == (3, 0)
    finally:
        await table.pool.close()
    assert len(table.level.sandboxes) == 3, "closing ends what nobody claimed, and no more"


async def test_warming_stays_within_the_memory(table: Table) -> None:
    table = Table(places=10, memory=5 * MIB)
    table.level.bytes = 2 * MIB
    try:
        assert await table.runtime.warm(SMALL, 10) == 2
    finally:
        await table.pool.close()


async def test_warming_tells_why_nothing_can_be_made() -> None:
    table = Table()
    table.level.broken = True
    try:
        with pytest.raises(RuntimeUnavailable, match="ordered"):
            await table.runtime.warm(SMALL, 1)
    finally:
        await table.pool.close()


async def test_the_task_fills_and_closing_leaves_nothing() -> None:
    table = Table()
    table.runtime.reserve(SMALL)
    table.time += 1
    async with asyncio.timeout(5):
        while not table.pool.info().ready:  # noqa: ASYNC110 - made by the pool's own task
            await asyncio.sleep(0.005)
    await table.pool.close()
    await table.pool.close()
    assert table.level.sandboxes == {}
    assert table.runtime.reserve(SMALL)


def test_the_memory_that_is_left(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    250 kB\n")
    assert available(told) == 0.25
    told.write_text("nothing")
    assert available(told) == 1.0
    assert available(tmp_path / "absent") == 1.0
    assert 0.0 < available() <= 1.0


async def test_whoever_waits_for_a_kind_that_is_forgotten_waits_no_longer(table: Table) -> None:
    """While it is made ahead, more other kinds are asked for than are followed."""
    waiting = asyncio.ensure_future(table.runtime.warm(SMALL, 3))
    await asyncio.sleep(0)
    for number in range(MOST_KINDS + 1):
        await table.create(SandboxSpec(limits=Limits(memory_mib=300 + number)))
    await table.tend()
    async with asyncio.timeout(5):
        assert await waiting == 0
