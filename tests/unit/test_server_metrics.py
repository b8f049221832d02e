"""Figures for Prometheus: of what happened, by whomever, in labels that are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dsec.errors import StorageFull, Unauthenticated
from dsec.model.admission import AdmissionInfo
from dsec.model.execs import ExecRequest
from dsec.model.ids import new_sandbox_id
from dsec.model.journal import Draft, Phase
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import SandboxSpec, State
from dsec.model.tenants import OWNER, Principal, Scope
from dsec.ports.engine import Services
from dsec.ports.gate import Gate
from dsec.server import act_figures
from dsec.server.act_figures import Acts
from dsec.server.app import make_app
from dsec.server.listening import Listener, tcp_socket
from dsec.server.metrics import Meters, Sources, pool_figures, queue_figures
from dsec.testing.harness import Harness

pytestmark = pytest.mark.anyio

ADMIN, DEVELOPER = "dsec_" + "A" * 43, "dsec_" + "D" * 43

Found = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Found:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Found, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


class TwoKeys(Gate):
    """Of an administrator and of a developer."""

    def __init__(self, engine: Services) -> None:
        self._engine = engine

    async def principal(self, key: str) -> Principal:
        if key == ADMIN:
            return OWNER
        if key == DEVELOPER:
            return Principal(id="ky-d", scope=Scope.DEVELOPER)
        raise Unauthenticated("that is no key")

    def services(self, principal: Principal) -> Services:
        del principal
        return self._engine


class World:
    """A server over the fakes, and what it says of itself."""

    def __init__(self, url: str, client: aiohttp.ClientSession, engine: Services, harness: Harness) -> None:
        self.url = url
        self.client = client
        self.engine = engine
        self.harness = harness
        self.broken = False

    async def get(self, path: str, key: str = ADMIN, method: str = "GET") -> tuple[int, str]:
        async with self.client.request(method, self.url + path, headers={"x-api-key": key}) as answer:
            return answer.status, await answer.text()

    async def figures(self) -> Found:
        status, text = await self.get("/metrics")
        assert status == 200
        return parsed(text)

    async def counts(self) -> Mapping[State, int]:
        if self.broken:
            raise StorageFull("it was ordered to fail")
        return await self.harness.store.count()

    async def journal_bytes(self) -> int:
        return 4096


@pytest.fixture
async def world() -> AsyncIterator[World]:
    harness = Harness(system_clock=True)
    engine = await harness.connect()
    bound = tcp_socket("127.0.0.1", 0)
    async with aiohttp.ClientSession() as client:
        made = World(f"http://127.0.0.1:{bound.getsockname()[1]}", client, engine, harness)
        meters = Meters(
            Sources(
                engine=engine, journal=harness.store, counts=made.counts, journal_bytes=made.journal_bytes
            )
        )
        listener = Listener(await asyncio.to_thread(lambda: make_app(TwoKeys(engine), meters=meters)))
        await listener.listen(bound)
        try:
            yield made
        finally:
            await client.close()
            await listener.stop(engine.close, drain=0.1)


class TestEngine:
    async def test_what_happened_is_counted_through_whichever_door(self, world: World) -> None:
        await world.figures()
        info = await world.engine.sandboxes.create(SandboxSpec())  # not by HTTP
        for _ in range(3):
            await world.engine.execs.run(info.id, ExecRequest(argv=(b"true",)))
        await world.engine.sandboxes.destroy(info.id)
        found = await world.figures()
        assert value(found, "dsec_acts_total", act="sandbox.create", outcome="ok") == 1
        assert value(found, "dsec_acts_total", act="exec", outcome="ok") == 3
        assert value(found, "dsec_acts_total", act="sandbox.destroy", outcome="ok") == 1
        assert value(found, "dsec_act_seconds_count", act="exec") == 3
        assert value(found, "dsec_journal_records_total") == 10
        assert value(found, "dsec_journal_bytes") == 4096
        assert value(found, "dsec_journal_figures_late") == 0

    async def test_failures_are_told_apart(self, world: World) -> None:
        await world.figures()
        world.harness.runtime.broken = True
        status, _ = await world.get("/v1/sandboxes", method="POST")
        assert status == 503
        found = await world.figures()
        assert value(found, "dsec_acts_total", act="sandbox.create", outcome="failed") == 1

    async def test_what_is_there_now(self, world: World) -> None:
        await world.engine.sandboxes.create(SandboxSpec())
        paused = await world.engine.sandboxes.create(SandboxSpec())
        await world.engine.sandboxes.pause(paused.id)
        found = await world.figures()
        assert value(found, "dsec_sandboxes", state="running") == 1
        assert value(found, "dsec_sandboxes", state="paused") == 1
        assert value(found, "dsec_sandboxes", state="failed") == 0
        assert value(found, "dsec_problems") == 0

    async def test_what_cannot_be_had_hides_nothing_else(self, world: World) -> None:
        world.broken = True
        found = await world.figures()
        assert ("dsec_sandboxes", frozenset({("state", "running")})) not in found
        assert value(found, "dsec_scrape_failures_total") == 1
        assert value(found, "dsec_problems") == 0

    async def test_once_begun_it_counts_before_anybody_looks(self, world: World) -> None:
        meters = Meters(
            Sources(
                engine=world.engine,
                journal=world.harness.store,
                counts=world.counts,
                journal_bytes=world.journal_bytes,
            )
        )
        await meters.begin()
        await world.engine.sandboxes.create(SandboxSpec())
        found = parsed((await meters.text()).decode())
        assert value(found, "dsec_acts_total", act="sandbox.create", outcome="ok") == 1


class TestTraffic:
    async def test_requests_by_route_and_not_by_path(self, world: World) -> None:
        for _ in range(5):
            assert (await world.get(f"/v1/sandboxes/{new_sandbox_id()}"))[0] == 404
        await world.get("/v1/volumes/any-name")
        await world.get("/v1/sandboxes", key="nonsense")
        await world.get(f"/nowhere/{new_sandbox_id()}")
        found = await world.figures()
        assert (
            value(
                found, "dsec_http_requests_total", route="/v1/sandboxes/{sandbox}", method="GET", status="404"
            )
            == 5
        )
        assert (
            value(found, "dsec_http_requests_total", route="/v1/volumes/{name}", method="GET", status="404")
            == 1
        )
        assert value(found, "dsec_http_requests_total", route="none", method="GET", status="401") == 1
        assert value(found, "dsec_http_requests_total", route="none", method="GET", status="404") == 1
        assert (
            value(found, "dsec_http_answer_seconds_count", route="/v1/sandboxes/{sandbox}", method="GET") == 5
        )
        assert value(found, "dsec_http_requests_running") == 1  # this one
        assert value(found, "dsec_http_streams") == 0

    async def test_unknown_methods_are_one(self, world: World) -> None:
        for method in ("BREW", "WHEN", "PROPFIND"):
            await world.get("/v1/sandboxes", method=method)
        found = await world.figures()
        methods = {dict(labels).get("method") for name, labels in found if name == "dsec_http_requests_total"}
        assert methods <= {"GET", "OTHER"}

    async def test_for_administrators(self, world: World) -> None:
        assert (await world.get("/metrics", key=DEVELOPER))[0] == 403
        assert (await world.get("/metrics", key="nonsense"))[0] == 401


class TestActs:
    async def test_nothing_older_is_counted(self) -> None:
        harness = Harness(system_clock=True)
        await harness.store.append(*_notes("old", 50))
        acts = Acts(harness.store, registry := CollectorRegistry())
        assert await acts.read()
        await harness.store.append(*_notes("new", 3))
        assert await acts.read()
        assert registry.get_sample_value("dsec_journal_records_total") == 3
        assert registry.get_sample_value("dsec_acts_total", {"act": "old", "outcome": "ok"}) is None

    async def test_one_reading_is_bounded_and_the_next_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(act_figures, "MOST", 20)
        monkeypatch.setattr(act_figures, "PIECE", 10)
        harness = Harness(system_clock=True)
        acts = Acts(harness.store, registry := CollectorRegistry())
        await acts.read()
        await harness.store.append(*_notes("x", 45))
        assert [await acts.read() for _ in range(3)] == [False, False, True]
        assert registry.get_sample_value("dsec_journal_records_total") == 45

    async def test_kinds_of_acts_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(act_figures, "_KINDS", 5)
        harness = Harness(system_clock=True)
        acts = Acts(harness.store, registry := CollectorRegistry())
        await acts.read()
        await harness.store.append(*(draft for n in range(20) for draft in _notes(f"act-{n}", 1)))
        await acts.read()
        assert registry.get_sample_value("dsec_acts_total", {"act": "other", "outcome": "other"}) == 15


def _notes(act: str, count: int) -> Iterable[Draft]:
    return [Draft(chain="engine", act=act, phase=Phase.NOTE) for _ in range(count)]


def test_pool_and_queue() -> None:
    metrics = [
        *pool_figures(PoolInfo(ready=3, hits=5, misses=2, wasted=1)),
        *queue_figures(AdmissionInfo(waiting=7, projects={"a": 4, "b": 3}, refused={"queue": 9})),
    ]
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in metrics
        for sample in metric.samples
    }
    assert found["dsec_pool_ready",] == 3
    assert (found["dsec_pool_hits_total",], found["dsec_pool_misses_total",]) == (5, 2)
    assert (found["dsec_queue_waiting",], found["dsec_queue_waiting_projects",]) == (7, 2)
    assert found["dsec_queue_refused_total", "queue"] == 9
