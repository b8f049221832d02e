"""An engine that comes back: adopts what runs, loses what does not, ends what nobody knows, finds every outcome."""

from __future__ import annotations

import asyncio

import pytest

from dsec.errors import NotFound, RuntimeUnavailable, UnknownOutcome
from dsec.model.ids import new_sandbox_id
from dsec.model.sandbox import Level, Limits, State
from dsec.ports.runtime import Plan
from dsec.testing.harness import Harness, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def harness() -> Harness:
    return Harness(durable=True)


async def test_a_durable_engine_leaves_and_finds_its_sandboxes(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create(ttl=100)
        p = await sb.start(["sleep", "0.2"])
        waiting = asyncio.ensure_future(p.wait())
        await asyncio.sleep(0.01)
    with pytest.raises(RuntimeUnavailable, match="closing"):
        await waiting
    harness.clock.advance(10)
    async with harness.open() as dsec:
        again = await dsec.sandboxes.get(sb.id)
        assert again.info.state is State.RUNNING
        assert again.info.session_id == sb.info.session_id
        result = await (await again.attach(p.id)).wait()
        assert result.exit_code == 0
        assert (await again.exec(["true"])).ok
        await again.destroy()
    acts = await harness.acts(sb.id)
    assert acts.count("exec:result:ok") == 2


async def test_the_true_outcome_is_found_after_a_kill(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        running = await sb.start(["sleep", "60"])
        ended = await sb.start(["sleep", "0.05"])
        await harness.vanish()
    await asyncio.sleep(0.1)
    async with harness.open() as dsec:
        again = await dsec.sandboxes.get(sb.id)
        assert (await (await again.attach(ended.id)).wait()).exit_code == 0
        p = await again.attach(running.id)
        await p.kill()
        assert (await p.wait()).signal == 9
        assert {info.id: info.exit is None for info in await again.execs()} == {
            running.id: False,
            ended.id: False,
        }


async def test_a_command_that_init_does_not_know_has_no_known_outcome(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        p = await sb.start(["sleep", "60"])
        await harness.vanish()
    harness.runtime.sandboxes[sb.id].processes.clear()
    async with harness.open() as dsec:
        again = await dsec.sandboxes.get(sb.id)
        assert "exec:result:unknown_outcome" in await harness.acts(sb.id)
        with pytest.raises(UnknownOutcome):
            await (await again.attach(p.id)).wait()


async def test_what_is_recorded_and_does_not_run_is_lost(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        await sb.start(["sleep", "60"])
        await harness.vanish()
    await harness.runtime.sandboxes[sb.id].end()
    async with harness.open() as dsec:
        info = await (await dsec.sandboxes.get(sb.id)).inspect()
        assert info.state is State.LOST
        assert "did not run any more" in info.reason
        assert harness.runtime.sandboxes == {}
        assert "exec:result:unknown_outcome" in await harness.acts(sb.id)
        await (await dsec.sandboxes.get(sb.id)).destroy()
        assert await dsec.sandboxes.list() == ()


async def test_what_runs_and_is_not_recorded_is_ended(harness: Harness) -> None:
    stray = new_sandbox_id()
    await harness.runtime.create(Plan(id=stray, level=Level.CONTAINER, limits=Limits()))
    async with harness.open():
        assert harness.runtime.sandboxes == {}
    (note,) = await harness.store.read("engine")
    assert note.payload == {"sandbox": stray}


@pytest.mark.parametrize("made", [False, True])
async def test_a_half_made_one_is_finished(harness: Harness, made: bool) -> None:
    async with harness.open() as dsec:
        harness.runtime.stuck = asyncio.Event()
        creating = asyncio.ensure_future(dsec.sandboxes.create())
        await until(lambda: harness.runtime.created)
        (row,) = await dsec.sandboxes.list()
        creating.cancel()
        await harness.vanish()
    harness.runtime.stuck = None
    if made:
        await harness.runtime.create(Plan(id=row.id, level=Level.CONTAINER, limits=Limits()))
    async with harness.open() as dsec:
        info = await (await dsec.sandboxes.get(row.id)).inspect()
        assert (info.state, info.reason) == (State.FAILED, "the engine ended while it was being made")
        assert harness.runtime.sandboxes == {}


async def test_a_half_destroyed_one_is_finished(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        harness.runtime.undead.add(sb.id)
        with pytest.raises(Exception, match="ordered"):
            await sb.destroy(reason="me")
        await harness.vanish()
    harness.runtime.undead.clear()
    async with harness.open() as dsec:
        info = await (await dsec.sandboxes.get(sb.id)).inspect()
        assert (info.state, info.reason) == (State.GONE, "me")
        assert harness.runtime.sandboxes == {}


async def test_one_that_cannot_be_removed_does_not_stop_the_others(harness: Harness) -> None:
    async with harness.open() as dsec:
        bad, good = await dsec.sandboxes.create(), await dsec.sandboxes.create()
        harness.runtime.undead.add(bad.id)
        with pytest.raises(Exception, match="ordered"):
            await bad.destroy()
        await harness.vanish()
    async with harness.open() as dsec:
        assert (await (await dsec.sandboxes.get(good.id)).exec(["true"])).ok
        (problem,) = await dsec.problems()
        assert problem.sandbox == bad.id
        harness.runtime.undead.clear()
        await until(lambda: not harness.engine.janitor.problems())


async def test_a_paused_one_stays_paused_and_its_commands_wait(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        p = await sb.start(["sleep", "60"])
        await sb.pause()
        await harness.vanish()
    harness.runtime.sandboxes[sb.id].frozen = False  # as if the engine had died before the act
    async with harness.open() as dsec:
        again = await dsec.sandboxes.get(sb.id)
        assert again.info.state is State.PAUSED
        assert harness.runtime.sandboxes[sb.id].frozen
        await again.resume()
        await until(lambda: harness.engine.kit.table.find(sb.id).runs)  # type: ignore[union-attr]
        q = await again.attach(p.id)
        await q.kill()
        assert (await q.wait()).signal == 9


async def test_a_deadline_that_passed_meanwhile_ends_it(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create(ttl=100)
    harness.clock.boottime += 101
    harness.clock.wall -= 5000  # somebody set the clock
    async with harness.open() as dsec:
        info = await (await dsec.sandboxes.get(sb.id)).inspect()
        assert (info.state, info.reason) == (State.GONE, "ttl")


async def test_the_periodic_pass_finds_a_death_nobody_told(harness: Harness) -> None:
    async with harness.open() as dsec:
        sb, other = await dsec.sandboxes.create(), await dsec.sandboxes.create()
        await harness.runtime.sandboxes[sb.id].end()
        await harness.engine.reconciler.compare()
        assert (await sb.inspect()).state is State.FAILED
        assert (await other.exec(["true"])).ok


async def test_the_periodic_pass_harms_nothing_in_the_making(harness: Harness) -> None:
    async with harness.open() as dsec:

        async def busy() -> None:
            for _ in range(20):
                sb = await dsec.sandboxes.create()
                assert (await sb.exec(["true"])).ok
                await sb.destroy()

        jobs = [asyncio.ensure_future(busy()) for _ in range(5)]
        while not all(job.done() for job in jobs):
            await harness.engine.reconciler.compare()
            await asyncio.sleep(0)
        await asyncio.gather(*jobs)
        assert await dsec.problems() == ()


async def test_an_unknown_exec_of_a_gone_sandbox(harness: Harness) -> None:
    async with harness.open() as dsec:
        with pytest.raises(NotFound):
            await dsec.sandboxes.get(new_sandbox_id())
