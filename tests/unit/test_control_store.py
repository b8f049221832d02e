"""The control database, on SQLite and on PostgreSQL: the same code, the same answers."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import text

from dsec.errors import (
    BadRequest,
    Busy,
    Conflict,
    Denied,
    RuntimeUnavailable,
    StorageFull,
    StoreDamaged,
)
from dsec.model.ids import KeyId, new_key_id, new_sandbox_id
from dsec.model.tenants import KeyInfo, ProjectInfo, Quota, Scope
from dsec.ports.idempotency import Recorded
from dsec.stores.control import calls, rows
from dsec.stores.control.calls import Calls
from dsec.stores.control.database import Database, PostgresDatabase, SqliteDatabase
from dsec.stores.control.store import DATABASE, ControlStore, open_control
from dsec.stores.control.tables import HEAD, metadata
from dsec.testing.postgres import execute

pytestmark = pytest.mark.anyio

DIGEST = b"d" * 32
ANSWER = Recorded(status=201, media_type="", body=b"{}")
Where = Path | str


async def never() -> bool:
    return False


async def used() -> bool:
    return True


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    if request.param == "sqlite":
        return tmp_path
    url: str = request.getfixturevalue("postgres_url")
    return url


async def opened(where: Where, was_used: Callable[[], Awaitable[bool]] = never) -> ControlStore:
    return await open_control(where, was_used=was_used)


def key(**facts: object) -> KeyInfo:
    return KeyInfo(id=new_key_id(), scope=Scope.DEVELOPER, **facts)  # type: ignore[arg-type]


async def test_what_is_kept_is_there_when_it_is_opened_again(where: Where) -> None:
    info = key(project="acme", label="ci", created_at=1.5, expires_at=9.0)
    quota = Quota(sandboxes=3, rate=0.5, share=2)
    store = await opened(where)
    await store.add(info, DIGEST)
    await store.put_project(ProjectInfo(name="acme", quota=quota, created_at=2.0))
    await store.put_project(ProjectInfo(name="acme", quota=quota, created_at=3.0))
    await store.advance("siem", 7)
    await store.advance("siem", 3)
    await store.close()
    await store.close()
    store = await opened(where, used)
    assert await store.find(DIGEST) == info
    assert await store.find(b"x" * 32) is None
    assert await store.projects() == (ProjectInfo(name="acme", quota=quota, created_at=2.0),)
    assert (await store.position("siem"), await store.position("other")) == (7, 0)
    await store.close()
    with pytest.raises(Conflict):
        await store.projects()


async def test_keys_are_revoked_listed_and_forgotten(where: Where) -> None:
    store = await opened(where)
    first, second = sorted([key(project="a"), key(project="b")], key=lambda each: each.id)
    sandbox, other = new_sandbox_id(), new_sandbox_id()
    await store.add(first, b"1" * 32)
    await store.add(second, b"2" * 32)
    await store.add(key(sandbox=sandbox), b"3" * 32)
    await store.add(key(sandbox=other), b"4" * 32)
    assert await store.page("", after="", limit=10) == (first, second)
    assert await store.page("", after=first.id, limit=10) == (second,)
    assert await store.page(second.project, after="", limit=10) == (second,)
    assert await store.used({first.id: 5.0, KeyId("ky-gone"): 5.0}) == {"ky-gone"}
    revoked = await store.revoke(first.id, 6.0)
    assert revoked is not None
    assert (revoked.used_at, revoked.revoked_at) == (5.0, 6.0)
    assert (await store.revoke(first.id, 7.0)) == revoked
    assert await store.revoke(new_key_id(), 7.0) is None
    assert await store.used({first.id: 8.0}) == {first.id}
    assert await store.with_tokens("", 10) == tuple(sorted((sandbox, other)))
    assert await store.drop(before=7.0, sandboxes=[sandbox]) == 2
    assert await store.with_tokens("", 10) == (other,)
    await store.close()


async def test_keys_are_bounded(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_TOKENS", 1)
    store = await opened(where)
    sandbox = new_sandbox_id()
    await store.add(key(sandbox=sandbox), b"1" * 32)
    with pytest.raises(Conflict):
        await store.add(key(sandbox=sandbox), b"2" * 32)
    await store.add(key(sandbox=new_sandbox_id()), b"2" * 32)
    await store.close()


async def test_a_request_is_begun_once_and_keeps_its_first_answer(where: Where) -> None:
    store = await opened(where)
    known = Calls(store.database, clock=lambda: 100.0)
    begun = [None] * 20

    async def ask(number: int) -> None:
        begun[number] = await known.begin("acme", "k", "r")  # type: ignore[call-overload]

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(ask, number)
    assert [each.fresh for each in begun].count(True) == 1  # type: ignore[attr-defined]
    with pytest.raises(Conflict):
        await known.begin("acme", "k", "another")
    assert (await known.begin("other", "k", "another")).fresh
    answer = Recorded(status=201, media_type="application/json", body=b"\0\xff")
    await known.finish("acme", "k", answer)
    await known.finish("acme", "k", Recorded(status=500, media_type="", body=b""))
    await known.forget("acme", "k")
    await known.forget("other", "k")
    await store.close()
    store = await opened(where)
    known = Calls(store.database)
    again = await known.begin("acme", "k", "r")
    assert (again.fresh, again.at, again.answer) == (False, 100.0, answer)
    assert (await known.begin("other", "k", "r")).fresh
    assert await known.sweep(200.0, 10) == 1
    assert (await known.begin("acme", "k", "r")).fresh
    await store.close()


async def test_what_is_remembered_of_requests_is_bounded_and_the_oldest_go_first(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST_CALLS", 3)
    monkeypatch.setattr(calls, "_AT_ONCE", 1)
    store, now = await opened(where), [1000.0]
    known = Calls(store.database, clock=lambda: now[0])
    for number in range(3):
        now[0] += 1
        await known.begin("a", str(number), "r")
    await known.finish("a", "1", ANSWER)
    await known.finish("a", "2", ANSWER)
    with pytest.raises(Busy):
        await known.begin("b", "k", "r")
    now[0] += calls.YOUNG + 1  # and what has no answer yet is kept, however old
    assert (await known.begin("b", "k", "r")).fresh
    assert not (await known.begin("a", "0", "r")).fresh
    await store.close()
    known = Calls((store := await opened(where)).database, clock=lambda: now[0])  # counted anew
    assert (await known.begin("a", "1", "r")).fresh, "it was the oldest that had an answer"
    await known.forget("a", "1")
    assert (await known.begin("c", "k", "r")).fresh
    await store.close()


async def test_requests_of_one_project_that_were_never_answered_keep_no_other_one_out(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST_CALLS", 4)
    monkeypatch.setattr(calls, "MOST_CALLS_OF_PROJECT", 2)
    store, now = await opened(where), [1000.0]
    known = Calls(store.database, clock=lambda: now[0])
    for number in range(2):
        await known.begin("a", str(number), "r")
    now[0] += calls.YOUNG + 1  # they stay
    with pytest.raises(Busy):
        await known.begin("a", "2", "r")
    assert (await known.begin("b", "0", "r")).fresh
    await store.close()
    known = Calls((store := await opened(where)).database, clock=lambda: now[0])  # counted anew
    with pytest.raises(Busy):
        await known.begin("a", "2", "r")
    await known.finish("a", "0", ANSWER)
    now[0] += calls.YOUNG + 1
    assert (await known.begin("a", "2", "r")).fresh, "what is answered and old makes room"
    await store.close()


async def test_answers_of_one_project_take_so_much_and_no_other_one_suffers(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST_OF_PROJECT", 1000)
    store, now = await opened(where), [1000.0]
    known = Calls(store.database, clock=lambda: now[0])
    large = Recorded(status=200, media_type="", body=b"x" * 600)
    for number in range(2):
        await known.begin("a", str(number), "r")
        await known.finish("a", str(number), large)
        await known.finish("a", str(number), large)  # counted once
    with pytest.raises(Busy) as caught:
        await known.begin("a", "2", "r")
    assert caught.value.facts["retry_after"] == 60
    assert (await known.begin("b", "0", "r")).fresh
    now[0] += calls.YOUNG + 1
    assert (await known.begin("a", "2", "r")).fresh
    assert (await known.begin("a", "0", "r")).fresh, "forgotten"
    assert (await known.begin("b", "0", "r")).answer is None
    now[0] += calls.YOUNG
    assert await known.sweep(now[0] + 1, 100) == 3
    assert (known._count, known._size, dict(known._sizes)) == (0, 0, {})
    await store.close()


async def test_a_lost_one_is_refused_and_not_begun_anew(where: Where) -> None:
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="is not there") as caught:
            await opened(where, used)
        assert "begin-anew" in caught.value.hint
    await (await opened(where)).close()
    await (await opened(where, used)).close()


async def test_a_later_version_and_other_tables_are_refused(where: Where) -> None:
    store = await opened(where)
    await store.database.run(lambda c: c.execute(text("ALTER TABLE project ADD COLUMN extra TEXT")))
    await store.close()
    with pytest.raises(StoreDamaged, match="extra"):
        await opened(where)
    fresh = await _reopened_raw(where)
    await fresh.run(lambda c: c.execute(text("UPDATE control_version SET version_num = '9999'")))
    await fresh.close()
    with pytest.raises(StoreDamaged, match="9999"):
        await opened(where)


async def _reopened_raw(where: Where) -> Database:
    if isinstance(where, Path):
        return SqliteDatabase(where / DATABASE, synced=False)
    return PostgresDatabase(where)


async def test_an_act_that_fails_leaves_nothing(where: Where) -> None:
    store = await opened(where)

    def work(connection: object) -> None:
        rows.put_project(connection, ProjectInfo(name="half"))  # type: ignore[arg-type]
        raise BadRequest("no")

    with pytest.raises(BadRequest):
        await store.database.run(work)
    assert await store.projects() == ()
    await store.close()


async def test_what_is_asked_at_once_is_done_each_for_itself(where: Where) -> None:
    store = await opened(where)

    def fails(connection: object) -> None:
        rows.put_project(connection, ProjectInfo(name="half"))  # type: ignore[arg-type]
        raise BadRequest("no")

    asked = [
        store.database.run(fails) if number % 10 == 3 else store.put_project(ProjectInfo(name=f"p{number}"))
        for number in range(100)
    ]
    told = await asyncio.gather(*asked, return_exceptions=True)
    assert [number for number, one in enumerate(told) if isinstance(one, BadRequest)] == list(
        range(3, 100, 10)
    )
    assert {one.name for one in await store.projects()} == {f"p{n}" for n in range(100) if n % 10 != 3}
    await store.close()


async def test_whoever_is_cancelled_has_it_done_wholly_or_not_at_all(where: Where) -> None:
    store = await opened(where)
    with anyio.move_on_after(0):
        await store.put_project(ProjectInfo(name="a"))
    assert len(await store.projects()) in (0, 1)
    await store.close()


async def test_a_project_that_several_make_at_once_is_one(where: Where) -> None:
    store = await opened(where)
    quotas = [Quota(sandboxes=number) for number in range(8)]
    asked = [store.put_project(ProjectInfo(name="one", quota=quota)) for quota in quotas]
    asked_too = [store.advance("siem", number) for number in range(8)]
    told = await asyncio.gather(*asked, *asked_too)
    assert (await store.projects())[0].quota in quotas
    assert {one.quota for one in told[:8] if one is not None} == set(quotas)
    assert await store.position("siem") == 7
    await store.close()


# PostgreSQL


async def test_an_answer_that_was_lost_is_counted_anew(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was begun, and nobody heard of it."""
    store = await opened(postgres_url)
    known, real = Calls(store.database, clock=lambda: 100.0), store.database.run
    await known.begin("a", "0", "r")

    async def run(work: Callable[[Any], Any]) -> Any:
        await real(work)
        raise RuntimeUnavailable("lost")

    monkeypatch.setattr(store.database, "run", run)
    with pytest.raises(RuntimeUnavailable):
        await known.begin("a", "1", "r")
    monkeypatch.undo()
    assert not (await known.begin("a", "1", "r")).fresh
    assert known._count == 2
    await store.close()


async def test_connections_that_were_ended_are_made_again(postgres_url: str) -> None:
    store = await opened(postgres_url)
    await store.projects()
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dsec' AND pid <> pg_backend_pid()"
    assert await execute(postgres_url, ended)
    assert await store.projects() == ()
    await store.close()


# SQLite


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


async def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)}
    assert set(modes.values()) == {0o600}


async def test_a_file_that_is_none_or_broken_or_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with pytest.raises(StoreDamaged):
        await opened(tmp_path)
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (a)")
    with pytest.raises(StoreDamaged, match="not one of DSec"):
        await opened(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Denied):
        await opened(tmp_path)


async def test_a_broken_page_is_found_when_it_is_opened(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    for number in range(200):
        await store.add(key(label="x" * 200), b"%032d" % number)
    await store.close()
    path = tmp_path / DATABASE
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(os.urandom(4096))
    with pytest.raises(StoreDamaged):
        await opened(tmp_path, used)


async def test_a_truncated_file_is_lost_and_not_empty(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    for path in files(tmp_path):
        path.write_bytes(b"")
    with pytest.raises(StoreDamaged, match="is not there"):
        await opened(tmp_path, used)


async def fill(store: ControlStore) -> None:
    for number in range(1000):
        await store.add(key(label="x" * 200), b"%032d" % number)


async def test_a_full_disk_is_told_and_passes(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    pages = await store.database.run(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar())
    await store.database.run(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count = {pages}"))
    with pytest.raises(StorageFull):
        await fill(store)
    before = len(await store.page("", after="", limit=1000))
    await store.database.run(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1000000"))
    await store.add(key(), b"y" * 32)
    assert len(await store.page("", after="", limit=1000)) == before + 1
    await store.close()


# PostgreSQL


async def test_an_address_that_is_none_or_does_not_answer_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadRequest):
        await opened("mysql://x/y")
    with pytest.raises(BadRequest):
        await opened("nothing")
    with pytest.raises(RuntimeUnavailable):
        await opened(f"postgresql://dsec@/none?host={tmp_path}")


async def test_a_database_that_is_not_there_is_told(postgres_server: str) -> None:
    with pytest.raises(Denied):
        await opened(postgres_server.format("nowhere"))


async def test_connections_that_were_cut_are_made_again(postgres_url: str, postgres_server: str) -> None:
    store = await opened(postgres_url)
    name = postgres_url.rpartition("?")[0].rpartition("/")[2]
    kill = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    await execute(postgres_server.format("postgres"), kill)
    assert await store.projects() == ()
    await store.close()


def test_the_newest_migration_is_the_one_that_the_tables_are_of() -> None:
    config = Config()
    config.set_main_option("script_location", "dsec:stores/control")
    config.set_main_option("version_locations", "dsec:stores/control_steps")
    config.set_main_option("path_separator", "newline")
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD
    assert set(metadata.tables) == {"api_key", "project", "idempotent_call", "export_cursor"}
