"""Sandboxes that are hibernated or cold: what wakes them, what does not, and what an engine finds that was cut off on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from dsec.client.aio import AsyncDsec
from dsec.errors import (
    BadRequest,
    Conflict,
    NotFound,
    RuntimeUnavailable,
    SandboxFailed,
    UnknownOutcome,
    Unsupported,
)
from dsec.model.sandbox import Flag, SandboxSpec, State
from dsec.node.dormancy import WAKES
from dsec.node.steps import plan_for
from dsec.testing.fakes import FakeRuntime
from dsec.testing.harness import Harness, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def harness() -> Harness:
    return Harness(durable=True)


@pytest.fixture
async def dsec(harness: Harness) -> AsyncIterator[AsyncDsec]:
    async with harness.open() as dsec:
        yield dsec


# Hibernating


async def test_what_sleeps_takes_nothing_and_wakes_as_it_was(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create(ttl=100)
    await sb.files.write("a", b"kept")
    slept = await sb.hibernate()
    assert slept.state is State.HIBERNATED
    assert sb.id not in harness.engine.kit.table
    assert sb.id not in harness.runtime.sandboxes
    harness.clock.advance(30)
    assert await sb.files.read("a") == b"kept"
    woken = await sb.inspect()
    assert (woken.state, woken.session_id, woken.expires_at) == (
        State.RUNNING,
        sb.info.session_id,
        slept.expires_at,
    )
    assert harness.runtime.deadlines[sb.id] == pytest.approx(woken.created_boot + 100, abs=2)
    assert [act for act in await harness.acts(sb.id) if "hibernate" in act or "wake" in act] == [
        "sandbox.hibernate:intent",
        "sandbox.hibernate:result:ok",
        "sandbox.wake:intent",
        "sandbox.wake:result:ok",
    ]


async def test_looking_wakes_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.hibernate()
    (cold,) = await dsec.sandboxes.create_many(count=1)
    for id in (sb.id, cold):
        found = await dsec.sandboxes.get(id)
        await found.events()
        await found.execs()
        assert (await found.metrics()).pids == 0
        await found.extend(50)
        await found.hibernate()
    await dsec.sandboxes.list()
    assert harness.runtime.created == 1
    assert len(list(harness.engine.kit.table)) == 0


async def test_every_act_wakes(dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    acts = (
        lambda: sb.exec(["true"]),
        lambda: sb.start(["true"]),
        lambda: sb.files.write("a", b""),
        sb.files.list,
        lambda: sb.files.stat("a"),
        sb.resume,
    )
    for act in acts:
        await sb.hibernate()
        await act()
        assert (await sb.inspect()).state is State.RUNNING


async def test_many_who_ask_at_once_wake_it_once(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.hibernate()
    results = await asyncio.gather(*[sb.exec(["true"]) for _ in range(50)])
    assert all(result.ok for result in results)
    assert harness.runtime.created == 2


async def test_only_so_many_are_woken_at_the_same_time(harness: Harness, dsec: AsyncDsec) -> None:
    ids = await dsec.sandboxes.create_many(count=3 * WAKES)
    harness.runtime.stuck = asyncio.Event()
    boxes = [await dsec.sandboxes.get(id) for id in ids]
    asked = [asyncio.ensure_future(one.exec(["true"])) for one in boxes]
    await until(lambda: harness.runtime.created == WAKES)
    await asyncio.sleep(0.05)
    assert harness.runtime.created == WAKES
    harness.runtime.stuck.set()
    assert all(result.ok for result in await asyncio.gather(*asked))


async def test_commands_in_flight_are_told_and_recorded(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    p = await sb.start(["sleep", "60"])
    waiting = asyncio.ensure_future(p.wait())
    await asyncio.sleep(0.01)
    await sb.hibernate()
    with pytest.raises(UnknownOutcome, match="hibernated"):
        await waiting
    assert "exec:result:unknown_outcome" in await harness.acts(sb.id)


async def test_a_paused_one_hibernates_and_wakes_running(dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.pause()
    await sb.hibernate()
    with pytest.raises(Conflict, match="hibernated"):
        await sb.pause()
    assert (await sb.resume()).state is State.RUNNING


async def test_a_level_without_files_says_so() -> None:
    harness = Harness(runtime=FakeRuntime(flags=frozenset({Flag.PAUSE})))
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        with pytest.raises(Unsupported, match="hibernate"):
            await sb.hibernate()
        assert (await sb.exec(["true"])).ok


# Waking that fails


async def test_a_wake_that_fails_leaves_it_as_dormant_as_before(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.files.write("a", b"kept")
    await sb.hibernate()
    (cold,) = await dsec.sandboxes.create_many(count=1)
    harness.runtime.broken = True
    for id, state in ((sb.id, State.HIBERNATED), (cold, State.COLD)):
        found = await dsec.sandboxes.get(id)
        with pytest.raises(RuntimeUnavailable):
            await found.exec(["true"])
        assert (await found.inspect()).state is state
        assert id not in harness.engine.kit.table
    harness.runtime.broken = False
    assert await sb.files.read("a") == b"kept"
    assert (await (await dsec.sandboxes.get(cold)).exec(["true"])).ok


async def test_a_wake_that_cannot_be_recorded_is_undone(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.files.write("a", b"kept")
    await sb.hibernate()
    harness.runtime.stuck = asyncio.Event()
    asked = asyncio.ensure_future(sb.exec(["true"]))
    await until(lambda: harness.runtime.created == 2)
    harness.store.full = True
    harness.runtime.stuck.set()
    with pytest.raises(Exception, match="full"):
        await asked
    assert sb.id not in harness.runtime.sandboxes
    harness.store.full = False
    assert await sb.files.read("a") == b"kept"


async def test_files_that_are_gone_make_it_lost(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.hibernate()
    harness.runtime.parked.clear()
    with pytest.raises(SandboxFailed, match="files"):
        await sb.exec(["true"])
    assert (await sb.inspect()).state is State.LOST
    await sb.destroy()


async def test_what_does_not_end_is_tried_again(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    harness.runtime.undead.add(sb.id)
    with pytest.raises(Exception, match="ordered"):
        await sb.hibernate()
    assert [problem.what for problem in await dsec.problems()] == ["hibernate"]
    harness.runtime.undead.clear()
    await until(lambda: sb.id not in harness.runtime.sandboxes)
    await until(lambda: sb.id not in harness.engine.kit.table)
    assert await dsec.problems() == ()
    assert (await sb.exec(["true"])).ok


# Destroying


async def test_destroying_dormant_ones_makes_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.hibernate()
    (cold,) = await dsec.sandboxes.create_many(count=1)
    other = await dsec.sandboxes.get(cold)
    waiting = [asyncio.ensure_future(one.wait()) for one in (sb, other)]
    await asyncio.sleep(0)
    await sb.destroy()
    await other.destroy("enough")
    await other.destroy()
    assert [info.state for info in await asyncio.gather(*waiting)] == [State.GONE, State.GONE]
    assert harness.runtime.created == 1
    assert harness.runtime.parked == {}
    with pytest.raises(NotFound):
        await other.exec(["true"])
    assert await harness.acts(cold) == ["sandbox.create:note", "sandbox.destroy:note:ok"]


async def test_destroying_one_while_it_wakes(harness: Harness, dsec: AsyncDsec) -> None:
    for sleep in (True, False):
        sb = await dsec.sandboxes.create(cold=not sleep)
        if sleep:
            await sb.hibernate()
        before = harness.runtime.created
        harness.runtime.stuck = asyncio.Event()
        asked = asyncio.ensure_future(sb.exec(["true"]))
        await until(lambda: harness.runtime.created > before)  # noqa: B023
        ending = asyncio.ensure_future(sb.destroy())
        await asyncio.sleep(0.01)
        harness.runtime.stuck.set()
        harness.runtime.stuck = None
        with pytest.raises(Conflict):
            await asked
        await ending
        assert (await sb.inspect()).state is State.GONE
        assert sb.id not in harness.runtime.sandboxes


# Cold ones


async def test_a_cold_one_is_made_by_its_first_act(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create(cold=True, env={"A": "1"})
    assert sb.info.state is State.COLD
    assert harness.runtime.created == 0
    assert b"A=1" in (await sb.exec(["env"])).stdout
    assert sb.info.session_id.encode() in (await sb.exec(["env"])).stdout
    assert (await sb.inspect()).state is State.RUNNING


async def test_wrong_counts(dsec: AsyncDsec) -> None:
    for count in (0, -1, 10_000_000):
        with pytest.raises(BadRequest):
            await dsec.sandboxes.create_many(count=count)


# Deadlines


async def test_dormant_ones_expire_by_the_clock_that_nobody_sets(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create(ttl=100)
    await sb.hibernate()
    cold = await dsec.sandboxes.create(cold=True, ttl=100)
    forever = await dsec.sandboxes.create(cold=True)
    harness.clock.wall += 10_000  # somebody sets the clock
    assert await harness.engine.reaper.sweep() == 0
    harness.clock.wall -= 50_000  # and sets it back
    harness.clock.advance(99)
    assert await harness.engine.reaper.sweep() == 0
    harness.clock.advance(2)
    assert await harness.engine.reaper.sweep() == 2
    for one in (sb, cold):
        assert ((await one.inspect()).state, (await one.inspect()).reason) == (State.GONE, "ttl")
    assert (await forever.inspect()).state is State.COLD


async def test_many_that_are_not_due_hide_none_that_is(
    harness: Harness, dsec: AsyncDsec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.node.reaper.BATCH", 4)
    await dsec.sandboxes.create_many(count=20, ttl=500)  # the wall says that they expire first
    harness.clock.wall += 1000
    due = await dsec.sandboxes.create(cold=True, ttl=10)
    harness.clock.advance(11)
    assert await harness.engine.reaper.sweep() == 1
    assert (await due.inspect()).state is State.GONE


async def test_one_whose_time_is_up_is_not_woken(harness: Harness, dsec: AsyncDsec) -> None:
    cold = await dsec.sandboxes.create(cold=True, ttl=10)
    harness.clock.advance(11)
    with pytest.raises(NotFound):
        await cold.exec(["true"])
    with pytest.raises(NotFound):
        await cold.extend(100)
    assert harness.runtime.created == 0


# Engines that come back


async def test_after_a_restart_dormant_ones_are_rows_and_files(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        await sb.files.write("a", b"kept")
        await sb.hibernate()
        ids = await dsec.sandboxes.create_many(count=100)
    async with harness.open() as dsec:
        assert len(list(harness.engine.kit.table)) == 0
        assert await (await dsec.sandboxes.get(sb.id)).files.read("a") == b"kept"
        assert (await (await dsec.sandboxes.get(ids[7])).exec(["true"])).ok


async def test_what_was_half_put_to_rest_is_put_to_rest(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        await sb.files.write("a", b"kept")
        await sb.start(["sleep", "60"])
        harness.runtime.undead.add(sb.id)  # recorded, and then the engine dies
        with pytest.raises(Exception, match="ordered"):
            await sb.hibernate()
        await harness.vanish()
    harness.runtime.undead.clear()
    async with harness.open() as dsec:
        assert sb.id not in harness.runtime.sandboxes
        found = await dsec.sandboxes.get(sb.id)
        assert found.info.state is State.HIBERNATED
        assert all(info.exit is not None for info in await found.execs())
        assert await found.files.read("a") == b"kept"


async def test_what_was_half_woken_is_put_to_rest(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        await sb.files.write("a", b"kept")
        await sb.hibernate()
        cold = await dsec.sandboxes.create(cold=True)
        for one in (sb, cold):
            await harness.runtime.create(replace(plan_for(one.id, SandboxSpec()), parked=one is sb))
        await harness.vanish()
    async with harness.open() as dsec:
        assert harness.runtime.sandboxes == {}
        assert await (await dsec.sandboxes.get(sb.id)).files.read("a") == b"kept"
        assert (await (await dsec.sandboxes.get(cold.id)).inspect()).state is State.COLD


async def test_a_restart_of_the_machine_keeps_files(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb, paused = await dsec.sandboxes.create(ttl=1000), await dsec.sandboxes.create()
        for one in (sb, paused):
            await one.files.write("a", b"kept")
        p = await sb.start(["sleep", "60"])
        await paused.pause()
        await harness.vanish()
    for sandbox in list(harness.runtime.sandboxes):
        await harness.runtime.park(sandbox)
    harness.clock.boot_id, harness.clock.boottime = "boot-2", 5.0
    harness.clock.wall += 100
    async with harness.open() as dsec:
        for one in (sb, paused):
            found = await dsec.sandboxes.get(one.id)
            assert found.info.state is State.HIBERNATED
            assert "restarted" in found.info.reason
            assert await found.files.read("a") == b"kept"
        with pytest.raises(UnknownOutcome):
            await (await (await dsec.sandboxes.get(sb.id)).attach(p.id)).wait()
        await (await dsec.sandboxes.get(sb.id)).hibernate()
        harness.clock.advance(899)
        assert await harness.engine.reaper.sweep() == 0
        harness.clock.advance(2)  # a time to live goes on, by the wall clock
        assert await harness.engine.reaper.sweep() == 1


async def test_without_a_restart_of_the_machine_what_is_missing_is_lost(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        await harness.vanish()
    await harness.runtime.park(sb.id)
    async with harness.open() as dsec:
        assert (await (await dsec.sandboxes.get(sb.id)).inspect()).state is State.LOST


async def test_hibernated_ones_without_files_are_lost_at_the_start(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        await sb.hibernate()
    harness.runtime.parked.clear()
    async with harness.open() as dsec:
        assert (await (await dsec.sandboxes.get(sb.id)).inspect()).state is State.LOST
