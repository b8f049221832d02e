"""The SQLite journal against its contracts, and what only a file can do: be damaged, full, or somebody else's."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from dsec.errors import Busy, Conflict, NotFound, StorageFull, StoreDamaged
from dsec.model.journal import Draft, Finding, Json, Phase
from dsec.model.sandbox import SandboxInfo, State
from dsec.stores import schema
from dsec.stores.chain import GENESIS, link, prepare
from dsec.stores.journal import SqliteStore
from dsec.stores.keeper import Pace
from dsec.stores.parts import verify_directory
from dsec.stores.reader import JournalReader
from dsec.stores.retention import Victim
from dsec.stores.schema import Durability
from dsec.testing.contracts.journal import JournalContract, SandboxesContract, act, note, sandbox
from dsec.testing.journals import earlier, lived

pytestmark = pytest.mark.anyio
QUIET = Pace(records=10**9, seconds=3600.0)


async def opened(home: Path, *, durability: Durability = "process", pace: Pace | None = None) -> SqliteStore:
    return await SqliteStore.open(
        home / "state",
        key=home / "keys" / "journal.key",
        engine_id="en-test",
        durability=durability,
        pace=pace,
    )


async def verified(directory: Path, key: Path) -> tuple[Finding, ...]:
    return await anyio.to_thread.run_sync(lambda: verify_directory(directory, key=key))


async def findings(home: Path) -> list[tuple[str, int]]:
    found = await verified(home / "state", home / "keys" / "journal.key")
    return [(finding.chain, finding.seq) for finding in found]


@pytest.fixture(params=["process", "disk"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await opened(tmp_path, durability=request.param)
    yield store
    await store.close()


class TestJournal(JournalContract): ...


class TestSandboxes(SandboxesContract): ...


async def test_everything_is_there_after_opening_again(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    info = sandbox()
    await store.add(info, note(info.id))
    await store.append(act(Phase.INTENT, "ex-1", chain=info.id))
    before = await store.read(info.id)
    await store.close()
    store = await opened(tmp_path)
    assert await store.get(info.id) == info
    assert await store.read(info.id) == before
    assert [found.ref for found in await store.unanswered(info.id)] == ["ex-1"]
    record = (await store.append(note(info.id)))[0]
    assert record.seq == 3
    assert await store.verify() == ()
    await store.close()
    assert await findings(tmp_path) == []


async def test_a_closed_store_refuses_and_closing_again_does_nothing(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.close()
    await store.close()
    with pytest.raises(Conflict):
        await store.append(note())
    with pytest.raises(Conflict):
        await store.read("engine")


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.append(note())
    await store.close()
    for name in ("state/journal.db", "state/checkpoints.jsonl", "keys/journal.key"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, name


async def test_more_heads_than_are_cached(tmp_path: Path) -> None:
    store = await opened(tmp_path, pace=QUIET)
    store._ledger._cached = 4
    for round_ in range(3):
        for n in range(20):
            assert (await store.append(note(f"c{n}")))[0].seq == round_ + 1
    assert len(store._ledger._heads) == 4
    assert await store.verify() == ()
    await store.close()


async def test_room_for_a_batch_whose_caller_leaves_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(tmp_path)
    keeper, asked, go_on = store._parts.keeper, threading.Event(), threading.Event()
    take = keeper.take_room

    def late(chains: int) -> int:
        asked.set()
        go_on.wait(10)
        return take(chains)

    monkeypatch.setattr(keeper, "take_room", late)
    adding = asyncio.ensure_future(store.add_many([info := sandbox(state=State.COLD)], [note(info.id)]))
    await asyncio.to_thread(asked.wait, 10)
    adding.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await adding
    await asyncio.to_thread(lambda: None)
    monkeypatch.undo()
    assert keeper._promised == 0
    await store.close()


async def test_many_at_once_wait_for_signatures_and_leave_room_for_others(tmp_path: Path) -> None:
    store = await opened(tmp_path, pace=Pace(records=500, seconds=0.05))
    store._ledger._unsigned_max = 2500

    async def add() -> None:
        for _ in range(4):
            infos = [sandbox(state=State.COLD) for _ in range(600)]
            await store.add_many(infos, [note(info.id) for info in infos])
            assert store._ledger.room > 600
            await store.append(note(infos[0].id))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(add)
    assert await store.count() == {State.COLD: 9600}
    assert store._parts.keeper._promised == 0
    await store.close()
    assert await findings(tmp_path) == []


async def test_the_log_stays_short_and_heads_are_signed_while_open(tmp_path: Path) -> None:
    store = await opened(tmp_path, pace=Pace(records=100, seconds=3600.0, wal_bytes=2**20))
    wal = tmp_path / "state" / "journal.db-wal"
    longest = 0
    for n in range(3000):
        await store.append(note(n=n, text="x" * 2000))
        if n % 50 == 0:
            longest = max(longest, await anyio.to_thread.run_sync(lambda: wal.stat().st_size))
            await anyio.sleep(0.001)
    assert longest < 16 * 2**20  # 3,000 commits write three times as much
    lines = (tmp_path / "state" / "checkpoints.jsonl").read_bytes().count(b"\n")
    assert lines > 3
    assert await store.verify() == ()
    await store.close()
    assert await findings(tmp_path) == []


def _begun(home: Path) -> tuple[int, int]:
    """How often the log was begun anew, by its header, and how often that was done by the keeper or at the start."""
    with (home / "state" / "journal.db-wal").open("rb") as file:
        header = file.read(32)
    with closing(schema.connect(home / "state" / "journal.db", read_only=True)) as db:
        own = db.execute("SELECT number FROM mark WHERE name = 'wal'").fetchone()[0]
    return int.from_bytes(header[12:16], "big"), own - 1


async def _begins(home: Path) -> tuple[int, int]:
    return await anyio.to_thread.run_sync(lambda: _begun(home))


async def test_no_append_is_the_one_that_begins_the_log_anew_and_waits_for_the_disk(tmp_path: Path) -> None:
    store = await opened(tmp_path, pace=Pace(records=10**9, seconds=0.01, wal_bytes=2**18))
    for n in range(3000):
        await store.append(note(n=n, text="x" * 1000))
        if n % 100 == 0:
            await anyio.sleep(0.015)
    begun, own = await _begins(tmp_path)
    for _ in range(500):  # the keeper may be in the middle of it
        begun, own = await _begins(tmp_path)
        if begun == own:
            break
        await anyio.sleep(0.01)
    assert begun == own > 3

    def let_go() -> None:  # in a thread: the keeper may have the lock
        with store._writer.alone():
            store._writer.release()
            store._parts.keeper._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    # Positive control: without the read that is held open, an append does it. (Unless the keeper is at work just then.)
    for _ in range(50):
        await anyio.to_thread.run_sync(let_go)
        await store.append(note())
        begun, own = await _begins(tmp_path)
        if begun > own:
            break
    assert begun > own
    await store.close()
    assert await findings(tmp_path) == []


async def test_a_reader_that_stays_lets_the_log_grow_and_nothing_else(tmp_path: Path) -> None:
    store = await opened(tmp_path, pace=Pace(records=10**9, seconds=0.01, wal_bytes=2**18))
    reader = await anyio.to_thread.run_sync(lambda: schema.connect(tmp_path / "state" / "journal.db"))

    async def some() -> None:
        for n in range(300):
            await store.append(note(n=n, text="x" * 1000))
        await anyio.sleep(0.1)

    await store.append(note())
    await anyio.to_thread.run_sync(lambda: reader.execute("BEGIN").execute("SELECT * FROM mark").fetchall())
    before = await _begins(tmp_path)
    await some()
    await some()
    assert await _begins(tmp_path) == before
    await anyio.to_thread.run_sync(reader.close)
    await some()
    await some()
    begun, own = await _begins(tmp_path)
    assert begun == own > before[0]
    await store.close()
    assert await findings(tmp_path) == []


async def test_a_full_queue_says_busy(tmp_path: Path) -> None:
    store = await opened(tmp_path, durability="disk")
    busy = 0

    async def add() -> None:
        nonlocal busy
        try:
            await store.append(note())
        except Busy:
            busy += 1

    owned = store._writer.alone()
    await anyio.to_thread.run_sync(owned.__enter__)
    try:
        async with anyio.create_task_group() as group:
            for _ in range(4200):
                group.start_soon(add)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    finally:
        owned.__exit__(None, None, None)
    assert busy >= 4200 - 4096 - 1
    for _ in range(1000):
        if not store._writer._queue:
            break
        await anyio.sleep(0.01)
    await store.append(note())  # the same request succeeds later
    await store.close()
    assert await findings(tmp_path) == []


# What is not ours, or not whole, is never used and never made anew.


async def made(home: Path, count: int = 3) -> Path:
    store = await opened(home)
    for n in range(count):
        await store.append(note(n=n))
    await store.close()
    return home / "state" / "journal.db"


def _edit(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = OFF")
        for statement in statements:
            db.execute(statement)


def _text(path: Path) -> None:
    path.write_bytes(b"not a database at all, but some text" * 100)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": _text,
    "half": _half,
    "directory": _directory,
    "foreign": lambda path: _edit(path, "PRAGMA application_id = 7"),
    "newer": lambda path: _edit(path, "PRAGMA user_version = 99"),
    "trigger": lambda path: _edit(
        path, "CREATE TRIGGER t AFTER INSERT ON record BEGIN DELETE FROM chain; END"
    ),
    "table gone": lambda path: _edit(path, "DROP TABLE chain"),
    "database gone": lambda path: path.unlink(),
    "checkpoints gone": lambda path: (path.parent / "checkpoints.jsonl").unlink(),
    "checkpoints cut": lambda path: (path.parent / "checkpoints.jsonl").write_bytes(b""),
    "key gone": lambda path: (path.parent.parent / "keys" / "journal.key").unlink(),
    "key of others": lambda path: (path.parent.parent / "keys" / "journal.key").chmod(0o644),
    "mark gone": lambda path: _edit(path, "DELETE FROM mark"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_is_refused_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    path = await made(tmp_path)
    DAMAGE[damage](path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreDamaged):
        await opened(tmp_path)
    assert (path.read_bytes() if path.is_file() else b"") == before


async def test_a_key_of_another_journal_is_refused(tmp_path: Path) -> None:
    await made(tmp_path)
    await made(tmp_path / "other")
    shutil.copy2(tmp_path / "other/keys/journal.key", tmp_path / "keys/journal.key")
    with pytest.raises(StoreDamaged):
        await opened(tmp_path)
    assert (await findings(tmp_path))[0] == ("checkpoints", 1)


async def test_a_torn_last_checkpoint_is_cut_and_recorded(tmp_path: Path) -> None:
    path = await made(tmp_path)
    file = path.parent / "checkpoints.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"at":1,"hea')
    store = await opened(tmp_path)
    records = await store.read("engine")
    assert (records[-1].act, records[-1].payload) == ("journal.checkpoint_cut", {"bytes": 12})
    await store.close()
    assert file.read_bytes().startswith(whole)
    assert await findings(tmp_path) == []


async def test_a_half_made_journal_was_never_one(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "journal.db.new").write_bytes(b"half")
    store = await opened(tmp_path)
    await store.append(note())
    await store.close()
    assert sorted(os.listdir(tmp_path / "state")) == ["checkpoints.jsonl", "journal.db"]


# A full disk: nothing is acknowledged that is not stored, and it heals without a restart.


async def _until_full(store: SqliteStore) -> int:
    for stored in range(20_000):
        try:
            await store.append(note(n=stored, text="x" * 4000))
        except StorageFull:
            return stored
    raise AssertionError("it never got full")


async def test_a_full_database_is_said_and_heals(tmp_path: Path) -> None:
    store = await opened(tmp_path, pace=QUIET)
    await store.append(note(n=-1))
    db = store._parts.db
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 50}")
    stored = await _until_full(store)
    info = sandbox()
    with pytest.raises(StorageFull):
        await store.append(note(text="x" * 60_000), note(text="x" * 60_000))
    db.execute("PRAGMA max_page_count = 1000000")
    await store.add(info, note(info.id))
    record = (await store.append(note(n=-2)))[0]
    assert record.seq == stored + 2
    assert await store.verify() == ()
    await store.close()
    assert await findings(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "small"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", target], check=True)
    yield target
    subprocess.run(["umount", target], check=True)


@pytest.mark.needs_root
@pytest.mark.parametrize("durability", ["process", "disk"])
async def test_a_full_disk_is_said_and_heals(
    tmp_path: Path, small_disk: Path, durability: Durability
) -> None:
    ballast = small_disk / "ballast"
    await anyio.Path(ballast).write_bytes(bytes(600_000))
    store = await SqliteStore.open(
        small_disk / "state", key=tmp_path / "k" / "key", engine_id="en-test", durability=durability
    )
    stored = await _until_full(store)
    assert stored > 10
    with pytest.raises(StorageFull):
        await store.append(note(text="x" * 60_000), note(text="x" * 60_000))
    await anyio.Path(ballast).unlink()
    record = (await store.append(note(n=-2)))[0]
    assert record.seq == stored + 1
    assert await store.verify() == ()
    await store.close()
    assert await verified(small_disk / "state", tmp_path / "k" / "key") == ()


# What was changed is named.


async def _chain_of(home: Path, count: int = 6) -> Path:
    store = await opened(home)
    for n in range(count):
        await store.append(note("a", n=n), note("b", n=n))
    await store.close()
    return home / "state" / "journal.db"


ALTERED = {
    "deleted": ("DELETE FROM record WHERE chain = 1 AND seq = 3", ("a", 3)),
    "tail cut": ("DELETE FROM record WHERE chain = 1 AND seq > 4", ("a", 5)),
    "first": ("DELETE FROM record WHERE chain = 1 AND seq = 1", ("a", 1)),
    "chain emptied": ("DELETE FROM record WHERE chain = 1", ("a", 1)),
    "renamed": ("UPDATE chain SET name = 'z' WHERE number = 1", ("z", 1)),
    "moved": ("UPDATE record SET id = id + (76 << 32) WHERE chain = 1", ("a", 1)),
    "payload gone": ("UPDATE record SET payload = NULL WHERE chain = 1 AND seq = 2", ("a", 2)),
    "other digest": ("UPDATE record SET payload_digest = x'00' WHERE chain = 1 AND seq = 2", ("a", 2)),
    "erased unsaid": (
        "UPDATE record SET payload = NULL, payload_digest = x'00' WHERE chain = 1 AND seq = 2",
        ("a", 2),
    ),
    "before the first": ("UPDATE record SET id = 1 << 32 WHERE chain = 1 AND seq = 1", ("a", 1)),
    "numbered below all": ("UPDATE chain SET number = -9223372036854775808 WHERE number = 1", ("a", 1)),
    "numbered above all": ("UPDATE chain SET number = 9223372036854775807 WHERE number = 1", ("#1", 1)),
    "text type": ("UPDATE record SET act = x'00' WHERE chain = 1 AND seq = 2", ("a", 2)),
    "not UTF-8": ("UPDATE record SET act = CAST(x'ff' AS TEXT) WHERE chain = 1 AND seq = 2", ("a", 2)),
}


@pytest.mark.parametrize("change", ALTERED)
async def test_a_change_is_named_by_chain_and_record(tmp_path: Path, change: str) -> None:
    path = await _chain_of(tmp_path)
    assert await findings(tmp_path) == []
    statement, expected = ALTERED[change]
    _edit(path, statement)
    assert (await findings(tmp_path))[0] == expected
    assert "b" not in dict(await findings(tmp_path))


async def test_a_chain_that_vanished_whole_is_named(tmp_path: Path) -> None:
    path = await _chain_of(tmp_path)
    _edit(path, "DELETE FROM record WHERE chain = 1", "DELETE FROM chain WHERE number = 1")
    assert await findings(tmp_path) == [("a", 1)]


async def test_an_older_copy_is_a_cut_tail_and_going_on_with_it_is_seen(tmp_path: Path) -> None:
    path = await _chain_of(tmp_path)
    old = path.read_bytes()
    store = await opened(tmp_path)
    await store.append(note("a", n=6), note("a", n=7))
    await store.close()
    path.write_bytes(old)
    assert await findings(tmp_path) == [("a", 7)]
    store = await opened(tmp_path)
    await store.append(note("a", n=60), note("a", n=70), note("a", n=80))
    await store.close()
    assert await findings(tmp_path) == [("a", 8)]


async def test_cut_and_altered_checkpoints_are_named(tmp_path: Path) -> None:
    path = await _chain_of(tmp_path)
    await (await opened(tmp_path)).close()
    store = await opened(tmp_path)
    await store.append(note("a"))
    await store.close()
    file = path.parent / "checkpoints.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2
    file.write_bytes(lines[0])
    assert await findings(tmp_path) == [("checkpoints", 2)]
    file.write_bytes(lines[1])
    assert (await findings(tmp_path))[0] == ("checkpoints", 1)
    file.write_bytes(lines[0] + lines[1].replace(b"en-test", b"en-fake"))
    assert await findings(tmp_path) == [("checkpoints", 2)]
    file.write_bytes(lines[0] + lines[1])
    assert await findings(tmp_path) == []


async def test_verifying_beside_a_writer_finds_nothing(tmp_path: Path) -> None:
    store = await opened(tmp_path, pace=Pace(records=20, seconds=0.01, wal_bytes=2**20))
    done = False

    async def write() -> None:
        n = 0
        while not done:
            await store.append(Draft(chain=f"c{n % 7}", act="a", phase=Phase.NOTE, payload={"n": n}))
            n += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        for _ in range(10):
            assert await store.verify() == ()
            assert await findings(tmp_path) == []
        done = True
    await store.close()


# A journal has a bound.


async def _bounded(home: Path, clock: list[float]) -> SqliteStore:
    return await SqliteStore.open(
        home / "state",
        key=home / "keys" / "journal.key",
        engine_id="en-test",
        pace=Pace(records=20, seconds=0.01, keep_bytes=300_000),
        now=lambda: clock[0],
    )


async def _lived(store: SqliteStore, count: int) -> list[SandboxInfo]:
    """Sandboxes with a few records each, all gone; every tenth of them with more than are dropped in one step."""
    infos = [sandbox() for _ in range(count)]
    for n, info in enumerate(infos):
        await store.add(info, note(info.id))
        await store.append(*(note(info.id, n=m, text="x" * 300) for m in range(130 if n % 10 == 0 else 5)))
        await store.move(info.id, seen=info.state, to=State.GONE, draft=note(info.id))
    return infos


def _dropped(home: Path) -> int:
    with JournalReader(home / "state") as reader:
        return reader.dropped()


async def _until_dropped(store: SqliteStore, chains: int) -> dict[str, Json]:
    for _ in range(500):
        notes = await store.latest("engine", "journal.drop")
        named = {
            name: end for one in notes for name, end in cast("dict[str, Json]", one.payload["chains"]).items()
        }
        if len(named) >= chains and not await store.read(list(named)[-1]):
            return named
        await anyio.sleep(0.02)
    raise AssertionError("nothing was dropped")


async def test_the_oldest_of_what_is_gone_is_dropped_and_the_rest_verifies(tmp_path: Path) -> None:
    clock = [1000.0]
    store = await _bounded(tmp_path, clock)
    alive = sandbox(state=State.RUNNING)
    await store.add(alive, note(alive.id))
    old = await _lived(store, 60)
    await anyio.sleep(0.1)
    assert await store.latest("engine", "journal.drop") == ()  # they ended just now
    clock[0] += 1000.0
    young = await _lived(store, 1)
    named = await _until_dropped(store, 60)
    assert {info.id for info in old} <= named.keys()
    assert not {alive.id, young[0].id, "engine"} & named.keys()
    with pytest.raises(NotFound):
        await store.get(old[0].id)
    assert len(await store.read(alive.id)) == 1
    assert await anyio.to_thread.run_sync(lambda: _dropped(tmp_path)) == len(named) >= 60
    assert len(await store.read(young[0].id)) == 132
    assert await store.verify() == ()
    await store.close()
    assert await findings(tmp_path) == []
    _edit(tmp_path / "state" / "journal.db", f"DELETE FROM record WHERE chain = (SELECT number FROM chain WHERE name = '{alive.id}')")  # fmt: skip
    assert await findings(tmp_path) == [(alive.id, 1)]


async def test_half_dropped_is_no_damage_and_is_finished(tmp_path: Path) -> None:
    """As a death between the signed record and the last deletion leaves it."""
    clock = [1000.0]
    store = await _bounded(tmp_path, clock)
    old = await _lived(store, 60)
    clock[0] += 1000.0
    retention = store._parts.keeper._retention
    dropped = retention._delete

    def dies(victim: Victim) -> int:
        dropped(victim)
        raise StorageFull("here")

    retention._delete = dies  # type: ignore[method-assign]
    await store.append(*(note(n=n) for n in range(30)))
    for _ in range(200):
        if not await store.read(old[0].id, limit=1, after=0) or (await store.read(old[0].id))[0].seq > 1:
            break
        await anyio.sleep(0.02)
    assert [record.seq for record in await store.read(old[0].id)] == list(range(101, 133))
    assert await store.verify() == ()
    await store.close()
    assert await findings(tmp_path) == []
    store = await _bounded(tmp_path, clock)
    await store.append(*(note(n=n) for n in range(30)))
    for _ in range(200):
        if not await store.read(old[0].id):
            break
        await anyio.sleep(0.02)
    assert await store.read(old[0].id) == ()
    assert await store.verify() == ()
    await store.close()
    assert await findings(tmp_path) == []


@pytest.mark.parametrize("late", ["named", "signed", "dropped"])
async def test_a_late_record_of_a_dropped_chain_is_kept_and_verified(tmp_path: Path, late: str) -> None:
    """A record that comes after the one that names its chain is not what was said to be dropped."""
    store = await opened(tmp_path)
    await store.append(*(note("sb-x", n=n) for n in range(20)))
    keeper = store._parts.keeper
    await anyio.to_thread.run_sync(keeper.sign)
    victims = await anyio.to_thread.run_sync(keeper._retention.name)
    if late == "named":
        await store.append(note("sb-x", n=20))
    await anyio.to_thread.run_sync(keeper.sign)
    if late == "signed":
        await store.append(note("sb-x", n=20))
        await anyio.to_thread.run_sync(keeper.sign)
    await anyio.to_thread.run_sync(keeper._retention.drop, victims)
    if late == "dropped":
        await store.append(*(note("sb-x", n=20 + n) for n in range(30)))
    assert (await store.read("sb-x"))[-1].payload["n"] in (20, 49)
    await anyio.to_thread.run_sync(keeper.sign)
    assert await store.verify() == ()
    await store.close()
    assert await findings(tmp_path) == []
    _edit(tmp_path / "state" / "journal.db", "UPDATE record SET at = at + 1 WHERE seq = 21")
    assert await findings(tmp_path) == [("sb-x", 21)]


async def test_what_only_an_unsigned_record_calls_dropped_is_missing(tmp_path: Path) -> None:
    path = await _chain_of(tmp_path)
    named: dict[str, Json] = {"chains": {"a": [6, "00" * 32]}}
    forged = Draft(chain="engine", act="journal.drop", phase=Phase.NOTE, payload=named)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DELETE FROM record WHERE chain = 1")
        db.execute("DELETE FROM chain WHERE number = 1")
        number = db.execute("INSERT INTO chain (name) VALUES ('engine')").lastrowid or 0
        one = prepare(forged)
        digest = link(one, seq=1, at=1, previous=GENESIS)
        row = (number << 32 | 1, 1, forged.act, "note", "", "local", one.payload, digest)
        db.execute(
            "INSERT INTO record (id, at, act, phase, ref, actor, payload, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )
    assert await findings(tmp_path) == [("a", 1)]


async def test_verifying_while_chains_are_dropped_finds_nothing(tmp_path: Path) -> None:
    clock = [1000.0]
    store = await _bounded(tmp_path, clock)
    for _ in range(4):
        await _lived(store, 40)
        clock[0] += 1000.0
        for _ in range(3):
            assert await findings(tmp_path) == []
    assert len(await store.latest("engine", "journal.drop")) > 1
    await store.close()
    assert await findings(tmp_path) == []


async def test_a_disk_that_is_full_at_the_first_start_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is whole or not there, and the next start makes one."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dsec.stores.checkpoints.os.fsync", full)
    with pytest.raises(StorageFull):
        await SqliteStore.open(tmp_path / "state", key=tmp_path / "keys/key", engine_id="en-test")
    monkeypatch.undo()
    assert not list((tmp_path / "keys").iterdir())
    store = await SqliteStore.open(tmp_path / "state", key=tmp_path / "keys/key", engine_id="en-test")
    await store.close()
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["key", "key.begun"]


async def test_a_journal_of_the_third_version_is_made_one_of_this(tmp_path: Path) -> None:
    infos = lived()
    await anyio.to_thread.run_sync(earlier, tmp_path, 3, infos)
    store = await SqliteStore.open(
        tmp_path / "state", key=tmp_path / "journal.key", engine_id="en-test", pace=QUIET
    )
    assert [await store.get(info.id) for info in infos] == infos
    assert (await store.page(project=infos[0].spec.project)).items == (infos[0],)
    assert await store.count() == {State.RUNNING: 1, State.GONE: 1}
    found = [(position, record.chain, record.seq) for position, record in await store.tail(0)]
    signed, unsigned = (
        [(info.id, seq) for info in infos[:1] for seq in (1, 2, 3)],
        [(infos[1].id, seq) for seq in (1, 2, 3)],
    )
    assert found == [(n, *one) for n, one in enumerate([*signed, *unsigned], 1)], (
        "what is not signed comes last"
    )
    assert list(store._ledger.unsigned) == [infos[1].id]
    await store.append(note(infos[0].id))
    assert (await store.tail(6))[0][0] == 7
    assert await store.verify() == ()
    await store.close()
    found_too = await verified(tmp_path / "state", tmp_path / "journal.key")
    assert found_too == ()
