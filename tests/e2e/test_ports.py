"""What listens in a real sandbox, reached through a real server: HTTP, WebSockets, hostile programs, and strangers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.control.tenancy import Room, Tenancy
from dsec.errors import Conflict, DsecError, NotFound, Unauthenticated, Unsupported
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Level
from dsec.model.tenants import OWNER, Principal, Scope
from dsec.ports.engine import Services, Workplace
from dsec.ports.gate import Gate
from dsec.ports.tenants import NoTenants
from dsec.server.app import make_app
from dsec.server.listening import Listener, tcp_socket
from dsec.wiring.engines import open_engine
from dsec.wiring.settings import Settings

pytestmark = [pytest.mark.anyio, pytest.mark.needs_root]

PORT = 8000
ECHO = r"""
import base64, hashlib, http.server, struct

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            return self.websocket()
        self.answer(f"{self.path} {self.headers.get('authorization')} {self.headers.get('x-api-key')}".encode())

    def do_POST(self):
        size = int(self.headers["content-length"])
        self.answer(hashlib.sha256(self.rfile.read(size)).hexdigest().encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def websocket(self):
        key = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("upgrade", "websocket")
        self.send_header("connection", "upgrade")
        self.send_header("sec-websocket-accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while True:
            first, second = self.rfile.read(2)
            size = second & 127
            if size == 126:
                size, = struct.unpack(">H", self.rfile.read(2))
            mask = self.rfile.read(4)
            data = bytes(c ^ mask[i % 4] for i, c in enumerate(self.rfile.read(size)))
            self.wfile.write(bytes((first, size)) + data)
            if first & 15 == 8:
                return

http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
FLOOD = r"""
import socket
listener = socket.create_server(("127.0.0.1", 8001))
while True:
    one, _ = listener.accept()
    try:
        one.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            one.sendall(b"x: y\r\n" * 10000)
    except OSError:
        pass
"""
MUTE = r"""
import socket, time
listener = socket.create_server(("127.0.0.1", 8002))
kept = []
while True:
    kept.append(listener.accept())
"""


class Keys(Gate):
    """Keys of the owner, of developers of two projects, and of two sandboxes."""

    def __init__(self, engine: Services, place: Workplace) -> None:
        self._tenancy = Tenancy(engine, place, NoTenants(), lambda *_: Room(engine.templates, engine.sharing))
        self.known = {
            "admin": OWNER,
            "ours": Principal(id="ky-o", scope=Scope.DEVELOPER, project="ours"),
            "theirs": Principal(id="ky-t", scope=Scope.DEVELOPER, project="theirs"),
        }

    def token(self, sandbox: SandboxId, project: str = "ours") -> str:
        self.known[sandbox] = Principal(id="ky-s", scope=Scope.SANDBOX, project=project, sandbox=sandbox)
        return sandbox

    async def principal(self, key: str) -> Principal:
        if key not in self.known:
            raise Unauthenticated("that is no key")
        return self.known[key]

    def services(self, principal: Principal) -> Services:
        return self._tenancy.services(principal)


@dataclass
class World:
    """An engine, a server over it, and a client."""

    engine: Services
    dsec: AsyncDsec
    keys: Keys
    url: str
    client: aiohttp.ClientSession

    def path(self, sb: AsyncSandbox, path: str = "", port: int = PORT) -> str:
        return f"{self.url}/v1/sandboxes/{sb.id}/ports/{port}/{path}"

    async def get(self, url: str, key: str = "") -> tuple[int, bytes]:
        async with self.client.get(url, headers={"x-api-key": key} if key else {}) as answer:
            return answer.status, await answer.read()


@pytest.fixture
async def world(image_store: Path) -> AsyncIterator[World]:
    engine = await open_engine(Settings(images=image_store, pool=0))

    async def connect() -> Services:
        return engine

    async with AsyncDsec(connect) as dsec, aiohttp.ClientSession() as client:
        place = Workplace(engine.sandboxes, engine.execs, engine.snapshots, None, None)  # type: ignore[arg-type]
        keys = Keys(engine, place)
        listener = Listener(await asyncio.to_thread(make_app, keys))
        bound = tcp_socket("127.0.0.1", 0)
        await listener.listen(bound)
        try:
            yield World(engine, dsec, keys, f"http://127.0.0.1:{bound.getsockname()[1]}", client)
        finally:
            await client.close()
            await listener.stop(_nothing, drain=1.0)


async def _nothing() -> None:
    """The client closes the engine."""


async def serving(world: World, program: str, port: int, project: str = "ours") -> AsyncSandbox:
    """A sandbox in which that program listens."""
    sb = await world.dsec.sandboxes.create(level=Level.CONTAINER, project=project)
    await sb.start(["python3", "-c", program])
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(Conflict):
                (await world.engine.ports.connect(sb.id, port)).close()
                return sb
            await asyncio.sleep(0.05)


async def test_http_both_ways(world: World) -> None:
    sb = await serving(world, ECHO, PORT)
    assert await world.get(world.path(sb, "a/b?c=d"), "ours") == (200, b"/a/b?c=d None None")
    data = os.urandom(5 << 20)
    async with world.client.post(
        world.path(sb), data=io.BytesIO(data), headers={"x-api-key": "ours"}
    ) as answer:
        told = await answer.text()
    inside = await sb.exec(["sha256sum"], stdin=data)
    assert told == inside.text.split()[0]
    acts = [record.act for record in await sb.events()]
    assert acts.count("port.connect") == 1  # within a minute


async def test_websocket(world: World) -> None:
    sb = await serving(world, ECHO, PORT)
    token = world.keys.token(sb.id)
    async with world.client.ws_connect(world.path(sb, f"chat?dsec_token={token}")) as socket_:
        for number in range(50):
            await socket_.send_str(f"message {number}")
            assert await socket_.receive_str() == f"message {number}"


async def test_hostile_programs_hurt_nobody_else(world: World) -> None:
    flood = await serving(world, FLOOD, 8001)
    mute = await serving(world, MUTE, 8002)
    honest = await serving(world, ECHO, PORT)
    waiting = [asyncio.ensure_future(world.get(world.path(mute, port=8002), "ours")) for _ in range(20)]
    for _ in range(3):
        status, body = await world.get(world.path(flood, port=8001), "ours")
        assert status == 502
        assert b"protocol_error" in body
    assert (await world.get(world.path(honest), "ours"))[0] == 200
    await mute.destroy()
    assert {status for status, _ in await asyncio.gather(*waiting)} == {502}


async def test_strangers_find_nothing(world: World) -> None:
    sb = await serving(world, ECHO, PORT)
    sibling = await serving(world, ECHO, PORT)
    unknown = world.path(sb).replace(sb.id, "sb-" + "a" * 26)
    own, siblings = world.keys.token(sb.id), world.keys.token(sibling.id)
    for good in (world.path(sb, "x") + f"?dsec_token={own}", world.path(sb, "x")):  # positive controls
        assert (await world.get(good, "" if "token" in good else "ours"))[0] == 200
    for key in ("theirs", siblings):
        status, body = await world.get(world.path(sb), key)
        missing, alike = await world.get(unknown, key)
        assert (status, missing) == (404, 404)
        assert body.replace(sb.id.encode(), b"") == alike.replace(b"sb-" + b"a" * 26, b"")
    assert (await world.get(world.path(sb, f"?dsec_token={siblings}")))[0] == 404
    for nobody in (world.path(sb), world.path(sb, "?dsec_token=guess"), world.path(sb, "?dsec_token=ours")):
        assert (await world.get(nobody))[0] == 401


async def test_it_is_the_sandboxs_network_and_no_other(world: World) -> None:
    """A port of this machine is not reached, nor that of another sandbox."""
    one = await world.dsec.sandboxes.create(level=Level.CONTAINER)
    other = await serving(world, ECHO, PORT)
    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port)  # positive controls: both are there
    writer.close()
    (await world.engine.ports.connect(other.id, PORT)).close()
    for where in (port, PORT):
        with pytest.raises(Conflict, match="nothing listens"):
            await world.engine.ports.connect(one.id, where)
    listener.close()
    async with asyncio.timeout(10):
        while strayed():  # noqa: ASYNC110 - each thread that went there ends there, and tells nobody
            await asyncio.sleep(0.01)


def strayed() -> list[str]:
    """Threads of ours that are in another network than this process."""
    ours = os.readlink("/proc/self/ns/net")
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):
            found += [task] if os.readlink(f"/proc/self/task/{task}/ns/net") != ours else []
    return found


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    del reader
    writer.close()


async def test_after_a_rollback_it_is_the_new_one(world: World) -> None:
    sb = await serving(world, ECHO, PORT)
    before = await sb.snapshot()
    await sb.rollback(before)
    with pytest.raises(Conflict, match="nothing listens"):
        await world.engine.ports.connect(sb.id, PORT)
    await sb.start(["python3", "-c", ECHO])
    async with asyncio.timeout(30):
        while (await world.get(world.path(sb), "ours"))[0] != 200:  # noqa: ASYNC110 - a program inside tells nobody that it listens
            await asyncio.sleep(0.05)


async def test_nothing_of_it_outlives_the_sandbox(world: World) -> None:
    """An open connection would keep its network; whoever holds one is told, and lets go."""
    sb = await serving(world, ECHO, PORT)
    sock = await world.engine.ports.connect(sb.id, PORT)
    token = world.keys.token(sb.id)
    socket_ = await world.client.ws_connect(world.path(sb, f"?dsec_token={token}"))
    await sb.destroy()
    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    assert (await socket_.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
    sock.close()
    with pytest.raises(NotFound):
        await world.engine.ports.connect(sb.id, PORT)


async def test_a_paused_one_and_a_level_without_network(world: World) -> None:
    sb = await serving(world, ECHO, PORT)
    await sb.pause()
    assert (await world.get(world.path(sb), "ours"))[0] == 409
    await sb.resume()
    assert (await world.get(world.path(sb), "ours"))[0] == 200
    try:
        plain = await world.dsec.sandboxes.create(level=Level.PROCESS)
    except DsecError:
        pytest.skip("no level `process` here")
    with pytest.raises(Unsupported):
        await world.engine.ports.connect(plain.id, PORT)
    assert (await world.get(world.path(plain), "admin"))[0] == 422
