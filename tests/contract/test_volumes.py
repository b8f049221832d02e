"""Both tables of volumes against their contract, and what only a file can be: of an earlier version."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from anyio import to_thread

from dsec.errors import Conflict, StoreDamaged
from dsec.model.sandbox import State
from dsec.ports.journal import Journal, VolumeRecords
from dsec.stores import schema
from dsec.stores.journal import SqliteStore
from dsec.stores.parts import verify_directory
from dsec.stores.postgres.records import PostgresVolumes
from dsec.stores.postgres.store import PostgresStore
from dsec.stores.reader import JournalReader
from dsec.stores.volume_records import SqliteVolumes
from dsec.testing.contracts.volumes import MOST, VolumesContract, note, volume
from dsec.testing.fakes import MemoryStore
from dsec.testing.journals import earlier
from dsec.testing.volumes import MemoryVolumes

pytestmark = pytest.mark.anyio


async def opened(home: Path) -> SqliteStore:
    return await SqliteStore.open(home / "state", key=home / "journal.key", engine_id="en-test")


class TestSqlite(VolumesContract):
    @pytest.fixture
    async def journal(self, tmp_path: Path) -> AsyncIterator[SqliteStore]:
        store = await opened(tmp_path)
        yield store
        assert await store.verify() == ()
        await store.close()

    @pytest.fixture
    def records(self, journal: SqliteStore) -> VolumeRecords:
        parts = journal._parts
        return SqliteVolumes(parts.db, parts.writer, parts.ledger, journal._query, most=MOST)


class TestPostgres(VolumesContract):
    @pytest.fixture
    async def journal(self, tmp_path: Path, postgres_url: str) -> AsyncIterator[PostgresStore]:
        store = await PostgresStore.open(
            postgres_url, tmp_path / "state", key=tmp_path / "journal.key", engine_id="en-test"
        )
        yield store
        assert await store.verify() == ()
        await store.close()

    @pytest.fixture
    def records(self, journal: PostgresStore) -> VolumeRecords:
        return PostgresVolumes(journal._writer, journal._query, most=MOST)


class TestMemory(VolumesContract):
    @pytest.fixture
    def journal(self) -> Journal:
        return MemoryStore()

    @pytest.fixture
    def records(self, journal: Journal) -> VolumeRecords:
        return MemoryVolumes(journal, most=MOST)


async def test_rows_are_there_after_opening_again(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    info = volume()
    await store.volumes.keep(info, note())
    await store.close()
    store = await opened(tmp_path)
    assert await store.volumes.all() == (info,)
    await store.close()


async def second_version(home: Path) -> Path:
    """A journal as the version before volumes made it, with something in it."""
    return await to_thread.run_sync(earlier, home, 2)


def version_of(home: Path) -> object:
    with closing(sqlite3.connect(home / "state" / schema.DATABASE)) as db:
        return db.execute("PRAGMA user_version").fetchone()[0]


async def edited(path: Path, *statements: str) -> None:
    def edit() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            for statement in statements:
                db.execute(statement)

    await to_thread.run_sync(edit)


def looked_at(home: Path) -> tuple[int, object]:
    """How many sandboxes a reader finds, and the version of the file."""
    with JournalReader(home / "state") as reader:
        found = len(reader.sandboxes(list(State)))
    assert verify_directory(home / "state", key=home / "journal.key") == ()
    return found, version_of(home)


async def test_a_journal_of_the_version_before_is_made_one_of_this(tmp_path: Path) -> None:
    path = await second_version(tmp_path)
    before = await to_thread.run_sync(path.read_bytes)
    assert (
        await to_thread.run_sync(lambda: verify_directory(tmp_path / "state", key=tmp_path / "journal.key"))
        == ()
    )
    with pytest.raises(Conflict, match="version 2"):
        await to_thread.run_sync(JournalReader, tmp_path / "state")
    assert await to_thread.run_sync(path.read_bytes) == before, "it is read as it is"
    store = await opened(tmp_path)
    assert await store.volumes.all() == ()
    await store.volumes.keep(volume(), note())
    assert len(await store.list()) == 2
    assert await store.verify() == ()
    await store.close()
    assert await to_thread.run_sync(looked_at, tmp_path) == (2, schema.VERSION)


async def test_an_earlier_version_with_other_tables_is_refused(tmp_path: Path) -> None:
    path = await second_version(tmp_path)
    await edited(path, "CREATE TABLE more (n)")
    before = await to_thread.run_sync(path.read_bytes)
    with pytest.raises(StoreDamaged):
        await opened(tmp_path)
    assert await to_thread.run_sync(path.read_bytes) == before
