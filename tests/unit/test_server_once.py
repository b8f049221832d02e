"""The server over fakes: what is done once, whose things are made, and how it stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec.errors import Conflict, Denied, StorageFull
from dsec.ports.idempotency import Recorded
from dsec.server import idempotency
from dsec.server.listening import forget_socket, unix_socket
from dsec.testing.asking import KEY, World, opened
from dsec.testing.harness import until
from dsec.wiring.serving import Place

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with opened() as made:
        yield made


class TestOnce:
    async def test_the_same_key_gives_the_recorded_answer(self, world: World) -> None:
        first = await world.ask("POST", "/v1/sandboxes", {"labels": {"a": "b"}}, idempotency_key="one")
        again = await world.ask("POST", "/v1/sandboxes", {"labels": {"a": "b"}}, idempotency_key="one")
        assert first == again
        assert len((await world.ask("GET", "/v1/sandboxes"))[1]["items"]) == 1
        status, said = await world.ask("POST", "/v1/sandboxes", {}, idempotency_key="one")
        assert (status, said["error"]["code"]) == (409, "conflict")

    async def test_an_answer_is_for_those_who_might_have_asked(self, world: World) -> None:
        made = set()
        for who in ("", "p", "d", "t"):
            key = {"authorization": f"Bearer {KEY}{who}", "idempotency_key": "one"}
            first = await world.ask("POST", "/v1/sandboxes", {}, **key)
            assert first == await world.ask("POST", "/v1/sandboxes", {}, **key)
            made.add(first[1]["id"])
        assert len(made) == 4

    async def test_at_the_same_time(self, world: World) -> None:
        asked = [world.ask("POST", "/v1/sandboxes", {}, idempotency_key="one") for _ in range(8)]
        answers = await asyncio.gather(*asked)
        assert len({said["id"] for _, said in answers}) == 1

    async def test_what_made_nothing_can_be_asked_again(self, world: World) -> None:
        sandbox = await world.sandbox()
        await world.ask("POST", f"{sandbox}/pause")
        refused = await world.ask("POST", f"{sandbox}/execs", {"argv": ["true"]}, idempotency_key="one")
        assert refused[0] == 409
        await world.ask("POST", f"{sandbox}/resume")
        done = await world.ask("POST", f"{sandbox}/execs", {"argv": ["true"]}, idempotency_key="one")
        assert done[0] == 200

    async def test_a_sandbox_that_an_interrupted_try_made_is_found(
        self, world: World, monkeypatch: Any
    ) -> None:
        store = world.app.state.idempotency
        with monkeypatch.context() as broken:
            broken.setattr(store, "finish", _fail)
            status, first = await world.ask("POST", "/v1/sandboxes", {}, idempotency_key="one")
            assert status == 201  # what can be found again is told before its answer is recorded
        status, said = await world.ask("POST", "/v1/sandboxes", {}, idempotency_key="one")
        items = (await world.ask("GET", "/v1/sandboxes"))[1]["items"]
        assert (status, [one["id"] for one in items]) == (201, [said["id"]])
        assert said["id"] == first["id"]

    async def test_answers_are_recorded_before_the_end(self, world: World, monkeypatch: Any) -> None:
        recorded: list[bytes] = []
        finish = world.app.state.idempotency.finish

        async def noted(project: str, key: str, answer: Recorded) -> None:
            recorded.append(answer.body)
            await finish(project, key, answer)

        monkeypatch.setattr(world.app.state.idempotency, "finish", noted)
        for number in range(3):
            await world.ask("POST", "/v1/sandboxes", {}, idempotency_key=f"one-{number}")
        await world.app.flights.land_all()
        assert len(set(recorded)) == 3

    async def test_a_command_that_an_interrupted_try_ran_is_found(
        self, world: World, monkeypatch: Any
    ) -> None:
        sandbox = await world.sandbox()
        store = world.app.state.idempotency
        body = {"argv": ["echo", "hi"]}
        with monkeypatch.context() as broken:
            broken.setattr(store, "finish", _fail)
            await world.ask("POST", f"{sandbox}/execs", body, idempotency_key="one")
        status, said = await world.ask("POST", f"{sandbox}/execs", body, idempotency_key="one")
        execs = (await world.ask("GET", f"{sandbox}/execs"))[1]["items"]
        assert (status, [one["id"] for one in execs]) == (200, [said["id"]])

    async def test_what_cannot_be_known_is_said(self, world: World, monkeypatch: Any) -> None:
        sandbox = await world.sandbox()
        with monkeypatch.context() as broken:
            broken.setattr(world.app.state.idempotency, "finish", _fail)
            await world.ask("POST", f"{sandbox}/snapshots", idempotency_key="one")
        status, said = await world.ask("POST", f"{sandbox}/snapshots", idempotency_key="one")
        assert (status, said["error"]["code"]) == (409, "unknown_outcome")
        assert len((await world.ask("GET", f"{sandbox}/snapshots"))[1]["items"]) == 1

    async def test_without_a_store_it_is_refused(self, world: World) -> None:
        world.app.state.idempotency = None
        status, _ = await world.ask("POST", "/v1/sandboxes", {}, idempotency_key="one")
        assert status == 422

    def test_an_endpoint_takes_its_request(self) -> None:
        async def bare() -> Any: ...

        with pytest.raises(TypeError):
            idempotency.once(bare, None)


async def _fail(*_: object) -> None:
    raise StorageFull("no room for answers")


class TestProjects:
    async def test_a_developer_makes_things_in_his_project(self, world: World) -> None:
        theirs = {"authorization": f"Bearer {KEY}p"}
        _, said = await world.ask("POST", "/v1/sandboxes", {}, **theirs)
        assert said["spec"]["project"] == "ours"
        _, said = await world.ask("POST", "/v1/sandboxes", {"spec": {}}, **theirs)
        assert said["spec"]["project"] == "ours"
        for body in ({"project": "other"}, {"spec": {"project": "other"}}):
            assert (await world.ask("POST", "/v1/sandboxes", body, **theirs))[0] == 403
        _, said = await world.ask("POST", "/v1/sandboxes", {"project": "other"})
        assert said["spec"]["project"] == "other"

    @pytest.mark.parametrize(
        "body",
        [
            {"labels": {"dsec.request": "x"}},
            {"spec": {"labels": {"dsec.request": "x"}}},
            {"volumes": ["./here:/there"]},
            {"spec": {}, "ttl": 5},
            {"snapshot": "sn-" + "a" * 26},
            {"limits": {"memory_mib": 1}},
        ],
    )
    async def test_what_nobody_may_ask_for(self, world: World, body: Any) -> None:
        status, said = await world.ask("POST", "/v1/sandboxes", body)
        assert (status, said["error"]["code"]) == (400, "bad_request")


class TestStop:
    async def test_what_runs_is_answered_and_streams_end(self) -> None:
        async with opened() as world:
            sandbox = await world.sandbox()
            running = asyncio.ensure_future(world.ask("POST", f"{sandbox}/execs", {"argv": ["sleep", "0.3"]}))
            waiting = asyncio.ensure_future(world.ask("GET", f"{sandbox}/wait?timeout=60"))
            await until(lambda: world.app.door.running == 2)
            stopping = asyncio.ensure_future(world.listener.stop(world.engine.close, drain=5))
            await until(world.app.door.stop.is_set)
            async with world.client.get(world.url("/v1/sandboxes")) as answer:
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await waiting)[0] == 200
            assert (await running)[0] == 200
            await stopping


class TestPlaces:
    def test_other_machines_are_kept_out(self, tmp_path: Path) -> None:
        for host in ("0.0.0.0", "::", "192.0.2.1", "example.com"):
            with pytest.raises(Denied):
                Place(home=tmp_path, host=host)
            Place(home=tmp_path, host=host, insecure_host=True)
        for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9", ""):
            Place(home=tmp_path, host=host)

    async def test_a_socket_of_the_dead_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "dsec.sock"

        def check() -> None:
            first, inode = unix_socket(path)
            assert path.stat().st_mode & 0o777 == 0o600
            with pytest.raises(Conflict):
                unix_socket(path)
            first.close()
            second, other = unix_socket(path)
            forget_socket(path, inode if inode != other else -1)
            assert path.exists()
            forget_socket(path, other)
            assert not path.exists()
            second.close()
            path.write_text("mine")
            with pytest.raises(Conflict):
                unix_socket(path)

        await asyncio.to_thread(check)
