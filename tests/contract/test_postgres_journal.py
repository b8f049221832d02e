"""The journal in PostgreSQL against its contracts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from dsec.errors import Conflict, NotFound, StoreDamaged
from dsec.model.ids import SandboxId
from dsec.model.journal import Finding
from dsec.model.sandbox import SandboxInfo, State
from dsec.stores import checkpoints
from dsec.stores.keeper import Pace
from dsec.stores.postgres.look import PostgresReader, verify
from dsec.stores.postgres.store import PostgresStore
from dsec.stores.schema import Durability
from dsec.testing.contracts.journal import JournalContract, SandboxesContract, note, sandbox
from dsec.testing.postgres import execute

pytestmark = pytest.mark.anyio
QUIET = Pace(records=10**9, seconds=3600.0)


async def opened(
    url: str,
    home: Path,
    *,
    durability: Durability = "process",
    pace: Pace | None = None,
    lock_patience: float = 5.0,
) -> PostgresStore:
    return await PostgresStore.open(
        url,
        home / "state",
        key=home / "journal.key",
        engine_id="en-test",
        durability=durability,
        pace=pace,
        patience=10.0,
        lock_patience=lock_patience,
    )


async def findings(url: str, home: Path) -> list[tuple[str, int]]:
    def look() -> tuple[Finding, ...]:
        public = checkpoints.load_key(home / "journal.key").public_key()
        return verify(url, home / "state" / "checkpoints.jsonl", public)

    return [(finding.chain, finding.seq) for finding in await anyio.to_thread.run_sync(look)]


@pytest.fixture(params=["process", "disk"])
async def store(
    request: pytest.FixtureRequest, postgres_url: str, tmp_path: Path
) -> AsyncIterator[PostgresStore]:
    store = await opened(postgres_url, tmp_path, durability=request.param)
    yield store
    await store.close()


class TestJournal(JournalContract): ...


class TestSandboxes(SandboxesContract): ...


async def test_everything_is_there_after_opening_again(postgres_url: str, tmp_path: Path) -> None:
    store = await opened(postgres_url, tmp_path)
    infos = [sandbox() for _ in range(3)]
    for info in infos:
        await store.add(info, note(info.id))
    before = await store.read(infos[0].id)
    await store.close()
    assert await findings(postgres_url, tmp_path) == []
    store = await opened(postgres_url, tmp_path)
    assert [await store.get(info.id) for info in infos] == infos
    assert await store.read(infos[0].id) == before
    assert (await store.append(note(infos[0].id)))[0].seq == 2
    assert await store.count() == {State.PENDING: 3}
    await store.close()
    await store.close()
    with pytest.raises(Conflict):
        await store.append(note())
    with pytest.raises(Conflict):
        await store.read("engine")
    assert await findings(postgres_url, tmp_path) == []


async def test_a_database_has_one_owner(postgres_url: str, tmp_path: Path) -> None:
    store = await opened(postgres_url, tmp_path)
    with pytest.raises(Conflict) as caught:
        await opened(postgres_url, tmp_path, lock_patience=0.1)
    assert caught.value.hint
    await store.append(note())
    await store.close()
    await (await opened(postgres_url, tmp_path, lock_patience=0.1)).close()


async def test_a_database_belongs_to_one_home(postgres_url: str, tmp_path: Path) -> None:
    await (await opened(postgres_url, tmp_path / "one")).close()
    with pytest.raises(StoreDamaged):
        await opened(postgres_url, tmp_path / "two")
    await anyio.to_thread.run_sync(checkpoints.make_key, tmp_path / "two" / "journal.key")
    with pytest.raises(StoreDamaged):
        await opened(postgres_url, tmp_path / "two")
    await (await opened(postgres_url, tmp_path / "one")).close()


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TABLE dsec.record",
        "DROP TABLE dsec.spec",
        "ALTER TABLE dsec.record DROP COLUMN position",
        "ALTER TABLE dsec.chain ADD COLUMN more text",
        "DROP INDEX dsec.record_position",
        "DELETE FROM dsec.mark WHERE name = 'checkpoint'",
        "UPDATE dsec.journal_version SET version_num = '0099'",
        "DROP SCHEMA dsec CASCADE",
        "UPDATE dsec.chain SET class = 'nonsense', state = 'nonsense' WHERE state IS NOT NULL",
        "DROP TABLE dsec.journal_version",
    ],
)
async def test_damage_is_refused(postgres_url: str, tmp_path: Path, damage: str) -> None:
    store = await opened(postgres_url, tmp_path)
    info = sandbox()
    await store.add(info, note(info.id))
    await store.close()
    await execute(postgres_url, damage)
    with pytest.raises(StoreDamaged):
        await opened(postgres_url, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE dsec.record SET payload = '{}' WHERE chain = {0} AND seq = 2",
        "UPDATE dsec.record SET at = at + 1 WHERE chain = {0} AND seq = 2",
        "UPDATE dsec.record SET act = 'other' WHERE chain = {0} AND seq = 2",
        "DELETE FROM dsec.record WHERE chain = {0} AND seq = 2",
        "DELETE FROM dsec.record WHERE chain = {0} AND seq >= 2",
    ],
)
async def test_a_change_is_named_by_chain_and_record(postgres_url: str, tmp_path: Path, change: str) -> None:
    store = await opened(postgres_url, tmp_path)
    await store.append(*(note(chain, n=n) for n in range(4) for chain in ("a", "b", "engine")))
    await store.close()
    assert await findings(postgres_url, tmp_path) == []
    number = (await execute(postgres_url, "SELECT number FROM dsec.chain WHERE name = 'b'"))[0][0]
    await execute(postgres_url, change.replace("{0}", str(number)))
    assert await findings(postgres_url, tmp_path) == [("b", 2)]


async def test_a_chain_that_vanished_whole_is_named(postgres_url: str, tmp_path: Path) -> None:
    store = await opened(postgres_url, tmp_path)
    await store.append(note("a"), note("b"))
    await store.close()
    await execute(
        postgres_url, "DELETE FROM dsec.record WHERE chain = (SELECT number FROM dsec.chain WHERE name = 'a')"
    )
    await execute(postgres_url, "DELETE FROM dsec.chain WHERE name = 'a'")
    assert await findings(postgres_url, tmp_path) == [("a", 1)]


async def test_the_oldest_of_what_is_gone_is_dropped_and_the_rest_verifies(
    postgres_url: str, tmp_path: Path
) -> None:
    clock = [1000.0]
    store = await PostgresStore.open(
        postgres_url,
        tmp_path / "state",
        key=tmp_path / "journal.key",
        engine_id="en-test",
        pace=Pace(records=10**9, seconds=3600.0, keep_bytes=20_000),
        now=lambda: clock[0],
    )
    old = [await lived(store) for _ in range(10)]
    alive = sandbox(state=State.RUNNING)
    await store.add(alive, note(alive.id))
    clock[0] += 1000.0
    young = await lived(store)
    await store._parts.keeper.sign()
    await store._parts.keeper.retain()
    with pytest.raises(NotFound):
        await store.get(old[0].id)
    assert await store.read(old[0].id) == ()
    assert len(await store.read(young.id)) == 42
    assert (await store.get(alive.id)).state is State.RUNNING
    assert (await store.count())[State.RUNNING] == 1
    assert await store.verify() == ()
    late = await store.append(note(old[0].id))
    assert late[0].seq == 43
    await store.close()
    assert await findings(postgres_url, tmp_path) == []

    def dropped() -> int:
        with PostgresReader(postgres_url) as reader:
            return reader.dropped()

    assert await anyio.to_thread.run_sync(dropped) == 10


async def lived(store: PostgresStore) -> SandboxInfo:
    info = sandbox(state=State.RUNNING)
    await store.add(info, note(info.id))
    await store.append(*(note(info.id, n=n, text="x" * 100) for n in range(40)))
    await store.move(info.id, seen=State.RUNNING, to=State.GONE, draft=note(info.id))
    return info


async def test_many_heads_are_signed_while_more_come(postgres_url: str, tmp_path: Path) -> None:
    store = await opened(postgres_url, tmp_path, pace=Pace(records=500, seconds=0.05))
    store._book._unsigned_max = 2500

    async def add() -> None:
        for _ in range(2):
            infos = [replace(sandbox(state=State("cold")), expires_at=0.0) for _ in range(1000)]
            await store.add_many(infos, [note(info.id) for info in infos])

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(add)
    assert store._parts.keeper._promised == 0
    assert await store.count() == {State("cold"): 8000}
    await store.close()
    assert await findings(postgres_url, tmp_path) == []


async def test_strangers_find_nothing(postgres_url: str) -> None:
    def look() -> None:
        PostgresReader(postgres_url)

    with pytest.raises(NotFound):
        await anyio.to_thread.run_sync(look)
    assert SandboxId("sb-x")
