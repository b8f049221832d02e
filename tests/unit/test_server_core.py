"""The server over fakes: who is let in, what is refused and how, and what ends with its client."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsec.errors import BadRequest
from dsec.server import bodies, connections
from dsec.server.app import ROUTERS
from dsec.server.bodies import MAX_JSON, read
from dsec.server.connections import Bounds
from dsec.server.documents import call_of
from dsec.server.listening import unix_socket
from dsec.server.shapes import CreateBody, ExecBody
from dsec.testing.asking import KEY, World, opened
from dsec.testing.harness import until

pytestmark = pytest.mark.anyio

EXACT = "application/vnd.dsec+json"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with opened() as made:
        yield made


class TestDoor:
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer"},
            {"authorization": f"Digest {KEY}"},
            {"authorization": "Basic !!"},
            {"x-api-key": "\u00e9"},
            {"x-api-key": "k" * 600},
            {"authorization": f"Bearer {KEY}", "x-api-key": KEY},
        ],
    )
    async def test_without_a_good_key_nothing_but_health(self, world: World, headers: dict[str, str]) -> None:
        for path in ("/v1/sandboxes", "/openapi.json", "/docs", "/nope", "/v1/sandboxes/x/execs"):
            async with world.client.get(world.url(path), headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (401, "unauthenticated")
        async with world.client.get(world.url("/health")) as answer:
            assert answer.status == 200

    async def test_the_page_of_all_calls_brings_no_script(self, world: World) -> None:
        async with world.client.get(world.url("/docs"), headers={"authorization": f"Bearer {KEY}"}) as answer:
            text = await answer.text()
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "<script" not in text
        assert "//" not in text.partition("</h1>")[2].partition("<h2>")[0]  # nothing from elsewhere
        for call in ("/v1/sandboxes/{sandbox}/execs", "Idempotency-Key", "ExecBody"):
            assert call in text

    async def test_a_body_of_very_many_values_is_read_in_a_thread(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        readers = []

        def noted(raw: bytes) -> Any:
            readers.append(threading.current_thread())
            return parsed(raw)

        parsed = bodies.parsed
        monkeypatch.setattr(bodies, "parsed", noted)
        for values in (1, 200_000):
            answer = await world.ask("POST", "/v1/sandboxes", {"labels": {"a": [1] * values}})
            assert answer[0] == 400
        assert [one is threading.main_thread() for one in readers] == [True, False]

    async def test_each_way_to_give_a_key(self, world: World) -> None:
        basic = base64.b64encode(f"any:{KEY}".encode()).decode()
        for headers in (
            {"authorization": f"bearer {KEY}"},
            {"x-api-key": KEY},
            {"authorization": f"Basic {basic}"},
        ):
            async with world.client.get(world.url("/v1/sandboxes"), headers=headers) as answer:
                assert answer.status == 200

    async def test_another_page_does_not_use_the_key_of_a_browser(self, world: World) -> None:
        basic = "Basic " + base64.b64encode(f":{KEY}".encode()).decode()
        asked = [("cross-site", 403), ("same-site", 403), ("same-origin", 201)]
        for site, status in asked:
            headers = {"authorization": basic, "sec-fetch-site": site}
            async with world.client.post(world.url("/v1/sandboxes"), headers=headers) as answer:
                assert answer.status == status

    @pytest.mark.parametrize(("uid", "status"), [(os.geteuid(), 200), (0, 200), (12_345, 401), (-1, 401)])
    async def test_the_socket_is_for_its_owner(
        self, world: World, tmp_path: Path, monkeypatch: Any, uid: int, status: int
    ) -> None:
        monkeypatch.setattr(connections, "peer_uid", lambda _: uid)
        bound, _ = await asyncio.to_thread(unix_socket, tmp_path / "dsec.sock")
        await world.listener.listen(bound)
        connector = aiohttp.UnixConnector(str(tmp_path / "dsec.sock"))
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.get("http://dsec/v1/sandboxes") as answer,
        ):
            assert answer.status == status

    async def test_who_is_at_the_other_end(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert connections.peer_uid(ours) == os.geteuid()

    async def test_wrong_paths_and_methods(self, world: World) -> None:
        assert (await world.ask("GET", "/v1/nope"))[1]["error"]["code"] == "not_found"
        status, said = await world.ask("PUT", "/v1/sandboxes", {})
        assert (status, said["error"]["code"]) == (405, "bad_request")

    async def test_a_bug_is_told_without_what_it_says(self, world: World, monkeypatch: Any) -> None:
        async def broken(*_: object) -> None:
            raise RuntimeError("a secret")

        monkeypatch.setattr(type(world.engine.sandboxes), "get", broken)
        monkeypatch.setattr(type(world.engine.sandboxes), "pause", broken)
        one = "/v1/sandboxes/sb-" + "a" * 26
        for asked in (("GET", one), ("POST", f"{one}/pause")):
            status, said = await world.ask(*asked)
            assert (status, said["error"]["code"]) == (500, "internal")
            assert "secret" not in json.dumps(said)


class TestBodies:
    @pytest.mark.parametrize(
        "raw",
        [
            b"{",
            b"[]",
            b"null",
            b"\xff",
            b'{"argv":["true"],"argv":["false"]}',
            b'{"argv":["true"],"zz":1}',
            b'{"argv":["true"],"timeout":NaN}',
            b'{"argv":["true"],"timeout":1e999}',
            b'{"argv":["true"],"timeout":-1}',
            b'{"argv":["true"],"timeout":"1"}',
            b'{"argv":["true"],"timeout":' + b"9" * 5000 + b"}",
            b'{"argv":[1]}',
            b'{"argv":[]}',
            b'{"argv":["true"],"command":"true"}',
            b"{}",
            b'{"argv":["true"],"pty":{"rows":0}}',
            b'{"argv":["true"],"env":' + b'{"a":' * 100 + b"1" + b"}" * 101,
            b'{"argv":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"argv":["a\\u0000b"]}',
            b'{"argv_base64":["!"]}',
            b"{" + b"".join(b'"%05d":0,' % n for n in range(90_000)) + b'"argv":1,"argv":1}',
        ],
    )
    async def test_what_is_wrong_is_a_bad_request(self, world: World, raw: bytes) -> None:
        sandbox = await world.sandbox()
        status, said = await world.ask("POST", f"{sandbox}/execs", raw)
        assert (status, said["error"]["code"]) == (400, "bad_request"), said

    async def test_too_large(self, world: World) -> None:
        sandbox = await world.sandbox()
        body = {"argv": ["true"], "stdin": "x" * MAX_JSON}
        assert (await world.ask("POST", f"{sandbox}/execs", body))[1]["error"]["code"] == "too_large"

    async def test_only_json(self, world: World) -> None:
        status, _ = await world.ask("POST", "/v1/sandboxes", b"{}", content_type="text/plain")
        assert status == 400

    def test_unknown_fields_of_values_within(self) -> None:
        with pytest.raises(BadRequest, match=r"'zz' - at `\$.spec`"):
            read(CreateBody, b'{"spec":{"zz":1}}')
        with pytest.raises(BadRequest, match=r"'x' - at `\$.spec.limits`"):
            read(CreateBody, b'{"spec":{"limits":{"x":1}}}')
        assert read(CreateBody, b'{"spec":{"limits":{"pids":9}}}').spec is not None

    def test_names_that_are_no_utf8(self) -> None:
        assert read(ExecBody, b'{"argv":["a\\udcff"]}').argv == ("a\udcff",)

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=1001", "limit=x", "state=nope", "cursor=" + "9" * 600]
    )
    async def test_parameters(self, world: World, query: str) -> None:
        status, said = await world.ask("GET", f"/v1/sandboxes?{query}")
        assert (status, said["error"]["code"]) == (400, "bad_request")


class TestConnections:
    async def test_a_head_is_bounded(self, world: World) -> None:
        said = await world.raw(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 300_000)
        assert said.startswith(b"HTTP/1.1 431") or not said

    async def test_what_is_no_http(self, world: World) -> None:
        said = await world.raw(b"hello\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 400")
        assert b'"bad_request"' in said

    async def test_so_many_and_no_more(self) -> None:
        async with opened(Bounds(connections=2)) as world:
            path = f"{await world.sandbox()}/wait?timeout=60"
            pairs = [await self.asking(world, path) for _ in range(2)]
            await until(lambda: world.app.door.running == 2)
            said = await world.raw(b"")
            assert b" 429 " in said.split(b"\r\n")[0]
            for _, writer in pairs:
                writer.close()
            await until(lambda: world.listener.connections == 0)
            assert (await world.raw(b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")

    async def test_who_asks_nothing_makes_room_the_longest_first(self) -> None:
        async with opened(Bounds(connections=3)) as world:
            path = f"{await world.sandbox()}/wait?timeout=60"
            _, asking = await self.asking(world, path)
            await until(lambda: world.app.door.running == 1)
            idle = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(2)]
            await until(lambda: world.listener.connections == 3)
            assert (await world.raw(b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await idle[0][0].read() == b""
            idle[1][1].write(b"GET /health HTTP/1.0\r\n\r\n")
            assert (await idle[1][0].read()).startswith(b"HTTP/1.1 200")
            assert world.app.door.running == 1
            for writer in (asking, *[writer for _, writer in idle]):
                writer.close()

    async def test_a_project_leaves_as_many_places_as_it_has(self) -> None:
        async with opened(Bounds(connections=4)) as world:
            path = f"{await world.sandbox()}/wait?timeout=60"
            pairs = [await self.asking(world, path, "p") for _ in range(2)]
            await until(lambda: world.app.door.running == 2)
            status, said = await world.ask("GET", "/v1/sandboxes", authorization=f"Bearer {KEY}p")
            assert (status, said["error"]["code"], said["error"]["facts"]["reason"]) == (
                429,
                "busy",
                "requests",
            )
            for who in ("", "d"):
                assert (await world.ask("GET", "/v1/sandboxes", authorization=f"Bearer {KEY}{who}"))[0] == 200
            pairs[0][1].close()
            await until(lambda: world.app.door.running == 1)
            assert (await world.ask("GET", "/v1/sandboxes", authorization=f"Bearer {KEY}p"))[0] == 200
            for _, writer in pairs[1:]:
                writer.close()

    async def asking(
        self, world: World, path: str, who: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which that was asked."""
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}{who}\r\n\r\n".encode())
        return reader, writer

    @pytest.mark.parametrize(
        "begun",
        [
            b"",
            b"GET /health HTTP/1.1\r\nx: ",
            b"POST /v1/sandboxes HTTP/1.1\r\nx-api-key: " + KEY.encode() + b"\r\ncontent-length: 9\r\n\r\n{",
        ],
        ids=["nothing", "half a head", "half a body"],
    )
    async def test_who_says_nothing_more_is_let_go(self, begun: bytes) -> None:
        async with opened(Bounds(read=0.2, write=0.2)) as world:
            await world.raw(begun)  # ends because the server hangs up
            await until(lambda: world.listener.connections == 0)

    async def test_who_takes_nothing_is_let_go(self, monkeypatch: Any) -> None:
        async with opened(Bounds(write=0.2)) as world:
            sandbox = await world.sandbox()
            large = "x" * 900_000
            await world.ask("PUT", f"{sandbox}/files/content?path=a", large.encode() * 20)
            _, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
            asked = f"GET {sandbox}/files/content?path=a HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n\r\n"
            writer.write(asked.encode())
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: world.app.door.running == 1)
            await until(lambda: world.app.door.running == 0, 10)
            writer.close()


class TestExecs:
    async def test_text_bytes_and_exact(self, world: World) -> None:
        sandbox = await world.sandbox()
        status, said = await world.ask("POST", f"{sandbox}/execs", {"argv": ["echo", "hi"]})
        assert (status, said["stdout"], said["exit_code"]) == (200, "hi\n", 0)
        raw = {"argv_base64": [base64.b64encode(b).decode() for b in (b"echo", b"\xc3\xa9")]}
        _, said = await world.ask("POST", f"{sandbox}/execs", raw)
        assert said["stdout"] == "\u00e9\n"
        _, said = await world.ask("POST", f"{sandbox}/execs", {"argv": ["echo", "hi"]}, accept=EXACT)
        assert base64.b64decode(said["stdout"]) == b"hi\n"

    async def test_who_leaves_kills_it(self, world: World) -> None:
        sandbox = await world.sandbox()
        asking = asyncio.ensure_future(world.ask("POST", f"{sandbox}/execs", {"argv": ["sleep", "inf"]}))
        handle = world.harness.engine.kit.table
        await until(lambda: any(one.runs for one in handle))
        asking.cancel()
        await until(lambda: not any(one.runs for one in handle))

    async def test_standard_input_in_the_body(self, world: World) -> None:
        sandbox = await world.sandbox()
        status, said = await world.ask(
            "POST", f"{sandbox}/execs", b'{"argv":["cat"]}\nhello', content_type="application/vnd.dsec.stdin"
        )
        assert (status, said["stdout"]) == (200, "hello")

    async def test_in_the_background(self, world: World) -> None:
        sandbox = await world.sandbox()
        body = {"argv": ["cat"], "wait": False, "stdin_open": True}
        status, said = await world.ask("POST", f"{sandbox}/execs", body)
        assert status == 201
        one = f"{sandbox}/execs/{said['id']}"
        assert (await world.ask("GET", one))[1] == said
        assert await world.ask("GET", f"{one}/result?timeout=0") == (202, {})
        assert (await world.ask("POST", f"{one}/stdin", b"hello"))[0] == 204
        assert (await world.ask("DELETE", f"{one}/stdin"))[0] == 204
        status, said = await world.ask("GET", f"{one}/result")
        assert (status, said["stdout"]) == (200, "hello")
        async with world.client.get(world.url(f"{one}/output"), headers={"x-api-key": KEY}) as answer:
            told = await answer.text()
        assert 'event: chunk\ndata: {"stream":"stdout","offset":0,"data":"aGVsbG8="}' in told
        assert "id: 5:0" in told
        assert "event: exit" in told
        headers = {"x-api-key": KEY, "last-event-id": "3:0"}
        async with world.client.get(world.url(f"{one}/output"), headers=headers) as answer:
            assert '"offset":3,"data":"bG8="' in await answer.text()

    async def test_a_websocket(self, world: World) -> None:
        sandbox = await world.sandbox()
        _, said = await world.ask(
            "POST", f"{sandbox}/execs", {"argv": ["cat"], "wait": False, "stdin_open": True}
        )
        where = world.url(f"{sandbox}/execs/{said['id']}/attach")
        async with world.client.ws_connect(where, headers={"x-api-key": KEY}) as socket:
            await socket.send_bytes(b"\0hello")
            assert await socket.receive_bytes() == b"\0" + struct.pack(">Q", 0) + b"hello"
            await socket.send_bytes(b"\1")
            end = await socket.receive_bytes()
            assert (end[:1], json.loads(end[1:])["exit_code"]) == (b"\2", 0)
            await socket.receive()
            assert socket.close_code == 1000

    async def test_a_frame_that_means_nothing(self, world: World) -> None:
        sandbox = await world.sandbox()
        _, said = await world.ask("POST", f"{sandbox}/execs", {"argv": ["sleep", "inf"], "wait": False})
        one = f"{sandbox}/execs/{said['id']}"
        async with world.client.ws_connect(world.url(f"{one}/attach"), headers={"x-api-key": KEY}) as socket:
            await socket.send_bytes(b"\7")
            assert (await socket.receive_bytes())[:1] == b"\3"
            await socket.receive()
            assert socket.close_code == 1003
        assert (await world.ask("GET", f"{one}/result?timeout=0"))[0] == 202  # and the command goes on

    async def test_a_websocket_that_is_refused(self, world: World) -> None:
        sandbox = await world.sandbox()
        where = world.url(f"{sandbox}/execs/ex-{'a' * 26}/attach")
        for headers, status in (({"x-api-key": KEY}, 404), ({}, 401)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await world.client.ws_connect(where, headers=headers)
            assert refused.value.status == status


class TestDocument:
    async def test_every_route_is_told_whole(self, world: World) -> None:
        _, document = await world.ask("GET", "/openapi.json")
        assert document["openapi"].startswith("3.1")
        names = []
        for path, operations in document["paths"].items():
            for operation in operations.values():
                names.append(operation["operationId"])
                assert operation["summary"].endswith("."), path
                answers = operation["responses"]
                assert any(status.startswith("2") for status in answers), path
        assert len(names) == len(set(names))
        known = set(document["components"]["schemas"])
        text = json.dumps(document)
        used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
        assert used <= known

    def test_every_endpoint_says_what_it_takes(self) -> None:
        bare = [
            str(route)
            for router in ROUTERS
            for route in router.routes
            if getattr(route, "include_in_schema", False)
            and call_of(getattr(route, "endpoint", None)) is None
        ]
        assert bare == []
