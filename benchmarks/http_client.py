"""One POST of 200 bytes to a trivial application (uvicorn, httptools), by each client library, in turns of blocks.

``bare`` writes the request to a socket and lets httptools read the answer: what no library can be faster than. Libraries that are not
installed are told as such.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any, Final

import uvloop

from benchmarks.common import Findings, Script, main, warm_up
from benchmarks.figures import milliseconds

BODY: Final = (b'{"argv":["/bin/true"],"timeout":10.0,"cwd":"' + b"x" * 200)[:196] + b'"}  '
HEADERS: Final = {"Authorization": "Bearer key", "Content-Type": "application/json"}
PATH: Final = "/v1/sandboxes/sb-a/execs"
BLOCK: Final = 100
ANSWER: Final = (
    b'{"id":"ex-aaaaaaaaaaaaaaaaaaaaaaaaaa","exit_code":0,"stdout":"","stderr":"","duration":0.001}'
)
SERVER: Final = """
import sys, uvicorn
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    size = str(len(sys.argv[1])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
    await send({"type": "http.response.body", "body": sys.argv[1].encode()})
class Told(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)
config = uvicorn.Config(app, port=0, http="httptools", loop="uvloop", log_level="warning", access_log=False)
Told(config).run()
"""

Once = Callable[[], Awaitable[bytes]]


async def _aiohttp(stack: AsyncExitStack, base: str) -> Once:
    aiohttp: Any = import_module("aiohttp")
    url: Any = import_module("yarl").URL(base + PATH)
    jar = aiohttp.DummyCookieJar()
    session = await stack.enter_async_context(aiohttp.ClientSession(headers=HEADERS, cookie_jar=jar))

    async def once() -> bytes:
        async with session.post(url, data=BODY, allow_redirects=False) as response:
            data: bytes = await response.read()
            return data

    return once


async def _httpx(stack: AsyncExitStack, base: str) -> Once:
    client: Any = await stack.enter_async_context(import_module("httpx").AsyncClient(headers=HEADERS))

    async def once() -> bytes:
        data: bytes = (await client.post(base + PATH, content=BODY)).content
        return data

    return once


async def _httpcore(stack: AsyncExitStack, base: str) -> Once:
    pool: Any = await stack.enter_async_context(import_module("httpcore").AsyncConnectionPool())
    headers = {**HEADERS, "Content-Length": str(len(BODY))}

    async def once() -> bytes:
        data: bytes = (await pool.request("POST", base + PATH, content=BODY, headers=headers)).content
        return data

    return once


async def _bare(stack: AsyncExitStack, base: str) -> Once:
    parser: Any = import_module("httptools").HttpResponseParser
    loop = asyncio.get_running_loop()
    lines = [f"POST {PATH} HTTP/1.1", "Host: here", f"Content-Length: {len(BODY)}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    request = "\r\n".join([*lines, "", ""]).encode() + BODY

    class Bare(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            self.parser.feed_data(data)

        def on_body(self, body: bytes) -> None:
            self.body = body

        def on_message_complete(self) -> None:
            self.answer.set_result(self.body)

        async def once(self) -> Any:
            self.parser, self.answer = parser(self), loop.create_future()
            transport.write(request)
            return await self.answer

    host, _, port = base.removeprefix("http://").partition(":")
    transport, protocol = await loop.create_connection(Bare, host, int(port))
    stack.callback(transport.close)
    return protocol.once


SIDES: Final = {"bare": _bare, "aiohttp": _aiohttp, "httpcore": _httpcore, "httpx": _httpx}


def measure(options: argparse.Namespace) -> Findings:
    """In turns of blocks."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, ANSWER.decode()], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        base = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            times, missing = runner.run(_all(base, options.n))
    finally:
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    series = tuple(milliseconds(name, found, peer=name != "aiohttp") for name, found in times.items())
    return Findings(
        samples=options.n,
        series=series,
        figures={f"{one.what}_p50_ms": one.p50 for one in series},
        unavailable=missing,
    )


async def _all(base: str, count: int) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Nanoseconds of each, and what is not installed."""
    missing: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        sides: dict[str, Once] = {}
        for name, make in SIDES.items():
            try:
                sides[name] = await make(stack, base)
            except ImportError as error:
                missing[name] = str(error)
        times: dict[str, list[int]] = {name: [] for name in sides}
        for once in sides.values():
            await _block(once, warm_up(count), [])
        while any(len(found) < count for found in times.values()):
            for name, once in sides.items():
                await _block(once, min(BLOCK, count - len(times[name])), times[name])
    return times, missing


async def _block(once: Once, count: int, times: list[int]) -> None:
    for _ in range(count):
        begun = time.perf_counter_ns()
        answer = await once()
        times.append(time.perf_counter_ns() - begun)
        assert answer == ANSWER


SCRIPT: Final = Script(
    name="http_client",
    claim="What a client library adds to one request over loopback",
    n=2000,
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
