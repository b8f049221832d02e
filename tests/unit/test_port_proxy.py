"""HTTP and WebSockets into a sandbox, over real connections; what answers is a script of the test, honest or hostile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
import pytest
from websockets.asyncio.server import ServerConnection, serve
from yarl import URL

from dsec.errors import Conflict, NotFound, Unauthenticated
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.model.sandbox import SandboxSpec
from dsec.model.tenants import OWNER, Principal, Scope
from dsec.ports.engine import PortService, Services
from dsec.ports.gate import Gate
from dsec.server import port_http, port_sockets
from dsec.server.app import make_app
from dsec.server.listening import Listener, tcp_socket
from dsec.testing.fakes import FakeRuntime
from dsec.testing.harness import Harness

pytestmark = pytest.mark.anyio

SANDBOX = new_sandbox_id()
ADMIN, DEVELOPER, TOKEN = "dsec_" + "A" * 43, "dsec_" + "D" * 43, "dsec_" + "T" * 43
PORT = 8000

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Only(FakeRuntime):
    """Makes one sandbox, whose id is known beforehand."""

    def reserve(self, spec: SandboxSpec) -> SandboxId:
        del spec
        return SANDBOX


class FakePorts(PortService):
    """Ports of one sandbox are ports of this machine."""

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        self.made: list[socket.socket] = []

    async def connect(self, sandbox: SandboxId, port: int) -> socket.socket:
        if sandbox != SANDBOX:
            raise NotFound(f"there is no sandbox {sandbox}")
        if port not in self.at:
            raise Conflict(f"nothing listens on port {port}")
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.at[port]))
        self.made.append(sock)
        return sock


@dataclass
class FakeGate(Gate):
    """Three keys: of the owner, of a developer, and of the sandbox itself."""

    engine: Services
    asked: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    async def check(self, principal: Principal) -> None:
        if principal.id in self.ended:
            raise Unauthenticated("that key was revoked")

    async def principal(self, key: str) -> Principal:
        self.asked.append(key)
        known = {
            ADMIN: OWNER,
            DEVELOPER: Principal(id="ky-d", scope=Scope.DEVELOPER),
            TOKEN: Principal(id="ky-t", scope=Scope.SANDBOX, sandbox=SANDBOX),
        }
        if key not in known:
            raise Unauthenticated("that is no key")
        return known[key]

    def services(self, principal: Principal) -> Services:
        del principal
        return self.engine


@dataclass
class World:
    """A server, a client of it, and programs that listen."""

    url: str
    client: aiohttp.ClientSession
    ports: FakePorts
    listener: Listener
    gate: FakeGate
    closes: list[asyncio.Server] = field(default_factory=list)

    async def listens(self, script: Script, port: int = PORT) -> None:
        """From now on connections to that port are the script's."""

        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await script(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(one, "127.0.0.1", 0)
        self.closes.append(server)
        self.ports.at[port] = server.sockets[0].getsockname()[1]

    async def says(self, data: bytes) -> None:
        """The program reads a head, says that, and hangs up."""

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(data)
            await writer.drain()

        await self.listens(script)

    def path(self, path: str = "", port: int = PORT, sandbox: str = SANDBOX) -> str:
        return f"{self.url}/v1/sandboxes/{sandbox}/ports/{port}/{path}"

    async def get(self, path: str = "") -> tuple[int, bytes]:
        async with self.client.get(self.path(path), headers={"x-api-key": ADMIN}) as answer:
            return answer.status, await answer.read()


@asynccontextmanager
async def opened() -> AsyncIterator[World]:
    ports = FakePorts()
    engine = replace(await Harness(Only(), system_clock=True).connect(), ports=ports)
    await engine.sandboxes.create(SandboxSpec())
    gate = FakeGate(engine)
    listener = Listener(await asyncio.to_thread(make_app, gate))
    bound = tcp_socket("127.0.0.1", 0)
    await listener.listen(bound)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with aiohttp.ClientSession() as client:
        world = World(url, client, ports, listener, gate)
        try:
            yield world
        finally:
            await client.close()
            await listener.stop(engine.close, drain=0.1)
            for server in world.closes:
                server.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with opened() as made:
        yield made


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with the request's head as its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 203 Fine\r\nx-own: yes\r\ncontent-length: %d\r\n\r\n" % len(head) + head)
    await writer.drain()


class TestHonest:
    async def test_a_request_and_its_answer(self, world: World) -> None:
        await world.listens(echo)
        async with world.client.get(
            URL(world.path("a%20b/c?x=1&y=%2F"), encoded=True),
            headers={"authorization": f"Bearer {ADMIN}", "x-mine": "1"},
        ) as answer:
            body = await answer.read()
            assert (answer.status, answer.headers["x-own"]) == (203, "yes")
            assert answer.headers["content-security-policy"].startswith("sandbox ")
        line, *headers = body.decode().lower().split("\r\n")
        assert line.startswith("get /a%20b/c?x=1&y=%2f http/1.1")
        assert "x-mine: 1" in headers
        assert f"host: localhost:{PORT}" in headers
        assert ADMIN.lower() not in body.decode().lower()

    async def test_bodies_of_any_size_stream_both_ways(self, world: World) -> None:
        """A body that nobody could hold twice: what the program has read comes back before the client has sent all."""

        async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while size := int((await reader.readline()).split(b";")[0], 16):
                data = (await reader.readexactly(size + 2))[:-2]
                writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()

        await world.listens(mirror)
        back = asyncio.Event()

        async def upload() -> AsyncIterator[bytes]:
            yield b"first"
            await back.wait()
            for _ in range(64):
                yield b"x" * (1 << 16)

        async with world.client.post(world.path(), data=upload(), headers={"x-api-key": ADMIN}) as answer:
            assert await answer.content.readexactly(5) == b"first"
            back.set()
            assert len(await answer.read()) == 64 << 16

    async def test_answers_without_a_body(self, world: World) -> None:
        await world.says(b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n")
        assert await world.get() == (304, b"")
        await world.says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        async with world.client.head(world.path(), headers={"x-api-key": ADMIN}) as answer:
            assert answer.status == 200

    async def test_of_two_lengths_the_chunks_are_true(self, world: World) -> None:
        await world.says(
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        assert await world.get() == (200, b"abc")

    async def test_an_answer_that_comes_early_and_until_the_end(self, world: World) -> None:
        await world.says(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.0 200 OK\r\n\r\nall of it")
        assert await world.get() == (200, b"all of it")

    async def test_who_leaves_ends_it_inside(self, world: World) -> None:
        left = asyncio.Event()

        async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nbegun")
            await reader.read()
            left.set()

        await world.listens(endless)
        async with world.client.get(world.path(), headers={"x-api-key": ADMIN}) as answer:
            assert await answer.content.readexactly(5) == b"begun"
            answer.close()
        async with asyncio.timeout(10):
            await left.wait()
        assert all(sock.fileno() == -1 for sock in world.ports.made)

    async def test_stopping_ends_answers_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_http, "STOP_SECONDS", 0.0)
        async with opened() as world:
            await world.listens(_hold)
            answer = await world.client.get(world.path(), headers={"x-api-key": ADMIN})
            assert await answer.content.readexactly(5) == b"begun"
            async with asyncio.timeout(10):
                await world.listener.stop(_nothing, drain=30.0)
            answer.close()


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n\r\nbegun")
    await reader.read()


async def _nothing() -> None:
    """No engine has to be let go."""


class TestHostile:
    @pytest.mark.parametrize(
        "said",
        [
            b"",
            b"\x16\x03\x01\x02\x00 this is TLS",
            b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
            b"HTTP/1.1 200 OK\r\nbad name: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nx: a\0b\r\n\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx",
            b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
            b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * (1 << 20),
            b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(100_000)),
        ],
        ids=[
            "nothing",
            "tls",
            "negative",
            "two lengths",
            "name",
            "nul",
            "upgrade",
            "continues",
            "header",
            "headers",
        ],
    )
    async def test_what_is_no_answer_is_told(self, world: World, said: bytes) -> None:
        await world.says(said)
        status, body = await world.get()
        assert status == 502
        assert b"protocol_error" in body

    async def test_headers_without_end_end(self, world: World) -> None:
        sent = 0

        async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"x: y\r\n" * 1000)
                sent += 6000
                await writer.drain()

        await world.listens(flood)
        assert (await world.get())[0] == 502
        assert sent < 64 << 20  # buffers of both kernels included

    @pytest.mark.parametrize(
        "rest",
        [b"zz\r\n", b"5\r\nab", b"-5\r\nabcde\r\n", b"5\r\nabcdeXX0\r\n\r\n", b"f" * 100_000],
        ids=["size", "short", "negative", "end", "endless"],
    )
    async def test_bad_chunks_cut_the_answer(self, world: World, rest: bytes) -> None:
        """A body that ended before its end never looks whole."""
        await world.says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n" + rest)
        with pytest.raises(aiohttp.ClientPayloadError):
            await world.get()
        await world.listens(echo)
        assert (await world.get())[0] == 203  # and the server is well

    async def test_a_body_shorter_than_it_said(self, world: World) -> None:
        await world.says(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
        with pytest.raises(aiohttp.ClientPayloadError):
            await world.get()

    async def test_silence_ends(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_http, "ANSWER_SECONDS", 0.2)
        left = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(100):
                pass
            left.set()

        await world.listens(silent)
        status, body = await world.get()
        assert (status, b"timed_out" in body) == (504, True)
        async with asyncio.timeout(10):
            await left.wait()

    async def test_a_head_that_drips_ends(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_http, "ANSWER_SECONDS", 0.3)

        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

        await world.listens(drip)
        assert (await world.get())[0] == 504

    async def test_a_body_that_stops_is_cut(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_http, "IDLE_SECONDS", 0.2)
        await world.listens(_hold)
        with pytest.raises(aiohttp.ClientPayloadError):
            await world.get()

    async def test_crumbs_leave_others_their_turn(self, world: World) -> None:
        """A hundred thousand chunks of one byte, and another request meanwhile."""

        async def crumbs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(1000):
                writer.write(b"1\r\na\r\n" * 100)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()

        await world.listens(crumbs)
        await world.listens(echo, PORT + 1)
        eating = asyncio.ensure_future(world.get())
        async with world.client.get(world.path(port=PORT + 1), headers={"x-api-key": ADMIN}) as answer:
            assert answer.status == 203
        assert not eating.done()
        assert await eating == (200, b"a" * 100_000)

    async def test_it_answers_and_reads_nothing(self, world: World) -> None:
        await world.says(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")

        async def upload() -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield b"x" * (1 << 16)

        try:
            async with world.client.post(world.path(), data=upload(), headers={"x-api-key": ADMIN}) as answer:
                assert (answer.status, await answer.read()) == (413, b"no")
        except aiohttp.ClientOSError:
            pass  # it may also be noticed while it is being sent


class TestWhoMay:
    async def test_nobody_without_a_key(self, world: World) -> None:
        await world.listens(echo)
        async with world.client.get(world.path()) as answer:
            assert answer.status == 401
        assert not world.ports.made

    @pytest.mark.parametrize("how", ["query", "header"])
    async def test_a_token_of_the_sandbox(self, world: World, how: str) -> None:
        await world.listens(echo)
        query, headers = ("", {"x-dsec-token": TOKEN}) if how == "header" else (f"&dsec_token={TOKEN}", {})
        async with world.client.get(
            world.path(f"x?a=1{query}"), headers={**headers, "authorization": "token inner"}
        ) as answer:
            body = await answer.read()
        assert answer.status == 203
        assert body.startswith(b"GET /x?a=1 HTTP/1.1")
        assert b"authorization: token inner" in body.lower()
        assert TOKEN.encode() not in body

    async def test_a_larger_key_does_not_belong_in_an_address(self, world: World) -> None:
        await world.listens(echo)
        for key in (ADMIN, DEVELOPER, "nonsense"):
            async with world.client.get(world.path(f"?dsec_token={key}")) as answer:
                assert answer.status == 401
        assert not world.ports.made

    async def test_unknown_sandboxes_and_ports(self, world: World) -> None:
        for path, status in (
            (world.path(sandbox=new_sandbox_id()), 404),
            (world.path(sandbox="sb-1"), 400),
            (world.path(port=9), 409),
            (world.path(port=0), 400),
            (world.path(port=65536), 400),
        ):
            async with world.client.get(path, headers={"x-api-key": ADMIN}) as answer:
                assert answer.status == status, path


@asynccontextmanager
async def program(
    world: World, handler: Callable[[ServerConnection], Awaitable[None]], **options: object
) -> AsyncIterator[None]:
    async with serve(handler, "127.0.0.1", 0, **options) as server:  # type: ignore[arg-type]
        world.ports.at[PORT] = next(iter(server.sockets)).getsockname()[1]
        yield


async def answering(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


class TestSockets:
    async def test_messages_both_ways(self, world: World) -> None:
        seen: dict[str, str] = {}

        async def handler(connection: ServerConnection) -> None:
            assert connection.request is not None
            seen.update({"path": connection.request.path, **connection.request.headers})
            await answering(connection)

        async with (
            program(world, handler, subprotocols=["two"]),
            world.client.ws_connect(
                world.path(f"chat?a=1&dsec_token={TOKEN}"), protocols=("one", "two"), headers={"x-mine": "1"}
            ) as socket_,
        ):
            assert socket_.protocol == "two"
            await socket_.send_str("gr\u00fc\u00dfe")
            assert await socket_.receive_str() == "gr\u00fc\u00dfe"
            await socket_.send_bytes(bytes(range(256)) * 1000)
            assert await socket_.receive_bytes() == bytes(range(256)) * 1000
        lowered = {name.lower(): value for name, value in seen.items()}
        assert (lowered["path"], lowered["x-mine"], lowered["host"]) == (
            "/chat?a=1",
            "1",
            f"localhost:{PORT}",
        )
        assert "origin" not in lowered

    async def test_how_it_ended_is_told_both_ways(self, world: World) -> None:
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        async def handler(connection: ServerConnection) -> None:
            if connection.request is not None and connection.request.path == "/mine":
                await connection.close(4001, "mine")
                return
            await connection.wait_closed()
            ended.set_result(connection.close_code)

        async with program(world, handler):
            headers = {"x-api-key": ADMIN}
            async with world.client.ws_connect(world.path("mine"), headers=headers) as socket_:
                message = await socket_.receive()
                assert (message.type, socket_.close_code) == (aiohttp.WSMsgType.CLOSE, 4001)
            async with world.client.ws_connect(world.path("yours"), headers=headers) as socket_:
                await socket_.close(code=4002)
            async with asyncio.timeout(10):
                assert await ended == 4002

    async def test_who_speaks_no_websocket(self, world: World) -> None:
        for said, status in (
            (b"HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n", 403),
            (
                b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: x\r\n\r\n",
                502,
            ),
            (b"nonsense\r\n\r\n", 502),
            (b"", 502),
        ):
            await world.says(said)
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await world.client.ws_connect(world.path(), headers={"x-api-key": ADMIN})
            assert refused.value.status == status, said
        assert all(sock.fileno() == -1 for sock in world.ports.made)

    async def test_strangers(self, world: World) -> None:
        async with program(world, answering):
            for path, headers, status in (
                (world.path(), {}, 401),
                (world.path(sandbox=new_sandbox_id()), {"x-api-key": ADMIN}, 404),
                (world.path(port=9), {"x-api-key": ADMIN}, 409),
                (world.path(port=0), {"x-api-key": ADMIN}, 400),
                (world.path(f"?dsec_token={ADMIN}"), {}, 401),
            ):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await world.client.ws_connect(path, headers=headers)
                assert refused.value.status == status

    async def test_frames_that_are_none_end_it(self, world: World) -> None:
        """Masked, too large, of an unknown kind: told to the client as an end, and the server is well."""

        async def handler(connection: ServerConnection) -> None:
            connection.transport.write(b"\xf3\x00")
            await connection.wait_closed()

        headers = {"x-api-key": ADMIN}
        async with program(world, handler), world.client.ws_connect(world.path(), headers=headers) as socket_:
            message = await socket_.receive()
            assert message.type in (
                aiohttp.WSMsgType.CLOSE,
                aiohttp.WSMsgType.CLOSED,
                aiohttp.WSMsgType.ERROR,
            )

    async def test_messages_beyond_the_bound(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_sockets, "MOST_MESSAGE", 1000)

        async def handler(connection: ServerConnection) -> None:
            await connection.send("x" * 1000)
            await connection.send("x" * 1001)

        headers = {"x-api-key": ADMIN}
        async with program(world, handler), world.client.ws_connect(world.path(), headers=headers) as socket_:
            assert await socket_.receive_str() == "x" * 1000
            assert (await socket_.receive()).type is aiohttp.WSMsgType.CLOSE

    async def test_who_came_by_a_key_that_ended_leaves(self, world: World) -> None:
        """Both kinds of connections, at once, and not those of other keys."""

        async def forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            await reader.read()

        await world.listens(forever, PORT + 1)
        headers = {"x-api-key": DEVELOPER}
        async with (
            program(world, answering),
            world.client.ws_connect(world.path(), headers=headers) as socket_,
            world.client.ws_connect(world.path(), headers={"x-api-key": ADMIN}) as other,
            world.client.get(world.path(port=PORT + 1), headers=headers) as answer,
        ):
            assert await answer.content.readexactly(1) == b"x"
            world.gate.ended.add("ky-d")
            async with asyncio.timeout(10):
                message = await socket_.receive()
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
            assert (message.data, message.extra) == (1008, "that key was revoked")
            await other.send_str("still here")
            assert await other.receive_str() == "still here"

    async def test_stopping_says_goodbye(self) -> None:
        async with opened() as world, program(world, answering):
            socket_ = await world.client.ws_connect(world.path(), headers={"x-api-key": ADMIN})
            async with asyncio.timeout(10):
                await world.listener.stop(_nothing, drain=30.0)
            assert (await socket_.receive()).data == 1001


class TestOwnHost:
    """A port as a host: an origin for itself."""

    def host(self, world: World, sandbox: str = SANDBOX, port: int = PORT) -> dict[str, str]:
        return {"host": f"{port}-{sandbox}.localhost:{world.url.rpartition(':')[2]}"}

    async def test_the_first_visit_leaves_its_token_as_a_cookie(self, world: World) -> None:
        async with world.client.get(
            world.url + f"//example.com/a?b=c&dsec_token={TOKEN}",
            headers=self.host(world),
            allow_redirects=False,
        ) as answer:
            assert answer.status == 303
            assert answer.headers["location"] == "/example.com/a?b=c"
            cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"dsec_token={TOKEN}; ")
        assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(cookie.split("; "))
        assert not world.ports.made

    async def test_then_the_cookie_is_the_key_and_stays_out(self, world: World) -> None:
        await world.says(
            b"HTTP/1.1 302 Found\r\nlocation: http://localhost:8000/next?x\r\n"
            b"set-cookie: a=1; domain=localhost; path=/app\r\ncontent-length: 0\r\n\r\n"
        )
        headers = {**self.host(world), "cookie": f"a=1; dsec_token={TOKEN}"}
        async with world.client.get(world.url + "/login", headers=headers, allow_redirects=False) as answer:
            assert answer.status == 302
            assert answer.headers["location"] == "/next?x"
            assert answer.headers["set-cookie"] == "a=1; path=/app"
            assert "content-security-policy" not in answer.headers
        await world.listens(echo)
        async with world.client.get(world.url + "/v1/sandboxes", headers=headers) as answer:
            head = await answer.read()
        assert head.startswith(
            b"GET /v1/sandboxes HTTP/1.1"
        )  # of the program: nothing of ours is reached by that name
        assert TOKEN.encode() not in head
        assert b"cookie: a=1\r\n" in head.lower()

    async def test_of_nobody_else(self, world: World) -> None:
        await world.listens(echo)
        cookie = {"cookie": f"dsec_token={TOKEN}"}
        other = new_sandbox_id()
        for path, headers, status in (
            ("/", self.host(world), 401),
            ("/", {**self.host(world), "cookie": f"dsec_token={ADMIN}"}, 401),
            ("/", {**self.host(world, other), **cookie}, 404),
            (f"/?dsec_token={TOKEN}", self.host(world, other), 404),
            (f"/v1/sandboxes/{SANDBOX}/ports/{PORT}/", cookie, 401),  # the cookie is for that host
            ("/", {"host": f"{PORT}-{SANDBOX}.example.com", **cookie}, 401),
        ):
            async with world.client.get(world.url + path, headers=headers, allow_redirects=False) as answer:
                assert answer.status == status, (path, headers)
        assert not world.ports.made

    async def test_other_sites_cannot_use_the_cookie(self, world: World) -> None:
        await world.listens(echo)
        headers = {**self.host(world), "cookie": f"dsec_token={TOKEN}"}
        for more, status in (
            ({"sec-fetch-site": "same-origin"}, 203),
            ({"origin": f"http://{headers['host']}"}, 203),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-site"}, 403),
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
        ):
            async with world.client.post(world.url + "/", headers={**headers, **more}) as answer:
                assert answer.status == status, more
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await world.client.ws_connect(
                world.url + "/", headers={**headers, "origin": "http://evil.example"}
            )
        assert refused.value.status == 403

    async def test_sockets(self, world: World) -> None:
        headers = {**self.host(world), "cookie": f"dsec_token={TOKEN}"}
        async with (
            program(world, answering),
            world.client.ws_connect(world.url + "/x", headers=headers) as socket_,
        ):
            await socket_.send_str("hello")
            assert await socket_.receive_str() == "hello"
