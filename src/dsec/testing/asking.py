"""A server over fakes, on this loop, and a client that asks it whatever a test likes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from dsec.errors import Unauthenticated
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Flag
from dsec.model.tenants import OWNER, Principal, Scope
from dsec.ports.engine import Services
from dsec.ports.gate import Gate
from dsec.server.app import Application, make_app
from dsec.server.connections import Bounds
from dsec.server.listening import Listener, tcp_socket
from dsec.testing.fakes import FakeRuntime
from dsec.testing.harness import Harness
from dsec.testing.idempotency import FakeIdempotency

KEY = "dsec_" + "K" * 43


class TwoKeys(Gate):
    """``KEY`` of the owner, with a "p" behind it that of a developer of the project ``ours``, and with a "d" and a "t" of a developer and a
    sandbox of the owner's project. All of them see the same.

    Attributes:
        ended: ids of keys that are no good any more.
    """

    def __init__(self, engine: Services) -> None:
        self._engine = engine
        self.ended: set[str] = set()

    async def check(self, principal: Principal) -> None:
        if principal.id in self.ended:
            raise Unauthenticated("that key was revoked")

    async def principal(self, key: str) -> Principal:
        if key == KEY:
            return OWNER
        if key == KEY + "p":
            return Principal(id="ky-p", scope=Scope.DEVELOPER, project="ours")
        if key == KEY + "d":
            return Principal(id="ky-d", scope=Scope.DEVELOPER)
        if key == KEY + "t":
            return Principal(id="ky-t", scope=Scope.SANDBOX, sandbox=SandboxId("sb-" + "t" * 26))
        raise Unauthenticated("that is no key")

    def services(self, principal: Principal) -> Services:
        del principal
        return self._engine


@dataclass
class World:
    """The server, and who asks it."""

    port: int
    client: aiohttp.ClientSession
    app: Application
    listener: Listener
    harness: Harness
    engine: Services

    def url(self, path: str) -> str:
        """Of a path."""
        return f"http://127.0.0.1:{self.port}{path}"

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer; the owner asks, unless a header says who."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {
            "authorization": f"Bearer {KEY}",
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        async with self.client.request(
            method, self.url(path), data=data and io.BytesIO(data), headers=given
        ) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if text else None

    async def sandbox(self) -> str:
        """The path of a new one."""
        status, said = await self.ask("POST", "/v1/sandboxes", {})
        assert status == 201, said
        return f"/v1/sandboxes/{said['id']}"

    async def raw(self, data: bytes) -> bytes:
        """What comes back on a bare connection until it is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            with suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            async with asyncio.timeout(10):
                with suppress(ConnectionError):
                    return await reader.read()
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def opened(bounds: Bounds | None = None) -> AsyncIterator[World]:
    """A server that listens, with its engine; both end with the block."""
    harness = Harness(FakeRuntime(flags=frozenset(Flag)), system_clock=True)
    engine = await harness.connect()
    store = FakeIdempotency(lambda: harness.clock.now().wall)
    app = await asyncio.to_thread(lambda: make_app(TwoKeys(engine), idempotency=store))
    listener = Listener(app, bounds)
    bound = tcp_socket("127.0.0.1", 0)
    port = bound.getsockname()[1]
    await listener.listen(bound)
    async with aiohttp.ClientSession() as client:
        try:
            yield World(port, client, app, listener, harness, engine)
        finally:
            await client.close()
            await listener.stop(engine.close, drain=0.1)
