"""Lifecycle over fakes: no partial sandbox, no lost destroy, and every step recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.errors import (
    BadRequest,
    CleanupFailed,
    Conflict,
    DsecError,
    IsolationUnavailable,
    NotFound,
    RuntimeUnavailable,
    SandboxFailed,
    StorageFull,
    UnknownOutcome,
    Unsupported,
)
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.model.sandbox import Flag, State
from dsec.testing.fakes import FakeRuntime
from dsec.testing.harness import Harness, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
async def dsec(harness: Harness) -> AsyncIterator[AsyncDsec]:
    async with harness.open() as opened:
        yield opened


async def state_of(dsec: AsyncDsec, sandbox: SandboxId) -> State:
    return (await (await dsec.sandboxes.get(sandbox)).inspect()).state


async def test_a_life_is_recorded_step_by_step(harness: Harness, dsec: AsyncDsec) -> None:
    async with await dsec.sandboxes.create() as sb:
        assert (await sb.exec(["true"])).ok
    assert await harness.acts(sb.id) == [
        "sandbox.create:intent",
        "sandbox.create:result:ok",
        "exec:intent",
        "exec:result:ok",
        "sandbox.destroy:intent",
        "sandbox.destroy:result:ok",
    ]
    assert harness.runtime.sandboxes == {}
    assert (await sb.inspect()).state is State.GONE


async def test_two_sandboxes_have_two_sessions(dsec: AsyncDsec) -> None:
    one, two = await dsec.sandboxes.create(), await dsec.sandboxes.create()
    assert one.info.session_id != two.info.session_id


async def test_a_failed_create_leaves_a_reason_and_nothing_else(harness: Harness, dsec: AsyncDsec) -> None:
    harness.runtime.broken = True
    with pytest.raises(RuntimeUnavailable, match="ordered"):
        await dsec.sandboxes.create()
    (row,) = await dsec.sandboxes.list()
    assert (row.state, row.reason) == (State.FAILED, "it was ordered to fail")
    assert harness.runtime.destroyed == 1
    assert list(harness.engine.kit.table) == []
    sandbox = await dsec.sandboxes.get(row.id)
    with pytest.raises(SandboxFailed, match="ordered"):
        await sandbox.exec(["true"])
    await sandbox.destroy()
    assert (await sandbox.inspect()).state is State.GONE


async def test_a_create_that_cannot_be_recorded_leaves_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    harness.runtime.stuck = asyncio.Event()
    creating = asyncio.ensure_future(dsec.sandboxes.create())
    await until(lambda: harness.runtime.created)
    harness.store.full = True
    harness.runtime.stuck.set()
    with pytest.raises(StorageFull):
        await creating
    assert harness.runtime.sandboxes == {}
    harness.store.full = False
    await until(lambda: not harness.engine.janitor.problems())
    (row,) = await dsec.sandboxes.list()
    assert row.state is State.FAILED


async def test_an_intent_that_cannot_be_recorded_starts_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    harness.store.full = True
    with pytest.raises(StorageFull):
        await dsec.sandboxes.create()
    assert harness.runtime.created == 0
    harness.store.full = False
    assert await dsec.sandboxes.list() == ()


async def test_a_full_disk_keeps_no_sandbox_alive(harness: Harness, dsec: AsyncDsec) -> None:
    sandbox = await dsec.sandboxes.create()
    harness.store.full = True
    with pytest.raises(StorageFull):
        await sandbox.destroy()
    assert harness.runtime.sandboxes == {}  # what runs is ended all the same
    assert [problem.sandbox for problem in harness.engine.janitor.problems()] == [sandbox.id]
    harness.store.full = False
    await until(lambda: not harness.engine.janitor.problems())
    assert (await dsec.sandboxes.get(sandbox.id)).info.state is State.GONE
    acts = [(event.act, event.phase.value) for event in await sandbox.events()]
    assert acts[-2:] == [("sandbox.destroy", "intent"), ("sandbox.destroy", "result")]


async def test_a_creator_that_vanishes_leaves_no_sandbox(harness: Harness, dsec: AsyncDsec) -> None:
    harness.runtime.stuck = asyncio.Event()
    creating = asyncio.ensure_future(dsec.sandboxes.create())
    await until(lambda: harness.runtime.created)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    harness.runtime.stuck.set()
    await until(lambda: harness.runtime.destroyed and not harness.runtime.sandboxes)
    assert await dsec.sandboxes.list() == ()


async def test_a_hundred_destroys_are_one(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await asyncio.gather(*[sb.destroy() for _ in range(100)])
    await sb.destroy()
    assert harness.runtime.destroyed == 1
    acts = await harness.acts(sb.id)
    assert acts.count("sandbox.destroy:intent") == acts.count("sandbox.destroy:result:ok") == 1


async def test_a_hundred_sandboxes_destroyed_at_once(harness: Harness, dsec: AsyncDsec) -> None:
    all_ = await asyncio.gather(*[dsec.sandboxes.create() for _ in range(100)])
    await asyncio.gather(*[sb.destroy() for sb in all_])
    assert harness.runtime.sandboxes == {}
    assert list(harness.engine.kit.table) == []


async def test_destroy_during_create(harness: Harness, dsec: AsyncDsec) -> None:
    harness.runtime.stuck = asyncio.Event()
    creating = asyncio.ensure_future(dsec.sandboxes.create())
    await until(lambda: harness.runtime.created)
    (row,) = await dsec.sandboxes.list()
    destroying = asyncio.ensure_future((await dsec.sandboxes.get(row.id)).destroy())
    await asyncio.sleep(0.01)
    harness.runtime.stuck.set()
    with pytest.raises(Conflict, match="while it was being made"):
        await creating
    await destroying
    assert harness.runtime.sandboxes == {}
    assert await state_of(dsec, row.id) is State.GONE


async def test_destroy_during_exec_tells_the_command(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    runs = [asyncio.ensure_future(sb.exec(["sleep", "60"])) for _ in range(20)]
    await until(lambda: len(harness.runtime.sandboxes[sb.id].processes) == 20)
    await sb.destroy()
    for outcome in await asyncio.gather(*runs, return_exceptions=True):
        assert isinstance(outcome, UnknownOutcome)
    acts = await harness.acts(sb.id)
    assert acts.count("exec:result:unknown_outcome") == 20
    assert acts[-1] == "sandbox.destroy:result:ok"


async def test_acts_on_what_is_gone(dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.destroy()
    for act in (sb.exec(["true"]), sb.start(["true"]), sb.pause(), sb.metrics(), sb.files.read("a")):
        with pytest.raises(NotFound):
            await act
    assert (await sb.wait()).state is State.GONE


async def test_an_unknown_id_and_a_gone_one_read_alike(dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.destroy()
    other = AsyncSandbox(sb._link, sb.info)
    unknown = new_sandbox_id()
    with pytest.raises(NotFound) as gone:
        await other.exec(["true"])
    with pytest.raises(NotFound) as absent:
        await dsec.sandboxes.get(unknown)
    assert str(gone.value).replace(sb.id, "X") == str(absent.value).replace(unknown, "X")


async def test_a_failed_cleanup_is_told_recorded_retried_and_visible(
    harness: Harness, dsec: AsyncDsec
) -> None:
    sb = await dsec.sandboxes.create()
    harness.runtime.undead.add(sb.id)
    with pytest.raises(CleanupFailed):
        await sb.destroy()
    (problem,) = await dsec.problems()
    assert problem.sandbox == sb.id
    assert "ordered not to go" in problem.error
    assert await state_of(dsec, sb.id) is State.STOPPING
    await until(lambda: harness.engine.janitor.problems()[0].attempts > 2)
    harness.runtime.undead.clear()
    await until(lambda: not harness.engine.janitor.problems())
    assert await state_of(dsec, sb.id) is State.GONE
    acts = await harness.acts(sb.id)
    assert acts.count("sandbox.cleanup:note:cleanup_failed") == 1
    assert acts[-1] == "sandbox.destroy:result:ok"


async def test_asking_again_solves_a_problem(harness: Harness, dsec: AsyncDsec) -> None:
    harness.engine.janitor._first_wait = 60.0
    sb = await dsec.sandboxes.create()
    harness.runtime.undead.add(sb.id)
    with pytest.raises(CleanupFailed):
        await sb.destroy()
    harness.runtime.undead.clear()
    await sb.destroy()
    assert await dsec.problems() == ()


async def test_an_init_that_dies_fails_its_sandbox(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    run = asyncio.ensure_future(sb.exec(["sleep", "60"]))
    await until(lambda: harness.runtime.sandboxes[sb.id].processes)
    await harness.runtime.die(sb.id, "init was killed", oom=True)
    with pytest.raises(SandboxFailed, match="out of memory: init was killed"):
        await run
    info = await sb.wait()
    assert (info.state, info.reason) == (State.FAILED, "out of memory: init was killed")
    assert harness.runtime.sandboxes == {}
    with pytest.raises(SandboxFailed, match="out of memory"):
        await sb.exec(["true"])
    await sb.destroy()
    assert (await sb.inspect()).state is State.GONE


async def test_pause_holds_acts_off_and_resume_lets_time_go_on(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.exec(["true"])
    assert (await sb.pause()).state is State.PAUSED
    assert harness.runtime.sandboxes[sb.id].frozen
    assert (await sb.pause()).state is State.PAUSED
    with pytest.raises(Conflict, match="paused"):
        await sb.exec(["true"])
    with pytest.raises(Conflict, match="paused"):
        await sb.files.read("a")
    harness.clock.advance(30)
    assert (await sb.resume()).state is State.RUNNING
    assert harness.runtime.sandboxes[sb.id].guests[0].shifted == 30.0
    assert not harness.runtime.sandboxes[sb.id].frozen
    assert (await sb.exec(["true"])).ok


async def test_a_pause_that_fails_leaves_it_running(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    harness.runtime.unfreezable = True
    with pytest.raises(RuntimeUnavailable):
        await sb.pause()
    assert (await sb.exec(["true"])).ok


async def test_pause_and_destroy_at_once(harness: Harness, dsec: AsyncDsec) -> None:
    for _ in range(20):
        sb = await dsec.sandboxes.create()
        outcomes = await asyncio.gather(
            sb.pause(), sb.destroy(), sb.resume(), sb.destroy(), sb.extend(5), return_exceptions=True
        )
        assert all(
            outcome is None or not isinstance(outcome, BaseException) or isinstance(outcome, DsecError)
            for outcome in outcomes
        )
        assert (await sb.inspect()).state is State.GONE
    assert harness.runtime.sandboxes == {}


async def test_a_level_without_a_freezer_says_so() -> None:
    harness = Harness(runtime=FakeRuntime(flags=frozenset({Flag.PID_NAMESPACE})))
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        with pytest.raises(Unsupported, match="pause"):
            await sb.pause()
        with pytest.raises(Unsupported, match="user"):
            await sb.exec(["true"], user="root")
        with pytest.raises(Unsupported, match="terminal"):
            await sb.terminal()


async def test_ttl_ends_it_whatever_it_does(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create(ttl=50)
    assert harness.runtime.deadlines[sb.id] == 1051.0
    run = asyncio.ensure_future(sb.exec(["sleep", "60"]))
    await until(lambda: harness.runtime.sandboxes[sb.id].processes)
    harness.clock.advance(49)
    harness.engine.reaper._look(harness.clock.boottime)
    assert (await sb.inspect()).state is State.RUNNING
    harness.clock.advance(2)
    harness.engine.reaper._look(harness.clock.boottime)
    with pytest.raises(UnknownOutcome, match="ttl"):
        await run
    info = await sb.wait()
    assert (info.state, info.reason) == (State.GONE, "ttl")


async def test_extend_moves_the_deadline_that_is_enforced_without_us(
    harness: Harness, dsec: AsyncDsec
) -> None:
    sb = await dsec.sandboxes.create(ttl=50)
    harness.clock.advance(40)
    await sb.extend(100)
    assert harness.runtime.deadlines[sb.id] == 1141.0
    harness.clock.advance(50)
    harness.engine.reaper._look(harness.clock.boottime)
    assert (await sb.exec(["true"])).ok
    await sb.extend(0)
    assert harness.runtime.deadlines[sb.id] == 0.0


async def test_the_spawner_ending_it_in_time_is_no_failure(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create(ttl=50)
    harness.clock.advance(51)
    await harness.runtime.die(sb.id, "its time to live passed")
    info = await sb.wait()
    assert (info.state, info.reason) == (State.GONE, "ttl")


async def test_idle_never_fires_during_an_exec(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create(idle=10)
    p = await sb.start(["sleep", "60"])
    harness.clock.advance(1000)
    harness.engine.reaper._look(harness.clock.boottime)
    assert (await sb.inspect()).state is State.RUNNING
    await p.kill()
    await p.wait()
    harness.clock.advance(9)
    harness.engine.reaper._look(harness.clock.boottime)
    assert (await sb.inspect()).state is State.RUNNING
    harness.clock.advance(2)
    harness.engine.reaper._look(harness.clock.boottime)
    info = await sb.wait()
    assert (info.state, info.reason) == (State.GONE, "idle")


async def test_the_reaper_runs_by_itself() -> None:
    harness = Harness(system_clock=True)
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create(ttl=0.1)
        async with asyncio.timeout(3):
            assert (await sb.wait()).reason == "ttl"


async def test_a_private_engine_takes_its_sandboxes_with_it(harness: Harness) -> None:
    async with harness.open() as dsec:
        for _ in range(3):
            sb = await dsec.sandboxes.create()
            await sb.start(["sleep", "60"])
        harness.runtime.undead.clear()
    assert harness.runtime.sandboxes == {}
    assert {row.state for row in await harness.store.list()} == {State.GONE}


async def test_closing_waits_for_as_many_as_there_are(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dsec.node.engine.CLOSE_PATIENCE", 0.2)
    turn = asyncio.Lock()
    really = harness.runtime.destroy

    async def slowly(sandbox: SandboxId) -> None:
        async with turn:
            await asyncio.sleep(0.02)
        await really(sandbox)

    async with harness.open() as opened:
        for _ in range(20):
            await opened.sandboxes.create()
        monkeypatch.setattr(harness.runtime, "destroy", slowly)
    assert harness.runtime.sandboxes == {}
    assert caplog.messages == []


async def test_closing_names_what_does_not_end_and_leaves_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dsec.node.engine.CLOSE_PATIENCE", 0.1)
    really = harness.runtime.destroy

    async with harness.open() as opened:
        stuck = [(await opened.sandboxes.create()).id for _ in range(7)]
        await opened.sandboxes.create()

        async def never(sandbox: SandboxId) -> None:
            if sandbox in stuck:
                await asyncio.get_running_loop().create_future()
            await really(sandbox)

        monkeypatch.setattr(harness.runtime, "destroy", never)
    assert set(harness.runtime.sandboxes) == set(stuck)
    (told,) = caplog.messages
    assert told.startswith("7 sandboxes were not destroyed")
    assert told.endswith(", ...")


@pytest.mark.parametrize(
    ("arguments", "error", "field"),
    [
        ({"ttl": -1}, BadRequest, "ttl"),
        ({"ttl": float("nan")}, BadRequest, "ttl"),
        ({"idle": "x"}, BadRequest, "idle"),
        ({"level": "vm"}, BadRequest, "level"),
        ({"level": "process"}, IsolationUnavailable, "process"),
        ({"template": "nope"}, NotFound, "nope"),
        ({"env": {"A=": "x"}}, BadRequest, "env"),
        ({"env": {"A": 1}}, BadRequest, "env"),
        ({"volumes": ["x"]}, BadRequest, "volumes"),
        ({"volumes": ["/x:/y:zz"]}, BadRequest, "volumes"),
        ({"volumes": ["/x:y"]}, BadRequest, "volume target"),
    ],
)
async def test_bad_arguments_of_create_name_the_field(
    dsec: AsyncDsec, harness: Harness, arguments: dict[str, object], error: type[DsecError], field: str
) -> None:
    with pytest.raises(error, match=field):
        await dsec.sandboxes.create(**arguments)  # type: ignore[arg-type]
    assert harness.runtime.created == 0
