"""All tables of snapshots against their contract, and those that were made before snapshots had a project."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from anyio import to_thread

from dsec.ports.journal import Journal, SnapshotRecords
from dsec.stores import schema
from dsec.stores.journal import SqliteStore
from dsec.stores.postgres.store import PostgresStore
from dsec.testing.contracts.snapshots import SnapshotsContract, snapshot
from dsec.testing.contracts.volumes import note
from dsec.testing.fakes import MemoryStore
from dsec.testing.postgres import execute
from dsec.testing.snapshots import MemorySnapshots

pytestmark = pytest.mark.anyio
Store = SqliteStore | PostgresStore


async def opened(home: Path, url: str = "") -> Store:
    key = home / "journal.key"
    if url:
        return await PostgresStore.open(url, home / "state", key=key, engine_id="en-test")
    return await SqliteStore.open(home / "state", key=key, engine_id="en-test")


class Stored(SnapshotsContract):
    @pytest.fixture
    def records(self, journal: Store) -> SnapshotRecords:
        return journal.snapshots


class TestSqlite(Stored):
    @pytest.fixture
    async def journal(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = await opened(tmp_path)
        yield store
        assert await store.verify() == ()
        await store.close()


class TestPostgres(Stored):
    @pytest.fixture
    async def journal(self, tmp_path: Path, postgres_url: str) -> AsyncIterator[Store]:
        store = await opened(tmp_path, postgres_url)
        yield store
        assert await store.verify() == ()
        await store.close()


class TestMemory(SnapshotsContract):
    @pytest.fixture
    def journal(self) -> Journal:
        return MemoryStore()

    @pytest.fixture
    def records(self, journal: Journal) -> SnapshotRecords:
        return MemorySnapshots(journal)


BACK = (
    "DROP INDEX {0}snapshot_project",
    "DROP INDEX {0}snapshot_sandbox",
    "ALTER TABLE {0}snapshot DROP COLUMN project",
)


async def test_snapshots_of_the_version_before_have_the_projects_of_their_specifications(
    tmp_path: Path,
) -> None:
    def back() -> None:
        with closing(sqlite3.connect(tmp_path / "state" / schema.DATABASE, isolation_level=None)) as db:
            for statement in BACK:
                db.execute(statement.format(""))
            db.execute("PRAGMA user_version = 4")

    store = await opened(tmp_path)
    infos = [snapshot(), snapshot("other")]
    for info in infos:
        await store.snapshots.keep(info, note())
    await store.close()
    await to_thread.run_sync(back)
    store = await opened(tmp_path)
    assert await store.snapshots.all(project="default") == (infos[0],)
    assert await store.snapshots.all(project="other") == (infos[1],)
    assert await store.verify() == ()
    await store.close()


async def test_those_in_postgresql_too_and_all_of_it_or_nothing(tmp_path: Path, postgres_url: str) -> None:
    store = await opened(tmp_path, postgres_url)
    infos = [snapshot(), snapshot("other")]
    for info in infos:
        await store.snapshots.keep(info, note())
    await store.close()
    for statement in BACK:
        await execute(postgres_url, statement.format("dsec."))
    await execute(postgres_url, "UPDATE dsec.journal_version SET version_num = '0001'")
    await execute(postgres_url, "CREATE TABLE dsec.snapshot_sandbox (a int)")  # in the way of the last step
    for _ in range(2):
        with pytest.raises(Exception, match="snapshot_sandbox"):
            await opened(tmp_path, postgres_url)
    await execute(postgres_url, "DROP TABLE dsec.snapshot_sandbox")
    store = await opened(tmp_path, postgres_url)
    assert await store.snapshots.all(project="default") == (infos[0],)
    assert await store.snapshots.all(project="other") == (infos[1],)
    assert await store.verify() == ()
    await store.close()
