"""Turns: bounded, fair, abandoned without a trace; memory by what is measured."""

from __future__ import annotations

import asyncio
from contextvars import Context

import pytest

from dsec.control.accounts import Accounts
from dsec.control.pressure import FRESH, STALE, Pressure
from dsec.control.turns import Turns
from dsec.core.admission import (
    YOUNG,
    Expectations,
    Memory,
    check_memory,
    usual_reserve,
)
from dsec.core.quotas import NOTHING, Ledger, held
from dsec.errors import Busy, OverQuota
from dsec.model.sandbox import MIB, Limits, SandboxSpec, State
from dsec.model.tenants import Quota
from dsec.ports.admission import QuotaSource
from dsec.testing.harness import until

pytestmark = pytest.mark.anyio
GIB = 1024 * MIB


class Quotas(QuotaSource):
    def __init__(self, **quotas: Quota) -> None:
        self.quotas = quotas

    def quota(self, project: str) -> Quota:
        return self.quotas.get(project, Quota())


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Turns over a machine that has as much memory as one says."""

    def __init__(self, *, at_once: int = 1, queue: int = 20, slow: float = 1e6, **quotas: Quota) -> None:
        self.clock = Hand()
        self.memory: Memory | None = Memory(4096 * GIB, 4000 * GIB)
        self.reads = 0
        self.quotas = Quotas(**quotas)
        self.ledger = Ledger(self.quotas.quota)
        self.accounts = Accounts(self.ledger)
        self.pressure = Pressure(self._read, clock=self.clock)
        self.turns = Turns(
            self.quotas,
            self.accounts,
            self.pressure,
            at_once=at_once,
            queue=queue,
            clock=self.clock,
            slow=slow,
        )
        self.order: list[str] = []

    def _read(self) -> Memory | None:
        self.reads += 1
        return self.memory

    async def make(
        self, name: str, project: str = "p", *, go: asyncio.Event | None = None, count: int = 1
    ) -> None:
        async with self.turns.turn(spec(project), count):
            self.order.append(name)
            if go is not None:
                await go.wait()


def spec(project: str = "p", memory_mib: int = 512) -> SandboxSpec:
    return SandboxSpec(project=project, limits=Limits(memory_mib=memory_mib))


# The queue


async def test_no_more_than_so_many_at_once() -> None:
    rig = Rig(at_once=3)
    go = asyncio.Event()
    tasks = [asyncio.create_task(rig.make(str(n), go=go)) for n in range(8)]
    await until(lambda: len(rig.order) == 3)
    info = rig.turns.info()
    assert (info.in_progress, info.waiting, info.projects) == (3, 5, {"p": 5})
    go.set()
    await asyncio.gather(*tasks)
    assert rig.order == [str(n) for n in range(8)]
    assert (rig.turns.info().in_progress, rig.turns.info().admitted) == (0, 8)


async def test_beyond_the_queue_it_is_busy_at_once_and_says_when_to_ask_again() -> None:
    rig = Rig(queue=20)
    go = asyncio.Event()
    tasks = [asyncio.create_task(rig.make(str(n), go=go)) for n in range(30)]
    await until(lambda: sum(task.done() for task in tasks) == 20)
    refused = [error for task in tasks if task.done() and (error := task.exception())]
    assert len(refused) == 20
    assert all(isinstance(error, Busy) and not isinstance(error, OverQuota) for error in refused)
    assert isinstance(refused[0], Busy)
    facts = refused[0].facts
    assert float(str(facts["retry_after"])) > 0
    assert facts["bound"] == 20
    assert facts["waiting"] == rig.turns.info().waiting == 9
    other = asyncio.create_task(rig.make("other", "q"))  # one project cannot fill it all
    await until(lambda: rig.turns.info().waiting == 10)
    go.set()
    await asyncio.gather(other, *tasks, return_exceptions=True)
    assert rig.turns.info().refused == {"queue": 20}
    assert rig.ledger.all() == {}
    assert rig.ledger.reserved("p") == NOTHING


async def test_one_of_another_project_waits_one_turn() -> None:
    rig = Rig(queue=10_000)
    gates = {"first": asyncio.Event()}
    first = asyncio.create_task(rig.make("first", go=gates["first"]))
    await until(lambda: rig.order == ["first"])
    many = [asyncio.create_task(rig.make("greedy")) for _ in range(4000)]
    await until(lambda: rig.turns.info().waiting == 4000)
    late = asyncio.create_task(rig.make("late", "q"))
    await until(lambda: rig.turns.info().waiting == 4001)
    gates["first"].set()
    await asyncio.gather(first, late, *many)
    assert rig.order.index("late") <= 2


async def test_who_goes_away_leaves_the_queue() -> None:
    rig = Rig(p=Quota(sandboxes=5))
    go = asyncio.Event()
    tasks = [asyncio.create_task(rig.make(str(n), go=go)) for n in range(5)]
    await until(lambda: rig.turns.info().waiting == 4)
    assert rig.ledger.reserved("p").sandboxes == 5
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.gather(*tasks[1:4], return_exceptions=True)
    assert (rig.turns.info().waiting, rig.turns.info().abandoned) == (1, 3)
    assert rig.ledger.reserved("p").sandboxes == 2
    go.set()
    await asyncio.gather(tasks[0], tasks[4])
    assert rig.order == ["0", "4"]


async def test_who_goes_away_in_the_moment_of_his_turn_passes_it_on() -> None:
    rig = Rig()
    async with rig.turns.turn(spec()):
        second, third = (
            asyncio.create_task(rig.make(name), context=Context()) for name in ("second", "third")
        )
        await until(lambda: rig.turns.info().waiting == 2)
    assert rig.turns.info().in_progress == 1
    second.cancel()  # its turn has come, and it does not know yet
    await asyncio.gather(second, third, return_exceptions=True)
    assert rig.order == ["third"]
    assert rig.turns.info().in_progress == 0


async def test_a_turn_that_fails_gives_its_place_back() -> None:
    rig = Rig()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            async with rig.turns.turn(spec()):
                raise RuntimeError
    await rig.make("after")
    assert rig.pressure.promised() == rig.pressure.expectations.of(spec())  # of the last alone


async def test_slow_turns_give_their_place_away() -> None:
    rig = Rig(slow=0.0)
    go = asyncio.Event()
    slow = asyncio.create_task(rig.make("slow", go=go))
    await until(lambda: rig.order == ["slow"])
    rig.clock.now += 1
    await rig.make("quick", "q")
    assert rig.turns.info().slow == 1
    go.set()
    await slow
    assert (rig.turns.info().slow, rig.turns.info().in_progress) == (0, 0)


async def test_a_turn_within_a_turn_needs_no_place() -> None:
    rig = Rig()
    async with rig.turns.turn(spec()):
        await asyncio.create_task(rig.make("within"))
        lasting = asyncio.create_task(_later(rig))
    go = asyncio.Event()
    other = asyncio.create_task(rig.make("other", go=go))
    await until(lambda: "other" in rig.order)
    await until(
        lambda: rig.turns.info().waiting == 1
    )  # what was begun in a turn that is over waits as everybody
    go.set()
    await asyncio.gather(lasting, other)


async def _later(rig: Rig) -> None:
    await until(lambda: "other" in rig.order)
    await rig.make("later")


async def test_what_is_over_quota_does_not_wait() -> None:
    rig = Rig(p=Quota(sandboxes=2, memory_mib=4000))
    go = asyncio.Event()
    tasks = [asyncio.create_task(rig.make(str(n), go=go)) for n in range(2)]
    await until(lambda: rig.turns.info().waiting == 1)
    with pytest.raises(OverQuota) as caught:
        await rig.make("third")
    assert caught.value.facts["quota"] == "sandboxes"
    with pytest.raises(OverQuota):
        await rig.make("fork", "p", count=2)
    await asyncio.wait_for(_others(rig, go, tasks), 3)
    assert rig.turns.info().refused == {"sandboxes": 2}


async def _others(rig: Rig, go: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    other = asyncio.create_task(rig.make("other", "q"))
    go.set()
    await asyncio.gather(other, *tasks)


async def test_waking_reserves_what_it_adds() -> None:
    rig = Rig(p=Quota(sandboxes=1, disk_mib=1024))
    hibernated = spec()
    rig.ledger.put("p", held(State.HIBERNATED, hibernated))
    async with rig.turns.turn(hibernated, seen=State.HIBERNATED):
        assert rig.ledger.reserved("p").sandboxes == 1
        assert rig.ledger.reserved("p").disk_mib == 0
    with pytest.raises(OverQuota):
        async with rig.turns.turn(hibernated, seen=State.COLD):
            pass


# Memory


async def test_short_of_memory_is_busy_with_the_numbers() -> None:
    rig = Rig()
    rig.memory = Memory(8 * GIB, 540 * MIB)
    with pytest.raises(Busy) as caught:
        await rig.make("one")
    facts = caught.value.facts
    assert (facts["available_mib"], facts["reserve_mib"], facts["needed_mib"]) == (540, 512, 64)
    assert float(str(facts["retry_after"])) > 0
    assert "540 MiB" in caught.value.message
    assert rig.turns.info().refused == {"memory": 1}
    assert rig.turns.info().in_progress == 0
    rig.memory = Memory(8 * GIB, 4 * GIB)
    rig.clock.now += STALE + 1
    await rig.make("two")


async def test_limits_may_be_over_committed() -> None:
    rig = Rig()
    rig.memory = Memory(4 * GIB, 3 * GIB)
    for _ in range(200):
        rig.pressure.expectations.learn(spec(memory_mib=2048), 20 * MIB)
    for n in range(50):  # 100 GiB, were they what they may take
        async with rig.turns.turn(spec(memory_mib=2048)):
            rig.order.append(str(n))
    assert len(rig.order) == 50


async def test_what_was_just_made_is_promised_until_it_shows() -> None:
    rig = Rig()
    rig.memory = Memory(8 * GIB, 512 * MIB + 64 * MIB * 3)
    for _ in range(3):
        await rig.make("young")
    with pytest.raises(Busy):
        await rig.make("too many")
    rig.accounts.ended(spec())
    await rig.make("in its place")
    rig.clock.now += YOUNG
    assert rig.pressure.promised() == 0
    await rig.make("it shows now")


async def test_a_slow_one_does_not_keep_others_promised() -> None:
    rig = Rig(at_once=5)
    go = asyncio.Event()
    slow = asyncio.create_task(rig.make("slow", go=go))
    await until(lambda: rig.order == ["slow"])
    await rig.make("quick")
    rig.clock.now += YOUNG
    assert rig.pressure.promised() == rig.pressure.expectations.of(spec())
    go.set()
    await slow


async def test_memory_is_read_now_and_then_and_in_a_thread() -> None:
    rig = Rig()
    for _ in range(50):
        await rig.make("same moment")
    assert rig.reads == 1
    rig.clock.now += FRESH * 1.5
    await rig.make("renewed meanwhile")
    await until(lambda: rig.reads == 2)
    rig.clock.now += STALE * 2
    await rig.make("waited for")
    assert rig.reads == 3
    await rig.pressure.close()


async def test_nobody_tells_of_memory_and_nothing_is_refused() -> None:
    rig = Rig()
    rig.memory = None
    await rig.make("one")
    assert rig.turns.info().memory_bytes == -1


async def test_what_is_learnt_is_between_guess_and_limit() -> None:
    expectations = Expectations()
    assert expectations.of(spec(memory_mib=512)) == 64 * MIB
    assert expectations.of(spec(memory_mib=8)) == 8 * MIB
    for _ in range(500):
        expectations.learn(spec(), 30 * MIB)
    assert 30 * MIB <= expectations.of(spec()) <= 32 * MIB
    for _ in range(500):
        expectations.learn(spec(), 2048 * MIB)
    assert expectations.of(spec()) == 512 * MIB
    for n in range(1000):
        expectations.learn(spec(memory_mib=8 + n), MIB)
    assert len(expectations._kinds) <= 256


async def test_running_ones_are_learnt_from() -> None:
    rig = Rig()
    measured = asyncio.Event()

    def measure(count: int) -> list[tuple[SandboxSpec, int]]:
        assert count > 0
        measured.set()
        return [(spec(), 10 * MIB)] * 8

    learning = asyncio.create_task(rig.pressure.learn(measure, every=0.001))
    await measured.wait()
    await until(lambda: rig.pressure.expectations.of(spec()) < 40 * MIB)
    learning.cancel()


def test_reserves() -> None:
    assert usual_reserve(64 * GIB) == 4 * GIB
    assert usual_reserve(2 * GIB) == 256 * MIB
    assert usual_reserve(512 * MIB) == 128 * MIB
    check_memory(Memory(GIB, 300 * MIB), reserve=200 * MIB, promised=50 * MIB, needed=50 * MIB)
    with pytest.raises(Busy):
        check_memory(Memory(GIB, 300 * MIB), reserve=200 * MIB, promised=50 * MIB, needed=50 * MIB + 1)
