"""Whether a sandbox that nobody uses stays: the decision, its reason, and what was decided done by an engine over fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from dsec.client.aio import AsyncDsec
from dsec.core.residence import ALL_STAY, SERVED, Facts, Residence, Stay, decide
from dsec.errors import BadRequest, Conflict, UnknownOutcome
from dsec.model.sandbox import Hibernate, State
from dsec.testing.harness import Harness

POLICY = Residence(freeze=100.0, hibernate=1000.0)
QUIET = Facts(
    quiet=50.0,
    gap=0.0,
    acts=0,
    commands=0,
    processes=0,
    cpu=0.0,
    memory_left=0.9,
    frozen=False,
    can_freeze=True,
    can_hibernate=True,
    hibernate=Hibernate.AUTO,
)


@pytest.mark.parametrize(
    ("facts", "stay", "reason"),
    [
        ({}, Stay.RUNNING, "no act for 50 s; it may rest after 100 s"),
        ({"quiet": 100.0}, Stay.FROZEN, "no act for 100 s"),
        ({"quiet": 1000.0}, Stay.HIBERNATED, "no act for 1000 s"),
        ({"quiet": 1000.0, "acts": 1}, Stay.RUNNING, "in use: 1 acts in progress"),
        ({"quiet": 1000.0, "processes": 2}, Stay.FROZEN, "no act for 1000 s; 2 processes would end"),
        ({"quiet": 1000.0, "commands": 1}, Stay.FROZEN, "1 commands of it have not ended"),
        ({"quiet": 1000.0, "processes": -1}, Stay.FROZEN, "it is not known how many processes would end"),
        (
            {"quiet": 1000.0, "processes": 2, "hibernate": Hibernate.FILES},
            Stay.HIBERNATED,
            "no act for 1000 s",
        ),
        ({"quiet": 1e6, "hibernate": Hibernate.NEVER}, Stay.FROZEN, "it says hibernate: never"),
        ({"quiet": 1e6, "can_hibernate": False}, Stay.FROZEN, "keeps no files"),
        ({"quiet": 1e6, "can_hibernate": False, "can_freeze": False}, Stay.RUNNING, "no act"),
        ({"quiet": 1e6, "ends_idle": True}, Stay.FROZEN, "ends by itself"),
        ({"quiet": 1000.0, "processes": 1, "cpu": 0.5}, Stay.RUNNING, "at work (50% of a CPU)"),
        ({"quiet": 1000.0, "cpu": 0.5, "hibernate": Hibernate.FILES}, Stay.RUNNING, "at work"),
        ({"quiet": 1000.0, "gap": 900.0}, Stay.FROZEN, "(one in 900 s on average)"),
        ({"quiet": 1800.0, "gap": 900.0}, Stay.HIBERNATED, "no act for 1800 s"),
        ({"quiet": 4000.0, "gap": 1e9}, Stay.HIBERNATED, "no act for 4000 s"),
        ({"quiet": 25.0, "memory_left": 0.1}, Stay.FROZEN, "10% of memory is left"),
        ({"quiet": 250.0, "memory_left": 0.1}, Stay.HIBERNATED, "10% of memory is left"),
        ({"quiet": 150.0, "frozen": True}, Stay.FROZEN, "hibernated after 1000 s"),
        ({"quiet": 1000.0, "frozen": True, "processes": 1}, Stay.FROZEN, "1 processes would end"),
    ],
)
def test_what_is_decided_and_why(facts: dict[str, object], stay: Stay, reason: str) -> None:
    decision = decide(replace(QUIET, **facts), POLICY)  # type: ignore[arg-type]
    assert decision.stay is stay
    assert reason in decision.reason
    assert decision.again >= 1


def test_an_engine_without_thresholds_lets_everything_run() -> None:
    assert decide(replace(QUIET, quiet=1e9), ALL_STAY).stay is Stay.RUNNING
    assert SERVED.on


@pytest.mark.parametrize("wrong", [{"freeze": 1.0}, {"freeze": 100.0, "hibernate": 50.0}, {"freeze": -1.0}])
def test_thresholds_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match="residence"):
        Residence(**wrong)


# Done


@pytest.fixture
def harness() -> Harness:
    return Harness(durable=True, residence=POLICY)


@pytest.fixture
async def dsec(harness: Harness) -> AsyncIterator[AsyncDsec]:
    async with harness.open() as dsec:
        yield dsec


@pytest.mark.anyio
async def test_one_that_nobody_uses_is_frozen_and_thawed_by_the_next_act(
    harness: Harness, dsec: AsyncDsec
) -> None:
    sb = await dsec.sandboxes.create()
    assert "running: " in (await sb.inspect()).residence
    harness.clock.advance(150)
    await harness.engine.resting.look()
    frozen = await sb.inspect()
    assert frozen.state is State.PAUSED
    assert frozen.residence.startswith("frozen: no act for 150 s")
    assert frozen.reason.startswith("no act for 150 s")
    assert (await sb.exec(["true"])).ok
    assert (await sb.inspect()).state is State.RUNNING


@pytest.mark.anyio
async def test_a_pause_that_somebody_asked_for_is_not_ended_by_an_act(
    harness: Harness, dsec: AsyncDsec
) -> None:
    asked, adopted = await dsec.sandboxes.create(), await dsec.sandboxes.create()
    await asked.pause()
    harness.clock.advance(150)
    await harness.engine.resting.look()
    await adopted.pause()  # frozen already: from now on because somebody wants it
    harness.clock.advance(10_000)
    await harness.engine.resting.look()
    for sb in (asked, adopted):
        with pytest.raises(Conflict, match="paused"):
            await sb.exec(["true"])
        assert "somebody wants it" in (await sb.inspect()).residence
        await sb.resume()
        assert (await sb.exec(["true"])).ok


@pytest.mark.anyio
async def test_a_restart_remembers_why_one_is_paused(harness: Harness) -> None:
    async with harness.open() as dsec:
        idle, asked = await dsec.sandboxes.create(), await dsec.sandboxes.create()
        await asked.pause()
        harness.clock.advance(150)
        await harness.engine.resting.look()
    async with harness.open() as dsec:
        assert (await (await dsec.sandboxes.get(idle.id)).exec(["true"])).ok
        with pytest.raises(Conflict):
            await (await dsec.sandboxes.get(asked.id)).exec(["true"])


@pytest.mark.anyio
async def test_only_what_has_no_processes_is_hibernated(harness: Harness, dsec: AsyncDsec) -> None:
    empty = await dsec.sandboxes.create()
    busy = await dsec.sandboxes.create()
    files = await dsec.sandboxes.create(hibernate="files")
    await busy.start(["sleep", "1000"])
    p = await files.start(["sleep", "1000"])
    harness.clock.advance(1100)
    await harness.engine.resting.look()
    assert (await empty.inspect()).state is State.HIBERNATED
    assert (await busy.inspect()).state is State.PAUSED
    assert "would end" in (await busy.inspect()).residence or "not ended" in (await busy.inspect()).residence
    assert (await files.inspect()).state is State.HIBERNATED
    with pytest.raises(UnknownOutcome, match="hibernated"):
        await p.wait()
    assert empty.id not in harness.runtime.sandboxes
    assert (await empty.exec(["true"])).ok


@pytest.mark.anyio
async def test_one_whose_command_is_waited_for_is_in_use(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    p = await sb.start(["sleep", "1000"])
    waiting = asyncio.ensure_future(p.wait())
    await asyncio.sleep(0)
    harness.clock.advance(5000)
    await harness.engine.resting.look()
    assert (await sb.inspect()).state is State.RUNNING
    await p.kill()
    await waiting


@pytest.mark.anyio
async def test_using_a_command_of_a_frozen_one_thaws_it(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    p = await sb.start(["sleep", "1000"])
    harness.clock.advance(150)
    await harness.engine.resting.look()
    assert (await sb.inspect()).state is State.PAUSED
    await p.kill()
    assert (await p.wait()).signal == 9
    assert (await sb.inspect()).state is State.RUNNING
