"""Two projects on one real server: keys over HTTP, what each finds, and what the journal says of whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from dsec.client.aio import AsyncDsec
from dsec.errors import Conflict, Denied, DsecError, NotFound, StoreDamaged, Unauthenticated
from dsec.model.ids import new_sandbox_id
from dsec.model.tenants import Quota
from dsec.stores.control.tables import VERSIONS, metadata
from dsec.testing.postgres import execute
from dsec.wire.problems import to_body
from dsec.wiring.servers import server
from dsec.wiring.serving import Place, Running, serving
from dsec.wiring.settings import Settings
from dsec.wiring.tenants import go_on_without, shared

pytestmark = pytest.mark.both_databases


@asynccontextmanager
async def running_in(tmp_path: Path, database: str, wait: float = 10.0) -> AsyncIterator[Running]:
    settings = Settings(
        home=tmp_path / "engine",
        images=tmp_path / "store",
        pool=0,
        shelf=0,
        pool_bytes=2**28,
        database=database,
        wait=wait,
    )
    async with serving(Place(home=tmp_path, port=0), settings, shared) as found:
        yield found


def of(running: Running, key: str) -> AsyncDsec:
    return AsyncDsec(server(running.url, key))


def owner(running: Running) -> AsyncDsec:
    return AsyncDsec(server(f"unix://{running.socket}", ""))


def test_two_projects_are_strangers_and_every_act_has_its_key(tmp_path: Path, database_url: str) -> None:
    asyncio.run(_two_projects(tmp_path, database_url))


async def _two_projects(tmp_path: Path, database: str) -> None:
    async with running_in(tmp_path, database) as running, owner(running) as boss:
        ours = await boss.keys.create(project="ours")
        theirs = await boss.keys.create(project="theirs")
        async with of(running, ours.key) as mine, of(running, theirs.key) as other:
            sb = await mine.sandboxes.create(level="process")
            assert (await sb.exec(["echo", "hi"])).stdout == b"hi\n"
            answers = []
            for id in (sb.id, new_sandbox_id()):
                with pytest.raises(NotFound) as caught:
                    await other.sandboxes.get(id)
                answers.append(repr(to_body(caught.value)).replace(id, "ID"))
            assert answers[0] == answers[1]
            assert await other.sandboxes.list() == ()
            with pytest.raises(Denied):
                await other.keys.list()
            actors = {record.act: record.actor for record in await sb.events()}
            assert actors["sandbox.create"] == actors["exec"] == ours.info.id
            assert [info.id for info in await boss.sandboxes.list()] == [sb.id]
            assert (await boss.sandboxes.list())[0].spec.project == "ours"
            await boss.keys.revoke(ours.info.id)
            with pytest.raises(Unauthenticated):
                await mine.sandboxes.list()
            await (await boss.sandboxes.get(sb.id)).destroy()


def test_without_a_good_key_nothing_is_told(tmp_path: Path, database_url: str) -> None:
    asyncio.run(_no_key(tmp_path, database_url))


async def _no_key(tmp_path: Path, database: str) -> None:
    async with running_in(tmp_path, database) as running:
        for key in ("", "dsec_" + "x" * 43, "nonsense"):
            async with of(running, key) as nobody:
                with pytest.raises(Unauthenticated):
                    await nobody.sandboxes.list()
        found = await _figures(running)
        assert found['dsec_keys_refused_total{reason="unknown"}'] == 1
        assert found['dsec_keys_refused_total{reason="form"}'] >= 1
        assert found["dsec_journal_bytes"] > 0
        if database:
            size = "SELECT pg_total_relation_size('dsec.record') + pg_total_relation_size('dsec.chain')"
            assert found["dsec_journal_bytes"] > (await execute(database, size))[0][0]


async def _figures(running: Running) -> dict[str, float]:
    """Those of the server, as its owner is told them."""
    connector = aiohttp.UnixConnector(str(running.socket))
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        client.get("http://dsec/metrics") as answer,
    ):
        lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_keys_and_quotas_live_on_when_the_server_is_opened_again(tmp_path: Path, database_url: str) -> None:
    asyncio.run(_opened_again(tmp_path, database_url))


async def _opened_again(tmp_path: Path, database: str) -> None:
    async with running_in(tmp_path, database) as running, owner(running) as boss:
        made = await boss.keys.create(project="ours")
        await boss.projects.set("ours", Quota(sandboxes=0, rate=50.0))
        async with of(running, made.key) as mine:
            assert await mine.volumes.list() == (), "who names no project means his own"
    async with running_in(tmp_path, database) as running:
        async with of(running, made.key) as mine:
            assert [each.name for each in await mine.projects.list()] == ["ours"]
            assert (await mine.projects.get("ours")).quota.rate == 50.0
            with pytest.raises(DsecError) as caught:
                await mine.projects.get("default")
            assert caught.value.code == "not_found"
        async with owner(running) as boss:
            assert [each.id for each in await boss.keys.list()] == [made.info.id]


def test_a_database_serves_one_server_at_a_time_and_one_home_for_ever(
    tmp_path: Path, postgres_url: str
) -> None:
    asyncio.run(_one_server(tmp_path, postgres_url))


async def _one_server(tmp_path: Path, database: str) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with running_in(tmp_path / "one", database) as running:
        made = None
        async with owner(running) as boss:
            made = await boss.keys.create()
        with pytest.raises(Conflict, match="another engine has this database"):
            async with running_in(tmp_path / "two", database, wait=0.2):
                pass
        async with of(running, made.key) as mine:
            assert await mine.sandboxes.list() == ()
    with pytest.raises(StoreDamaged):
        async with running_in(tmp_path / "two", database):
            pass
    async with running_in(tmp_path / "one", database) as running, of(running, made.key) as mine:
        assert await mine.sandboxes.list() == ()


def test_a_lost_control_database_is_refused_until_somebody_goes_on_without_it(
    tmp_path: Path, database_url: str
) -> None:
    made = asyncio.run(_with_key(tmp_path, database_url))
    _lose_control(tmp_path / "engine", database_url)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="is not there"):
            asyncio.run(_with_key(tmp_path, database_url))
    asyncio.run(go_on_without(tmp_path / "engine"))
    asyncio.run(_refused(tmp_path, database_url, made))


def _lose_control(engine: Path, database: str) -> None:
    if database:
        asyncio.run(execute(database, "DROP TABLE dsec." + ", dsec.".join((VERSIONS, *metadata.tables))))
    for path in () if database else (engine / "control").iterdir():
        path.unlink()


async def _with_key(tmp_path: Path, database: str) -> str:
    async with running_in(tmp_path, database) as running, owner(running) as boss:
        return (await boss.keys.create()).key


async def _refused(tmp_path: Path, database: str, key: str) -> None:
    async with running_in(tmp_path, database) as running, of(running, key) as nobody:
        with pytest.raises(Unauthenticated):
            await nobody.sandboxes.list()
