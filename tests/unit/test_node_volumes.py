"""Volumes over fakes: one writer, any number of readers, nothing across projects, and nothing half made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.client.requests import volume_of
from dsec.errors import (
    BadRequest,
    CleanupFailed,
    Conflict,
    DsecError,
    NotFound,
    RuntimeUnavailable,
    StorageFull,
    Unsupported,
)
from dsec.model.ids import VolumeId, new_volume_id
from dsec.model.journal import Draft, Phase
from dsec.model.sandbox import Flag, State, Volume
from dsec.testing.fakes import FakeRuntime
from dsec.testing.harness import Harness, until
from dsec.testing.volumes import MemoryVolumes

pytestmark = pytest.mark.anyio
FLAGS = frozenset({Flag.PAUSE, Flag.SNAPSHOTS, Flag.SCRATCH, Flag.USERS, Flag.VOLUMES, Flag.HIBERNATE})
BAD_NAMES = ["", "A", "a/b", "../a", ".", "a\n", "-a", "a" * 65, "ü", "a b", "a\0"]


@pytest.fixture
def harness() -> Harness:
    return Harness(runtime=FakeRuntime(flags=FLAGS), durable=True)


@pytest.fixture
async def dsec(harness: Harness) -> AsyncIterator[AsyncDsec]:
    async with harness.open() as opened:
        yield opened
        for info in await opened.sandboxes.list():
            await (await opened.sandboxes.get(info.id)).destroy()


async def writer_of(dsec: AsyncDsec, name: str = "data") -> str | None:
    return (await dsec.volumes.get(name)).writer


async def said(harness: Harness, act: str) -> list[tuple[str, object]]:
    return [
        (one.phase.value, one.payload.get("outcome")) for one in await harness.store.latest("engine", act)
    ]


# What there is


async def test_a_volume_is_made_found_and_removed(harness: Harness, dsec: AsyncDsec) -> None:
    made = await dsec.volumes.create("data", size_mib=20)
    assert (made.name, made.project, made.size_mib, made.used_bytes) == ("data", "default", 20, 0)
    assert await dsec.volumes.get("data") == made
    assert await dsec.volumes.list() == (made,)
    assert harness.stored.sizes == {made.id: 20}
    assert await said(harness, "volume.create") == [("result", "ok"), ("intent", None)]
    await dsec.volumes.remove("data")
    await dsec.volumes.remove("data")
    assert harness.stored.sizes == {}
    assert await said(harness, "volume.remove") == [("note", "ok")]
    with pytest.raises(NotFound, match="data"):
        await dsec.volumes.get("data")


async def test_a_name_is_given_once_also_to_many_at_once(harness: Harness, dsec: AsyncDsec) -> None:
    done = await asyncio.gather(*(dsec.volumes.create("data") for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(one, Conflict) for one in done) == 19
    assert len(harness.stored.sizes) == 1, "the files of the others are gone"


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_names_that_are_none(dsec: AsyncDsec, name: str) -> None:
    with pytest.raises(BadRequest, match="name"):
        await dsec.volumes.create(name)
    with pytest.raises(BadRequest, match="project"):
        await dsec.volumes.create("data", project=name)
    with pytest.raises(BadRequest, match="volume source"):
        Volume.named(name, "/data")
    with pytest.raises(BadRequest, match="project"):
        await dsec.sandboxes.create(project=name)


async def test_sizes_and_bounds(harness: Harness) -> None:
    harness.volumes = MemoryVolumes(harness.store, most=2)
    async with harness.open() as dsec:
        for size in (0, -1, 2**40, True, 1.5):
            with pytest.raises(BadRequest, match="size_mib"):
                await dsec.volumes.create("data", size_mib=size)  # type: ignore[arg-type]
        await dsec.volumes.create("a")
        await dsec.volumes.create("b")
        with pytest.raises(StorageFull):
            await dsec.volumes.create("c")
        assert len(harness.stored.sizes) == 2


async def test_a_full_disk_leaves_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    harness.stored.full = True
    with pytest.raises(StorageFull):
        await dsec.volumes.create("data")
    assert await dsec.volumes.list() == ()
    assert await said(harness, "volume.create") == [("result", "storage_full"), ("intent", None)]
    harness.stored.full, harness.store.full = False, True
    with pytest.raises(StorageFull):
        await dsec.volumes.create("data")
    harness.store.full = False
    assert harness.stored.sizes == {}


async def test_where_no_level_has_volumes(harness: Harness) -> None:
    harness.stored = None  # type: ignore[assignment]
    async with harness.open() as dsec:
        with pytest.raises(Unsupported, match="volumes"):
            await dsec.volumes.create("data")
        assert await dsec.volumes.list() == ()


# Who uses it


async def test_of_a_hundred_that_would_write_exactly_one_does(dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    done = await asyncio.gather(
        *(dsec.sandboxes.create(volumes=["data:/data"]) for _ in range(100)), return_exceptions=True
    )
    winners = [one for one in done if isinstance(one, AsyncSandbox)]
    assert len(winners) == 1
    losers = [one for one in done if isinstance(one, Conflict)]
    assert len(losers) == 99
    assert {one.facts["holder"] for one in losers} == {winners[0].id}
    assert not losers[0].retryable
    assert winners[0].id in losers[0].message
    assert await writer_of(dsec) == winners[0].id
    await winners[0].destroy()
    assert await writer_of(dsec) is None
    assert (await dsec.sandboxes.create(volumes=["data:/data"])).info.state is State.RUNNING


async def test_readers_may_be_beside_a_writer(dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    readers = [await dsec.sandboxes.create(volumes=["data:/data:ro"]) for _ in range(3)]
    writer = await dsec.sandboxes.create(volumes=[Volume.named("data", "/data")])
    late = await dsec.sandboxes.create(volumes=[Volume.named("data", "/data", read_only=True)])
    info = await dsec.volumes.get("data")
    assert info.writer == writer.id
    assert info.readers == tuple(sorted(one.id for one in (*readers, late)))
    await late.destroy()
    assert late.id not in (await dsec.volumes.get("data")).readers


async def test_one_that_is_used_is_not_removed(harness: Harness, dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    sandbox = await dsec.sandboxes.create(volumes=["data:/data:ro"])
    with pytest.raises(Conflict, match=sandbox.id):
        await dsec.volumes.remove("data")
    assert len(harness.stored.sizes) == 1
    await sandbox.destroy()
    await dsec.volumes.remove("data")


async def test_removing_and_using_at_once(harness: Harness, dsec: AsyncDsec) -> None:
    for _ in range(20):
        await dsec.volumes.create("data")
        used, removed = await asyncio.gather(
            dsec.sandboxes.create(volumes=["data:/data"]),
            dsec.volumes.remove("data"),
            return_exceptions=True,
        )
        assert isinstance(used, AsyncSandbox) == isinstance(removed, Conflict)
        assert isinstance(used, AsyncSandbox | Conflict | NotFound)
        if isinstance(used, AsyncSandbox):
            await used.destroy()
        await dsec.volumes.remove("data")
        assert harness.stored.sizes == {}


async def test_what_is_being_removed_cannot_be_used(harness: Harness) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow(MemoryVolumes):
        async def forget(self, project: str, name: str, draft: Draft) -> None:
            begun.set()
            await go_on.wait()
            await super().forget(project, name, draft)

    harness.volumes = Slow(harness.store)
    async with harness.open() as dsec:
        await dsec.volumes.create("data")
        removing = asyncio.ensure_future(dsec.volumes.remove("data"))
        await begun.wait()
        for volume in ("data:/data", "data:/data:ro"):
            with pytest.raises(Conflict, match="being removed"):
                await dsec.sandboxes.create(volumes=[volume])
        with pytest.raises(Conflict, match="being removed"):
            await dsec.volumes.remove("data")
        go_on.set()
        await removing
        with pytest.raises(NotFound):
            await dsec.sandboxes.create(volumes=["data:/data"])


async def test_what_fails_to_be_made_uses_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    harness.runtime.broken = True
    with pytest.raises(RuntimeUnavailable):
        await dsec.sandboxes.create(volumes=["data:/data"])
    harness.runtime.broken = False
    harness.store.full = True
    with pytest.raises(StorageFull):
        await dsec.sandboxes.create(volumes=["data:/data"])
    harness.store.full = False
    with pytest.raises(NotFound, match="other"):
        await dsec.sandboxes.create(volumes=["data:/data", "other:/other"])
    await dsec.sandboxes.create(volumes=["data:/data"])


async def test_what_cannot_be_removed_still_uses_it(harness: Harness, dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    sandbox = await dsec.sandboxes.create(volumes=["data:/data"])
    harness.runtime.undead.add(sandbox.id)
    with pytest.raises(CleanupFailed):
        await sandbox.destroy()
    with pytest.raises(Conflict, match=sandbox.id):
        await dsec.sandboxes.create(volumes=["data:/data"])
    harness.runtime.undead.clear()
    handle = harness.engine.kit.table.find(sandbox.id)
    await until(lambda: handle is None or handle.over.is_set())
    await dsec.sandboxes.create(volumes=["data:/data"])


async def test_what_died_uses_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    sandbox = await dsec.sandboxes.create(volumes=["data:/data"])
    await harness.runtime.die(sandbox.id)
    assert (await sandbox.wait()).state is State.FAILED
    await dsec.sandboxes.create(volumes=["data:/data"])


async def test_a_caller_that_vanishes_keeps_nothing(harness: Harness, dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    harness.runtime.stuck = asyncio.Event()
    asking = asyncio.ensure_future(dsec.sandboxes.create(volumes=["data:/data"]))
    await until(lambda: harness.runtime.created)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(Conflict):
        await dsec.sandboxes.create(volumes=["data:/data"])
    harness.runtime.stuck.set()
    harness.runtime.stuck = None
    await until(lambda: not harness.engine.claims.users(("default", "data")).writers)


async def test_copies_read_what_their_parent_writes(harness: Harness, dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    sandbox = await dsec.sandboxes.create(volumes=["data:/data"])
    assert (await sandbox.exec(["true"], scratch=True)).ok
    child = (await sandbox.fork(1))[0]
    info = await dsec.volumes.get("data")
    assert (info.writer, info.readers) == (sandbox.id, (child.id,))
    assert harness.runtime.sandboxes[child.id].plan.volumes == (
        Volume.named("data", "/data", read_only=True),
    )


async def test_going_back_keeps_it(harness: Harness, dsec: AsyncDsec) -> None:
    made = await dsec.volumes.create("data")
    sandbox = await dsec.sandboxes.create(volumes=["data:/data"])
    snapshot = await sandbox.snapshot()
    await sandbox.rollback(snapshot)
    assert harness.runtime.sandboxes[sandbox.id].plan.stored == {"data": made.id}
    assert await writer_of(dsec) == sandbox.id
    with pytest.raises(Conflict):
        await dsec.sandboxes.create(volumes=["data:/data"])
    with pytest.raises(Conflict):
        await dsec.volumes.remove("data")


# Projects


async def test_a_name_means_another_volume_in_another_project(harness: Harness, dsec: AsyncDsec) -> None:
    one = await dsec.volumes.create("data")
    with pytest.raises(NotFound) as caught:
        await dsec.sandboxes.create(volumes=["data:/data"], project="other")
    with pytest.raises(NotFound) as never:
        await dsec.sandboxes.create(volumes=["nope:/data"], project="other")
    assert caught.value.message.replace("data", "nope") == never.value.message
    other = await dsec.volumes.create("data", project="other")
    assert one.id != other.id
    mine = await dsec.sandboxes.create(volumes=["data:/data"])
    theirs = await dsec.sandboxes.create(volumes=["data:/data"], project="other")
    plans = [harness.runtime.sandboxes[sandbox.id].plan.stored for sandbox in (mine, theirs)]
    assert plans == [{"data": one.id}, {"data": other.id}]
    assert await dsec.volumes.list() == (await dsec.volumes.get("data"),)
    await mine.destroy()
    await dsec.volumes.remove("data")
    assert (await dsec.volumes.get("data", project="other")).writer == theirs.id
    child = (await theirs.fork(1))[0]
    assert harness.runtime.sandboxes[child.id].plan.stored == {"data": other.id}


# After a restart


async def test_a_hibernated_one_keeps_its_place(harness: Harness) -> None:
    """Also over a restart of the engine, and while a wake of it fails; destroying it gives the place back."""
    async with harness.open() as dsec:
        await dsec.volumes.create("data")
        sb = await dsec.sandboxes.create(volumes=["data:/data"])
        await sb.hibernate()
    async with harness.open() as dsec:
        for _ in range(2):
            assert await writer_of(dsec) == sb.id
            with pytest.raises(Conflict, match=f"{sb.id} may write") as refused:
                await dsec.sandboxes.create(volumes=["data:/data"])
            assert "hibernated" in refused.value.hint
            with pytest.raises(Conflict, match="used by"):
                await dsec.volumes.remove("data")
            harness.runtime.broken = True
            with pytest.raises(RuntimeUnavailable):
                await (await dsec.sandboxes.get(sb.id)).exec(["true"])
            harness.runtime.broken = False
        found = await dsec.sandboxes.get(sb.id)
        assert (await found.inspect()).state is State.HIBERNATED
        assert (await found.exec(["true"])).exit_code == 0
        assert await writer_of(dsec) == sb.id
        await found.hibernate()
        await found.destroy()
        await (await dsec.sandboxes.create(volumes=["data:/data"])).destroy()
        await dsec.volumes.remove("data")


async def test_a_cold_one_takes_its_place_with_its_first_act(dsec: AsyncDsec) -> None:
    await dsec.volumes.create("data")
    cold = await dsec.sandboxes.create(volumes=["data:/data"], cold=True)
    writer = await dsec.sandboxes.create(volumes=["data:/data"])
    with pytest.raises(Conflict, match=f"{writer.id} may write"):
        await cold.exec(["true"])
    await writer.destroy()
    assert (await cold.exec(["true"])).exit_code == 0
    assert await writer_of(dsec) == cold.id
    await cold.destroy()
    await dsec.volumes.remove("data")


async def test_claims_follow_from_the_sandboxes_that_live(harness: Harness) -> None:
    async with harness.open() as dsec:
        await dsec.volumes.create("data")
        await dsec.volumes.create("more")
        kept = await dsec.sandboxes.create(volumes=["data:/data"])
        lost = await dsec.sandboxes.create(volumes=["more:/data"])
        reader = await dsec.sandboxes.create(volumes=["data:/data:ro"])
        await harness.vanish()
    del harness.runtime.sandboxes[lost.id]
    async with harness.open() as dsec:
        info = await dsec.volumes.get("data")
        assert (info.writer, info.readers) == (kept.id, (reader.id,))
        with pytest.raises(Conflict, match=kept.id):
            await dsec.sandboxes.create(volumes=["data:/data"])
        with pytest.raises(Conflict):
            await dsec.volumes.remove("data")
        assert await writer_of(dsec, "more") is None
        await dsec.sandboxes.create(volumes=["more:/data"])
        await (await dsec.sandboxes.get(kept.id)).destroy()
        await dsec.sandboxes.create(volumes=["data:/data"])
        for left in await dsec.sandboxes.list():
            await (await dsec.sandboxes.get(left.id)).destroy()


async def test_claims_of_what_nobody_can_look_at_stay(harness: Harness) -> None:
    """While a level cannot tell what runs, nothing of its is taken for lost."""
    async with harness.open() as dsec:
        await dsec.volumes.create("data")
        kept = await dsec.sandboxes.create(volumes=["data:/data"])
        await harness.vanish()

    async def blind() -> None:
        raise RuntimeUnavailable("its spawner does not answer")

    seeing, harness.runtime.list = harness.runtime.list, blind  # type: ignore[method-assign, assignment]
    async with harness.open() as dsec:
        with pytest.raises(Conflict, match=kept.id):
            await dsec.sandboxes.create(volumes=["data:/data"])
        with pytest.raises(Conflict):
            await dsec.volumes.remove("data")
        harness.runtime.list = seeing  # type: ignore[method-assign]


async def test_what_was_half_made_or_half_removed_goes(harness: Harness) -> None:
    stray = new_volume_id()
    async with harness.open() as dsec:
        made = await dsec.volumes.create("data")
        lost = await dsec.volumes.create("lost")
        harness.stored.sizes[stray] = 1
        del harness.stored.sizes[lost.id]
        await _half_made(harness, stray)
        await harness.vanish()
    async with harness.open() as dsec:
        assert harness.stored.sizes == {made.id: 1024}
        assert [info.id for info in await dsec.volumes.list()] == [made.id]
        assert await harness.store.unanswered("engine") == ()
        assert (await said(harness, "volume.create"))[0] == ("result", "failed")
        assert await said(harness, "volume.remove") == [("note", "lost")]
        await dsec.volumes.create("lost")


async def _half_made(harness: Harness, volume: VolumeId) -> None:
    await harness.engine.volumes._say("volume.create", Phase.INTENT, volume, {})


async def test_a_removal_that_failed_can_be_asked_for_again(harness: Harness, dsec: AsyncDsec) -> None:
    made = await dsec.volumes.create("data")
    harness.stored.undead.add(made.id)
    with pytest.raises(CleanupFailed):
        await dsec.volumes.remove("data")
    assert await dsec.volumes.list() == ()
    again = await dsec.volumes.create("data")
    harness.stored.undead.clear()
    await dsec.volumes.remove("absent")
    assert set(harness.stored.sizes) == {again.id}


# What is asked for


def test_a_source_is_a_path_or_a_name() -> None:
    assert volume_of("data:/data") == Volume("data", "/data")
    assert volume_of("data:/data:ro") == Volume.named("data", "/data", read_only=True)
    assert volume_of("/srv:/data") == Volume(Path("/srv"), "/data")
    assert volume_of("./x:/data").source == Path.cwd() / "x"
    assert volume_of("..:/data").source == Path("..").absolute()
    assert (Volume("data", "/d").name, Volume(Path("/data"), "/d").name) == ("data", "")
    for wrong in ("src/x:/data", "Data:/data", "~/x:/data"):
        with pytest.raises(DsecError, match="volume source"):
            volume_of(wrong)
    with pytest.raises(BadRequest) as caught:
        volume_of("src/x:/data")
    assert "./" in caught.value.hint
