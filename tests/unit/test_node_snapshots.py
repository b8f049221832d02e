"""Snapshots, forks and rollbacks over fakes: whole or not at all, and each step recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest

from dsec.client.aio import AsyncDsec
from dsec.errors import (
    BadRequest,
    Conflict,
    DsecError,
    NotFound,
    RuntimeUnavailable,
    SandboxFailed,
    StorageFull,
    TooLarge,
    UnknownOutcome,
    Unsupported,
)
from dsec.model.ids import SandboxId, SnapshotId, new_snapshot_id
from dsec.model.sandbox import Flag, Limits, SandboxSpec, State
from dsec.model.snapshots import SnapshotKind
from dsec.testing.fakes import FakeRuntime
from dsec.testing.harness import Harness, until

pytestmark = pytest.mark.anyio
ENGINE = SandboxId("engine")
FLAGS = frozenset({Flag.PAUSE, Flag.SNAPSHOTS, Flag.USERS, Flag.PTY})


@pytest.fixture
def harness() -> Harness:
    return Harness(runtime=FakeRuntime(flags=FLAGS))


@pytest.fixture
async def dsec(harness: Harness) -> AsyncIterator[AsyncDsec]:
    async with harness.open() as opened:
        yield opened


async def test_a_snapshot_is_recorded_when_it_is_whole(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create(labels={"a": "b"})
    info = await sb.snapshot()
    assert (info.sandbox, info.spec.labels) == (sb.id, {"a": "b"})
    assert await dsec.snapshots.get(info.id) == info
    assert await dsec.snapshots.list() == await dsec.snapshots.list(sb.id) == (info,)
    assert (await harness.acts(sb.id))[-2:] == ["sandbox.snapshot:intent", "sandbox.snapshot:result:ok"]
    assert not harness.runtime.sandboxes[sb.id].frozen
    await sb.destroy()
    assert await dsec.snapshots.list() == (info,), "it outlives its sandbox"
    await dsec.snapshots.remove(info.id)
    await dsec.snapshots.remove(info.id)
    assert await dsec.snapshots.list() == ()
    assert harness.kept.taken == {}
    with pytest.raises(NotFound):
        await dsec.snapshots.get(info.id)


async def test_of_a_paused_sandbox_which_stays_so(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.pause()
    assert (await sb.snapshot()).paused == 0
    assert harness.runtime.sandboxes[sb.id].frozen
    assert (await sb.inspect()).state is State.PAUSED


async def test_a_snapshot_that_fails_leaves_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    harness.kept.full = True
    with pytest.raises(StorageFull):
        await sb.snapshot()
    harness.kept.full = False
    harness.runtime.unfreezable = True
    with pytest.raises(RuntimeUnavailable):
        await sb.snapshot()
    assert harness.kept.taken == {}
    assert await dsec.snapshots.list() == ()
    assert (await harness.acts(sb.id))[-1] == "sandbox.snapshot:result:runtime_unavailable"
    assert not harness.runtime.sandboxes[sb.id].frozen


async def test_what_cannot_be_kept_is_refused(dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    for kind, error in (("memory", Unsupported), ("odd", BadRequest)):
        with pytest.raises(error):
            await sb.snapshot(kind)
        with pytest.raises(error):
            await sb.fork(kind=kind)
    for count in (0, -1, 1001, True, 1.5):
        with pytest.raises(BadRequest):
            await sb.fork(count)  # type: ignore[arg-type]


async def test_a_level_without_snapshots_says_so() -> None:
    async with Harness(runtime=FakeRuntime(flags=FLAGS - {Flag.SNAPSHOTS})).open() as dsec:
        sb = await dsec.sandboxes.create()
        with pytest.raises(Unsupported):
            await sb.snapshot()
        with pytest.raises(Unsupported):
            await sb.fork()
        with pytest.raises(Unsupported):
            await sb.rollback(new_snapshot_id())


async def test_a_sandbox_from_a_snapshot(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    info = await sb.snapshot()
    other = await dsec.sandboxes.create(info, limits=Limits(memory_mib=64), labels={"x": "y"})
    assert harness.runtime.sandboxes[other.id].plan.files_of == info.id
    assert (other.info.spec.limits.memory_mib, other.info.spec.labels) == (64, {"x": "y"})
    assert other.info.session_id != sb.info.session_id
    first = (await harness.store.read(other.id))[0]
    assert first.payload["files_of"] == info.id
    await dsec.snapshots.remove(info.id)
    with pytest.raises(NotFound):
        await dsec.sandboxes.create(info)


async def test_forks_are_all_there_or_none(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create(labels={"mine": "1"}, ttl=60)
    children = await sb.fork(20)
    assert len({child.id for child in children}) == len({child.info.session_id for child in children}) == 20
    assert {child.info.spec.labels["dsec.fork-of"] for child in children} == {sb.id}
    assert all(child.info.spec.labels["mine"] == "1" and child.info.spec.ttl == 60 for child in children)
    assert harness.kept.taken == {}, "what they began with is nobody's"
    assert (await harness.acts(sb.id))[-2:] == ["sandbox.fork:intent", "sandbox.fork:result:ok"]

    made = harness.runtime.created

    def soon_broken() -> bool:
        harness.runtime.broken = harness.runtime.created >= made + 3
        return harness.runtime.broken

    watching = asyncio.get_running_loop().create_task(until(soon_broken))
    harness.runtime.stuck = asyncio.Event()
    forking = asyncio.get_running_loop().create_task(sb.fork(20))
    await watching
    harness.runtime.stuck.set()
    with pytest.raises(DsecError):
        await forking
    await until(lambda: len(harness.runtime.sandboxes) == 21)
    assert harness.kept.taken == {}


async def test_a_fork_whose_creator_vanishes_leaves_nobody(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    harness.runtime.stuck = asyncio.Event()
    forking = asyncio.get_running_loop().create_task(sb.fork(5))
    await until(lambda: harness.runtime.created == 6)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    harness.runtime.stuck.set()
    await until(lambda: harness.runtime.destroyed == 5)
    await until(lambda: set(harness.runtime.sandboxes) == {sb.id})
    assert (await harness.acts(sb.id))[-1] == "sandbox.fork:result:ok"
    assert harness.kept.taken == {}


async def test_a_rollback_ends_commands_and_keeps_the_sandbox(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    info = await sb.snapshot()
    before = await sb.inspect()
    process = await sb.start(["sleep", "inf"])
    after = await sb.rollback(info)
    with pytest.raises(UnknownOutcome, match="rolled back"):
        await process.wait()
    assert after == before
    assert harness.runtime.sandboxes[sb.id].plan.files_of == info.id
    assert (await sb.exec(["true"])).ok
    acts = await harness.acts(sb.id)
    assert acts[acts.index("sandbox.rollback:intent") :] == [
        "sandbox.rollback:intent",
        "exec:result:unknown_outcome",
        "sandbox.rollback:result:ok",
        "exec:intent",
        "exec:result:ok",
    ]


async def test_a_rollback_that_fails_fails_the_sandbox(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    info = await sb.snapshot()
    harness.runtime.broken = True
    with pytest.raises(RuntimeUnavailable):
        await sb.rollback(info)
    assert (await sb.wait()).state is State.FAILED
    with pytest.raises(SandboxFailed, match="rollback failed"):
        await sb.exec(["true"])
    assert harness.runtime.sandboxes == {}


async def test_while_it_is_rolled_back_it_takes_no_commands(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    info = await sb.snapshot()
    harness.runtime.stuck = asyncio.Event()
    rolling = asyncio.get_running_loop().create_task(sb.rollback(info))
    await until(lambda: harness.runtime.created == 2)
    with pytest.raises(Conflict, match="rolled back"):
        await sb.exec(["true"])
    destroying = asyncio.get_running_loop().create_task(sb.destroy())
    await asyncio.sleep(0.01)
    harness.runtime.stuck.set()
    await asyncio.gather(rolling, destroying)
    assert (await sb.inspect()).state is State.GONE
    assert harness.runtime.sandboxes == {}


async def test_a_snapshot_of_another_kind_of_sandbox_is_refused(dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    await sb.pause()
    with pytest.raises(Conflict):
        await sb.rollback(await sb.snapshot())
    with pytest.raises(NotFound):
        await (await dsec.sandboxes.create()).rollback(new_snapshot_id())
    with pytest.raises(BadRequest):
        await sb.rollback("x")


async def test_the_next_engine_compares_what_is_kept_with_what_is_recorded() -> None:
    harness = Harness(runtime=FakeRuntime(flags=FLAGS), durable=True)
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        kept, lost = await sb.snapshot(), await sb.snapshot()
        await harness.vanish()
    stray = new_snapshot_id()
    harness.kept.taken[stray] = sb.id  # taken, and never recorded
    del harness.kept.taken[lost.id]
    async with harness.open() as dsec:
        assert await dsec.snapshots.list() == (kept,)
        assert set(harness.kept.taken) == {kept.id}
        told = await harness.store.latest("engine", "snapshot.remove")
        assert [(record.ref, record.payload["outcome"]) for record in told] == [(lost.id, "lost")]


async def test_a_kill_for_want_of_memory_is_told_also_after_a_rollback() -> None:
    async with Harness(runtime=FakeRuntime(flags=FLAGS | {Flag.MEMORY_LIMIT})).open() as dsec:
        sb = await dsec.sandboxes.create()
        info = await sb.snapshot()
        assert (await sb.exec(["oom"])).oom
        await sb.rollback(info)  # its control group counts from 0 again
        assert (await sb.exec(["oom"])).oom


async def test_what_is_gone_back_to_is_not_removed_meanwhile(harness: Harness, dsec: AsyncDsec) -> None:
    sb = await dsec.sandboxes.create()
    info = await sb.snapshot()
    harness.runtime.stuck = asyncio.Event()
    rolling = asyncio.get_running_loop().create_task(sb.rollback(info))
    await until(lambda: harness.runtime.created == 2)
    with pytest.raises(Conflict, match="rolled back"):
        await dsec.snapshots.remove(info.id)
    harness.runtime.stuck.set()
    await rolling
    await dsec.snapshots.remove(info.id)
    assert await dsec.snapshots.list() == ()


async def test_one_from_elsewhere_is_recorded_when_it_is_whole(harness: Harness, dsec: AsyncDsec) -> None:
    seen: list[Path] = []
    spec = SandboxSpec(base_digest=f"sha256:{'1' * 64}", labels={"a": "b"})
    info = await harness.engine.snapshots.adopt(
        spec, SnapshotKind.FILES, lambda upper, _: seen.append(upper), 5
    )
    assert len(seen) == 1
    assert (info.spec, info.paused) == (spec, 0.0)
    assert await dsec.snapshots.list() == (info,)
    assert await harness.acts(ENGINE) == ["snapshot.import:intent", "snapshot.import:result:ok"]
    with pytest.raises(NotFound):
        await dsec.sandboxes.get(info.sandbox)  # it is nobody's
    other = await dsec.sandboxes.create(info)
    assert harness.runtime.sandboxes[other.id].plan.files_of == info.id


async def test_one_from_elsewhere_may_hold_what_it_has_whatever_it_says(
    harness: Harness, dsec: AsyncDsec
) -> None:
    spec = SandboxSpec(limits=Limits(disk_mib=1, memory_mib=99))
    for size, disk in ((2**20, 1), (5 * 2**20 + 1, 6)):
        info = await harness.engine.snapshots.adopt(spec, SnapshotKind.FILES, lambda upper, _: None, size)
        assert info.spec.limits == Limits(disk_mib=disk, memory_mib=99)


async def test_one_from_elsewhere_that_fails_leaves_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    def fill(directory: Path, check: Callable[[], None]) -> None:
        raise TooLarge(f"too much for {directory}")

    with pytest.raises(TooLarge):
        await harness.engine.snapshots.adopt(SandboxSpec(), SnapshotKind.FILES, fill, 5)
    harness.kept.full = True
    with pytest.raises(StorageFull):
        await harness.engine.snapshots.adopt(SandboxSpec(), SnapshotKind.FILES, fill, 5)
    assert harness.kept.taken == {}
    assert await dsec.snapshots.list() == ()
    assert (await harness.acts(ENGINE))[-1] == "snapshot.import:result:storage_full"


async def test_one_from_elsewhere_that_was_cut_off_goes_at_the_next_start() -> None:
    harness = Harness(runtime=FakeRuntime(flags=FLAGS), durable=True)
    async with harness.open():
        half = new_snapshot_id()
        await harness.kept.put(half, lambda upper, check: None, 5)
        await harness.vanish()
    async with harness.open() as dsec:
        assert harness.kept.taken == {}
        assert await dsec.snapshots.list() == ()


async def test_who_looks_into_a_sandbox_and_goes_leaves_no_copy(
    harness: Harness, dsec: AsyncDsec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while it is copied, and while it is looked at."""
    sb = await dsec.sandboxes.create()
    take, waits = harness.kept.take, [0.0, 0.05]

    async def taking(sandbox: SandboxId, snapshot: SnapshotId) -> None:
        await asyncio.sleep(waits.pop(0))
        await take(sandbox, snapshot)

    monkeypatch.setattr(harness.kept, "take", taking)
    while waits:
        with anyio.move_on_after(0.02):
            async with harness.engine.snapshots.changes(sb.id):
                assert harness.kept.taken
                await anyio.sleep(10)
        await until(lambda: not harness.kept.taken and not harness.runtime.sandboxes[sb.id].frozen)
        await asyncio.sleep(0.1)
        assert harness.kept.taken == {}
