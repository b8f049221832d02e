"""What clients do to a server: nonsense, half a sentence, ever so slowly, too much, and then nothing more, without a word.

One real server for the whole module, over TCP and its socket, with bounds of fractions of a second. After each fault it has let go of everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import pytest

from dsec.client.aio import AsyncDsec
from dsec.server.connections import MAX_AHEAD, MAX_HEADERS, Bounds
from dsec.wiring.servers import server
from dsec.wiring.serving import Place, serving
from dsec.wiring.settings import Settings
from dsec.wiring.tenants import shared

pytestmark = [pytest.mark.needs_root, pytest.mark.slow]

PATIENCE: Final = 30.0  # seconds
BOUNDS: Final = Bounds(connections=40, read=0.6, write=0.8, idle=3.0, alive=2.0)
NETNS: Final = f"dsecf{os.getpid() % 100000}"
OURS, THEIRS = "198.51.100.1", "198.51.100.2"  # of a pair of links that the test makes


class Served(threading.Thread):
    """The server. ``ready``: its port, socket, and a key."""

    def __init__(self, home: Path, images: Path, host: str) -> None:
        super().__init__(name="dsec-faults")
        self._place = Place(home=home, port=0, host=host, insecure_host=True)
        self._engine = Settings(home=home / "engine", images=images, pool=0, shelf=0, pool_bytes=2**28)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self.ready: Future[tuple[int, Path, str]] = Future()
        self.running: Any = None

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:
                if self.ready.done():
                    raise
                self.ready.set_exception(error)

    async def _serve(self) -> None:
        async with serving(self._place, self._engine, shared, bounds=BOUNDS) as running:
            async with AsyncDsec(server(f"unix://{running.socket}", "")) as boss:
                made = await boss.keys.create(scope="admin")
            self.running = running
            self.ready.set_result((int(running.url.rpartition(":")[2]), running.socket, made.key))
            await self._ended.wait()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self.join(PATIENCE)

    def state(self) -> tuple[int, int, int]:
        """Connections, requests that are answered, and tasks of the loop."""
        found: Future[tuple[int, int, int]] = Future()

        def look() -> None:
            counts = (self.running._listener.connections, self.running._app.door.running)
            found.set_result((*counts, len(asyncio.all_tasks())))

        self._loop.call_soon_threadsafe(look)
        return found.result(PATIENCE)


class World:
    """A sandbox on it, and who asks."""

    def __init__(self, thread: Served, host: str) -> None:
        self._thread = thread
        self.host = host
        self.port, self.socket, self.key = thread.ready.result(PATIENCE)
        status, made = self.ask("POST", "/v1/sandboxes", {"level": "container"})
        assert status == 201, made
        self.one = f"/v1/sandboxes/{made['id']}"
        self.ask("GET", f"{self.one}/files/stat?path=/")  # what is opened once is open
        self.rest = self._thread.state()[2]
        self.going = 0  # commands in the background

    def open(self, *, unix: bool = False) -> socket.socket:
        if unix:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(PATIENCE)
            made.connect(str(self.socket))
            return made
        return socket.create_connection((self.host, self.port), PATIENCE)

    def head(self, method: str, path: str, **headers: object) -> bytes:
        given = {"host": "x", "x-api-key": self.key, **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k.replace('_', '-')}: {v}" for k, v in given.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def raw(self, data: bytes, *, unix: bool = False) -> bytes:
        """All that comes back until the server hangs up."""
        with self.open(unix=unix) as client:
            with contextlib.suppress(OSError):
                client.sendall(data)
            return received(client)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = self.head(method, path, content_length=len(data), connection="close")
        return parsed(self.raw(head + data))

    def settles(self) -> None:
        """Wait until it holds nothing for anybody."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            connections, asked, tasks = self._thread.state()
            if not connections and not asked and tasks <= self.rest + 2 * self.going:
                return
            time.sleep(0.02)
        raise AssertionError(f"left: {self._thread.state()}, of {self.rest} tasks")

    def waits(self, asked: int) -> None:
        """Until so many requests are being answered."""
        until = time.monotonic() + PATIENCE
        while self._thread.state()[1] < asked and time.monotonic() < until:
            time.sleep(0.01)
        assert self._thread.state()[1] == asked

    def names(self) -> set[str]:
        """What is in the sandbox's working directory."""
        return {each["name"] for each in self.ask("GET", f"{self.one}/files/list?path=.")[1]["entries"]}

    def running(self, word: str) -> bool:
        """Whether a process with that word runs in it."""
        body = {"command": "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"}
        return word in self.ask("POST", f"{self.one}/execs", body)[1]["stdout"].replace(str(body), "")


def received(client: socket.socket) -> bytes:
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def parsed(answer: bytes) -> tuple[int, Any]:
    """Status and JSON of the first answer; any that tells of an error is a problem document."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    status = int(lines[0].split()[1])
    if status >= 400:
        assert "content-type: application/json" in lines, answer
        assert set(json.loads(body)["error"]) == {"code", "message", "hint", "retryable", "facts"}
    return status, json.loads(body) if body and "content-type: application/json" in lines else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def link() -> Iterator[str]:
    """A network namespace at the other end of a pair of links: a machine that can vanish."""
    ip("netns", "add", NETNS)
    try:
        ip("link", "add", f"{NETNS}a", "type", "veth", "peer", "name", f"{NETNS}b", "netns", NETNS)
        ip("addr", "add", f"{OURS}/30", "dev", f"{NETNS}a")
        ip("link", "set", f"{NETNS}a", "up")
        ip("-n", NETNS, "addr", "add", f"{THEIRS}/30", "dev", f"{NETNS}b")
        ip("-n", NETNS, "link", "set", f"{NETNS}b", "up")
        yield OURS
    finally:
        ip("netns", "del", NETNS)


@pytest.fixture(scope="module")
def world(link: str, image_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    thread = Served(tmp_path_factory.mktemp("h"), image_store, link)
    thread.start()
    try:
        made = World(thread, link)
        yield made
        made.ask("DELETE", made.one)
    finally:
        thread.end()


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> None:
    """One server for all of them: the census of the module counts."""


@pytest.fixture(autouse=True)
def _lets_go(world: World) -> Iterator[None]:
    """Behind each of them nothing is held, and others are answered."""
    yield
    world.settles()
    assert world.ask("GET", "/health") == (200, {"status": "ok"})


CL: Final = "content-length: 2\r\n"
TE: Final = "transfer-encoding: chunked\r\n"
NO_HTTP: Final = {
    "two framings": CL + TE + "\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
    "two framings, turned": TE + CL + "\r\n0\r\n\r\n",
    "two lengths": CL + "content-length: 3\r\n\r\n{}",
    "the same length twice": CL + CL + "\r\n{}",
    "a list of lengths": "content-length: 2, 2\r\n\r\n{}",
    "a length with a sign": "content-length: +2\r\n\r\n{}",
    "a length below zero": "content-length: -2\r\n\r\n{}",
    "a length beyond numbers": "content-length: 99999999999999999999999\r\n\r\n{}",
    "a space before the colon": "content-length : 2\r\n\r\n{}",
    "a folded header": "x-a: a\r\n b\r\n" + CL + "\r\n{}",
    "a folded framing": "transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a bare line feed": "x-a: a\n" + CL + "\r\n{}",
    "a bare carriage return": "x-a: a\r" + CL + "\r\n{}",
    "a zero byte": "x-a: a\0b\r\n" + CL + "\r\n{}",
    "a framing nobody knows": "transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a framing over another": "transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a framing under another": "transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a framing twice": TE + TE + "\r\n0\r\n\r\n",
    "a size that is none": TE + "\r\nzz\r\n{}\r\n0\r\n\r\n",
    "sizes that end in line feeds": TE + "\r\n2\n{}\n0\n\n",
    "a size beyond numbers": TE + "\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "more than its size": TE + "\r\n2\r\n{}XX0\r\n\r\n",
    "two hosts": "host: y\r\n" + CL + "\r\n{}",
    "two keys of one request": "idempotency-key: a\r\nidempotency-key: b\r\n" + CL + "\r\n{}",
    "no WebSocket": "connection: upgrade\r\nupgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("rest", NO_HTTP.values(), ids=NO_HTTP.keys())
def test_what_two_readers_could_read_differently_is_refused_and_nothing_behind_it_is_read(
    world: World, rest: str
) -> None:
    begun = world.head("POST", "/v1/sandboxes")[:-2]
    said = world.raw(begun + rest.encode("latin-1") + b"GET /health HTTP/1.1\r\n\r\n")
    assert parsed(said)[0] == 400
    assert said.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "line",
    [
        "GET /health",
        "GET /health HTTP/2.0",
        "PRI * HTTP/2.0\r\n\r\nSM",
        "FOO / HTTP/1.1",
        "CONNECT x:1 HTTP/1.1",
        "GET /\xff HTTP/1.1",
    ],
)
def test_lines_that_ask_for_something_else(world: World, line: str) -> None:
    assert parsed(world.raw(line.encode("latin-1") + b"\r\n\r\n"))[0] == 400


def test_http_1_0_is_answered_and_ends(world: World) -> None:
    assert parsed(world.raw(b"GET /health HTTP/1.0\r\n\r\n")) == (200, {"status": "ok"})
    assert parsed(world.raw(b"POST /v1/sandboxes HTTP/1.0\r\n" + TE.encode() + b"\r\n0\r\n\r\n"))[0] == 400


def test_heads_are_bounded_in_bytes_and_in_number(world: World) -> None:
    for data in (b"x: " + b"a" * BOUNDS.head + b"\r\n", b"x:\r\n" * (MAX_HEADERS + 1)):
        status, said = parsed(world.raw(b"GET /health HTTP/1.1\r\n" + data + b"\r\n"))
        assert (status, said["error"]["code"]) == (431, "too_large")
    assert parsed(world.raw(b"GET /health HTTP/1.0\r\n" + b"x:\r\n" * 200 + b"\r\n"))[0] == 200


def test_what_comes_behind_a_body_is_no_header(world: World) -> None:
    data = world.head("POST", "/v1/sandboxes", transfer_encoding="chunked", connection="close")
    bare = data.replace(f"x-api-key: {world.key}\r\n".encode(), b"")
    trailer = f"0\r\nx-api-key: {world.key}\r\n\r\n".encode()
    assert parsed(world.raw(bare + b"2\r\n{}\r\n" + trailer))[0] == 401


def test_extensions_of_chunks_are_bounded(world: World) -> None:
    with world.open() as client, contextlib.suppress(OSError):
        client.sendall(world.head("POST", f"{world.one}/execs", transfer_encoding="chunked") + b"2")
        for _ in range(100):
            client.sendall(b";" + b"a" * 10_000)
        received(client)


def test_answers_come_in_order_and_so_many_and_no_more_are_sent_ahead(world: World) -> None:
    asked = world.head("GET", "/nope") + world.head("GET", "/health") * 3
    said = world.raw(asked + world.head("GET", "/v1/nope", connection="close"))
    assert [line.split()[1] for line in said.split(b"HTTP")[1:]] == [b"404", b"200", b"200", b"200", b"404"]
    assert world.raw(world.head("GET", "/health") * 1000).count(b"200 OK") == MAX_AHEAD + 1


BODIES: Final = {
    "no JSON": b"{",
    "deep": b'{"argv":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"argv":["true"],"timeout":NaN}',
    "Infinity": b'{"argv":["true"],"timeout":-Infinity}',
    "beyond numbers": b'{"argv":["true"],"timeout":1e999}',
    "many digits": b'{"argv":["true"],"timeout":' + b"9" * 100_000 + b"}",
    "twice": b'{"argv":["true"],"argv":["false"]}',
    "unknown": b'{"argv":["true"],"zz":1}',
    "a wrong type": b'{"argv":{"a":1}}',
    "text that is none": b'{"argv":["\xff"]}',
    "half a character": b'{"argv":["\xed\xa0\x80"]}',
    "a zero byte": b'{"argv":["a\\u0000"]}',
    "a mark first": b"\xef\xbb\xbf{}",
    "another alphabet": '{"argv":["true"]}'.encode("utf-16"),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_bodies_that_mean_nothing_or_two_things(world: World, body: bytes) -> None:
    status, said = world.ask("POST", f"{world.one}/execs", body)
    assert (status, said["error"]["code"]) == (400, "bad_request")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 400),
        ({"content_type": "application/x-www-form-urlencoded"}, 400),
        ({}, 200),
    ],
)
def test_content_types(world: World, headers: dict[str, str], status: int) -> None:
    body = b'{"argv":["true"]}'
    head = world.head("POST", f"{world.one}/execs", content_length=len(body), connection="close", **headers)
    assert parsed(world.raw(head + body))[0] == status


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
@pytest.mark.parametrize("begun", ["nothing", "line", "head", "body", "chunk"])
def test_who_stops_in_the_middle_is_let_go(world: World, begun: str, unix: bool) -> None:
    data = {
        "nothing": b"",
        "line": b"GET /hea",
        "head": b"GET /health HTTP/1.1\r\nx-a: ",
        "body": world.head("POST", f"{world.one}/execs", content_length=99) + b"{",
        "chunk": world.head("POST", f"{world.one}/execs", transfer_encoding="chunked") + b"9\r\n{",
    }[begun]
    assert world.raw(data, unix=unix) == b""


def test_who_sends_a_head_or_a_body_a_byte_at_a_time_is_let_go(world: World) -> None:
    for begun in (
        b"GET /health HTTP/1.1\r\nx: ",
        world.head("POST", f"{world.one}/execs", content_length=999),
    ):
        with world.open() as client, contextlib.suppress(OSError):
            client.sendall(begun)
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                client.sendall(b"a")
                time.sleep(0.05)
            raise AssertionError("it listens for ever")


def test_who_sends_less_than_it_said_leaves_no_file(world: World) -> None:
    before = world.names()
    with world.open() as client:
        head = world.head("PUT", f"{world.one}/files/content?path=half&atomic=true", content_length=1 << 20)
        client.sendall(head + b"x" * 100_000)
        client.shutdown(socket.SHUT_WR)
        received(client)
    world.settles()
    assert world.names() == before


def test_who_leaves_takes_its_command_along_also_with_questions_sent_ahead(world: World) -> None:
    for ahead in (
        b"",
        world.head("GET", "/health"),
        world.head("PUT", f"{world.one}/files/content?path=q", content_length=9**8) + b"x" * 300_000,
    ):
        with world.open() as client:
            body = b'{"argv":["sleep","4321"]}'
            client.sendall(world.head("POST", f"{world.one}/execs", content_length=len(body)) + body)
            world.waits(1)
            client.sendall(ahead)
            assert world.running("sleep 4321")
        world.settles()
        assert not world.running("sleep 4321")


def test_who_reads_nothing_of_a_stream_is_let_go_and_the_command_goes_on(world: World) -> None:
    body = {"command": "echo $$ > talks; exec yes", "wait": False}
    _, made = world.ask("POST", f"{world.one}/execs", body)
    one = f"{world.one}/execs/{made['id']}"
    world.going = 1
    clients = []
    for _ in range(3):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((world.host, world.port))
        client.sendall(world.head("GET", f"{one}/output"))
        clients.append(client)
    try:
        world.settles()
        assert world.ask("GET", f"{one}/result?timeout=0")[0] == 202
    finally:
        for client in clients:
            client.close()
    assert world.ask("POST", f"{one}/signal", {"signal": 9})[0] == 204
    assert world.ask("GET", f"{one}/result?timeout=20")[1]["signal"] == 9
    world.going = 0


_CLIENT: Final = """
import json, socket, sys
host, port, asked = sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)
held = []
for each in asked:
    one = socket.create_connection((host, port), 10)
    one.sendall(each.encode("latin-1"))
    held.append(one)
print("asked", flush=True)
sys.stdin = open("/dev/null")
import time
time.sleep(600)
"""


def test_a_machine_that_vanishes_without_a_word(world: World) -> None:
    """In an upload, a stream, a WebSocket, a wait, and a command: the packets of the client's kernel come no more."""
    _, made = world.ask("POST", f"{world.one}/execs", {"argv": ["cat"], "stdin_open": True, "wait": False})
    one = f"{world.one}/execs/{made['id']}"
    world.going = 1
    waited = b'{"argv":["sleep","4322"]}'
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec_websocket_version": 13}
    asked = [
        world.head("PUT", f"{world.one}/files/content?path=lost&atomic=true", content_length=1 << 20)
        + b"x" * 9000,
        world.head("GET", f"{one}/output"),
        world.head("GET", f"{one}/attach", sec_websocket_key="dGhlIHNhbXBsZSBub25jZQ==", **upgrade),
        world.head("GET", f"{world.one}/wait?timeout=600"),
        world.head("POST", f"{world.one}/execs", content_length=len(waited)) + waited,
    ]
    words = ["ip", "netns", "exec", NETNS, sys.executable, "-c", _CLIENT, world.host, str(world.port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            client.stdin.write(json.dumps([each.decode("latin-1") for each in asked]).encode())
            client.stdin.close()
            assert client.stdout.readline() == b"asked\n"
            world.waits(len(asked))
            ip("-n", NETNS, "link", "set", f"{NETNS}b", "down")
            assert world.ask("GET", world.one)[0] == 200  # others are answered meanwhile
            world.settles()
        finally:
            client.kill()
            ip("-n", NETNS, "link", "set", f"{NETNS}b", "up")
    assert not world.running("sleep 4322")
    assert "lost" not in world.names()
    assert world.ask("GET", f"{one}/result?timeout=0")[0] == 202  # who follows it may leave it
    assert world.ask("POST", f"{one}/signal", {"signal": 9})[0] == 204
    assert world.ask("GET", f"{one}/result?timeout=20")[1]["signal"] == 9
    world.going = 0


def test_connections_that_ask_nothing_are_bounded_and_keep_nobody_out(world: World) -> None:
    with contextlib.ExitStack() as idle:
        for _ in range(BOUNDS.connections * 2):
            idle.enter_context(world.open())
        assert world.ask("GET", "/health")[0] == 200
        assert world._thread.state()[0] <= BOUNDS.connections + 1


def test_who_was_answered_before_his_body_came_keeps_nobody_out(world: World) -> None:
    """Without a key, or too large: whoever sends no more, or ever so little, has his answer and no place."""
    with contextlib.ExitStack() as held:
        for _ in range(BOUNDS.connections * 2):
            client = held.enter_context(world.open())
            client.sendall(b"POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n{")
            assert client.recv(12) == b"HTTP/1.1 401"
        assert world.ask("GET", world.one)[0] == 200


def test_memory_stays_where_it_is(world: World) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def round_() -> None:
        world.raw(world.head("GET", "/health") * 10_000)
        world.raw(b"GET /health HTTP/1.1\r\n" + b"x: " + b"a" * 500_000)
        world.ask("POST", f"{world.one}/execs", BODIES["deep"])

    round_()
    before = resident()
    for _ in range(10):
        round_()
    assert resident() - before < 32 << 20
