"""A client whose server is cut off, hangs, answers nonsense, or is not there: nothing hangs, nothing is done twice, and every failure has its class."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dsec import AsyncDsec, Dsec
from dsec.client.aio import AsyncDsec as Client
from dsec.errors import (
    BadRequest,
    Conflict,
    NotFound,
    ProtocolError,
    RuntimeUnavailable,
    Unauthenticated,
    UnknownOutcome,
)
from dsec.model.ids import new_exec_id, new_sandbox_id
from dsec.model.sandbox import Metrics, State
from dsec.remote import connection as remote
from dsec.remote.connection import Call, Connection
from dsec.remote.endpoint import parse_endpoint
from dsec.remote.execs import RemoteSession
from dsec.remote.services import connect
from dsec.remote.values import every, value
from dsec.runtimes.local_trees import LocalArchives
from dsec.testing.harness import Harness
from dsec.testing.serving import KEY, served
from dsec.wiring.servers import server

pytestmark = pytest.mark.anyio

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def url() -> Iterator[str]:
    with served(Harness(system_clock=True).connect) as url:
        yield url


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """Somebody who listens and does as ``handler`` says."""
    writers: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await handler(reader, writer)
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)


class Proxy:
    """Between a client and a server; it can be cut, and can swallow answers.

    Attributes:
        swallow: after so many bytes of a request to a path with this in it have passed, the answer is dropped and the connection cut. Once.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallow = b""
        self.seen = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        both = {writer, far_writer}
        self._writers |= both
        back = asyncio.ensure_future(self._pass(far_reader, writer, both, answers=True))
        try:
            await self._pass(reader, far_writer, both, answers=False)
        finally:
            await asyncio.wait([back], timeout=1)
            back.cancel()
            self._writers -= both

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: set[asyncio.StreamWriter],
        *,
        answers: bool,
    ) -> None:
        doomed = False
        with suppress(OSError):
            while data := await reader.read(65536):
                if answers and any(getattr(one, "doomed", False) for one in both):
                    break
                if not answers and self.swallow and self.swallow in data:
                    self.swallow, doomed = b"", True
                    self.seen += 1
                if doomed:
                    for one in both:
                        one.doomed = True  # type: ignore[attr-defined]
                writer.write(data)
                await writer.drain()
        for one in both:
            one.close()

    def cut(self) -> None:
        """End every connection."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[Proxy, Client]]:
    proxy = Proxy(url)
    async with listening(proxy.handle) as near, AsyncDsec(near, api_key=KEY) as dsec:
        yield proxy, dsec


async def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="cannot be reached") as told:
        await AsyncDsec("http://127.0.0.1:1").open()
    assert "dsec serve" in told.value.hint
    with pytest.raises(RuntimeUnavailable, match="No such file"):
        await AsyncDsec(f"unix://{tmp_path}/nothing").open()


async def test_a_server_without_tls_is_told_as_such(url: str) -> None:
    with pytest.raises(RuntimeUnavailable, match="cannot be reached") as told:
        await AsyncDsec(url.replace("http:", "https:"), api_key=KEY).open()
    assert "http://" in told.value.hint


async def test_a_sandbox_and_a_command_say_which_they_are(url: str) -> None:
    async with AsyncDsec(url, api_key=KEY) as dsec:
        sandbox = await dsec.sandboxes.create()
        assert repr(sandbox) == f"AsyncSandbox({sandbox.id!r})"
        background = await sandbox.start(["true"])
        assert repr(background) == f"AsyncExec({background.id!r})"


async def test_a_create_whose_answer_is_lost_is_made_once(url: str) -> None:
    async with proxied(url) as (proxy, dsec):
        proxy.swallow = b"POST /v1/sandboxes "
        sandbox = await dsec.sandboxes.create()
        assert proxy.seen == 1
        assert [info.id for info in await dsec.sandboxes.list()] == [sandbox.id]
        assert (await sandbox.exec(["echo", "hi"])).text == "hi\n"


async def test_a_start_whose_answer_is_lost_starts_once(url: str) -> None:
    async with proxied(url) as (proxy, dsec):
        sandbox = await dsec.sandboxes.create()
        proxy.swallow = b"/execs "
        started = await sandbox.start(["sleep", "60"])
        assert proxy.seen == 1
        assert [info.id for info in await sandbox.execs()] == [started.id]
        await started.kill()


async def test_a_command_whose_answer_is_lost_is_not_run_again(url: str) -> None:
    async with proxied(url) as (proxy, dsec):
        sandbox = await dsec.sandboxes.create()
        proxy.swallow = b"/execs "
        with pytest.raises(UnknownOutcome, match="lost"):
            await sandbox.exec(["echo", "once"])
        assert proxy.seen == 1
        assert len(await sandbox.execs()) == 1


async def test_an_append_whose_answer_is_lost_is_not_made_again(url: str) -> None:
    async with proxied(url) as (proxy, dsec):
        sandbox = await dsec.sandboxes.create()
        await sandbox.files.write("a", b"1")
        proxy.swallow = b"append=true"
        with pytest.raises(UnknownOutcome):
            await sandbox.files.write("a", b"2", append=True)
        proxy.swallow = b"atomic=true"
        await sandbox.files.write("b", b"whole", atomic=True)  # the same when it is done twice
        assert proxy.seen == 2
        assert await sandbox.files.read("a") == b"12"


async def test_output_goes_on_where_it_was_cut(url: str) -> None:
    async with proxied(url) as (proxy, dsec):
        sandbox = await dsec.sandboxes.create()
        process = await sandbox.start(["cat"], stdin=True)
        output = process.output
        await process.send_stdin(b"first ")
        seen = (await anext(output)).data
        while seen != b"first ":
            seen += (await anext(output)).data
        proxy.cut()
        await process.send_stdin(b"second")
        await process.close_stdin()
        async for chunk in output:
            seen += chunk.data
        assert seen == b"first second"
        assert (await process.wait()).stdout == seen


async def test_waiting_survives_a_cut(url: str) -> None:
    async with proxied(url) as (proxy, dsec):
        sandbox = await dsec.sandboxes.create()
        process = await sandbox.start(["sleep", "60"])
        waiting = asyncio.ensure_future(process.wait())
        ending = asyncio.ensure_future(sandbox.wait())
        await asyncio.sleep(0.1)
        proxy.cut()
        await process.kill()
        assert (await waiting).signal == 9
        await sandbox.destroy()
        assert (await ending).state is State.GONE


async def test_a_create_that_nobody_waits_for_is_taken_back(url: str) -> None:
    async with AsyncDsec(url, api_key=KEY) as dsec:
        making = asyncio.ensure_future(dsec.sandboxes.create())
        await asyncio.sleep(0)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
    async with AsyncDsec(url, api_key=KEY) as dsec:
        assert await dsec.sandboxes.list() == ()


async def test_a_server_that_hangs(url: str) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        while await reader.read(1024):
            pass

    async with listening(hang) as near:
        with pytest.raises(RuntimeUnavailable, match="no answer"):
            await connect(parse_endpoint(near), "", LocalArchives(), patience=0.2)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1,2]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Encoding: gzip\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8000000\r\n" + b"x" * 0x8000000,
    ],
    ids=["no http", "no value", "packed", "too long", "elsewhere", "without end"],
)
async def test_nonsense_is_told_as_such(answer: bytes) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        await reader.read()

    async with listening(babble) as near:
        connection = Connection(parse_endpoint(near), "secret-key")
        try:
            with pytest.raises(ProtocolError) as told:
                await value(connection, Metrics, Call(method="GET", path="/x", again=True))
            assert "secret-key" not in str(told.value)
            assert "secret-key" not in repr(connection)
        finally:
            await connection.close()


async def test_a_page_that_is_no_server_is_told_as_such() -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope")
        await writer.drain()

    async with listening(page) as near:
        with pytest.raises(ProtocolError, match="no DSec server"):
            await AsyncDsec(near).open()


async def test_keys(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncDsec(url, api_key="dsec_wrong") as dsec:
        with pytest.raises(Unauthenticated) as told:
            await dsec.sandboxes.list()
        assert "dsec_wrong" not in str(told.value)
    monkeypatch.setenv("DSEC_API_KEY", KEY)
    async with AsyncDsec(url) as dsec:
        assert await dsec.sandboxes.list() == ()
    for wrong in ("two words", "line\n", "ü"):
        with pytest.raises(BadRequest) as refused:
            AsyncDsec(url, api_key=wrong)
        assert wrong not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        "ftp://x",
        "http://",
        "http://u:p@h",
        "http://h/?q=1",
        "unix://relative",
        "unix:///" + "x" * 200,
        "http://h:99999",
    ],
)
async def test_urls_that_are_none(wrong: str) -> None:
    with pytest.raises(BadRequest, match="url"):
        AsyncDsec(wrong)


async def test_what_belongs_to_an_engine_here_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="pool"):
        AsyncDsec(url, pool=1)
    with pytest.raises(BadRequest, match="api_key"):
        AsyncDsec(api_key="k")


def test_two_event_loops_and_threads(url: str) -> None:
    """Each event loop has a client of its own; the blocking one is everybody's."""

    async def one() -> str:
        async with AsyncDsec(url, api_key=KEY) as dsec, await dsec.sandboxes.create() as sandbox:
            return (await sandbox.exec(["echo", "loop"])).text

    assert [asyncio.run(one()), asyncio.run(one())] == ["loop\n", "loop\n"]
    found: list[str] = []
    with Dsec(url, api_key=KEY) as dsec:

        def work(number: int) -> None:
            with dsec.sandboxes.create() as sandbox:
                found.append(sandbox.exec(["echo", str(number)]).text)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(NotFound):
            dsec.sandboxes.get("sb-" + "a" * 26)
    assert sorted(found) == [f"{number}\n" for number in range(6)]


def test_a_client_of_another_event_loop_is_refused(url: str) -> None:
    dsec = Client(server(url, KEY))
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(dsec.open())
        with pytest.raises(Conflict, match="another event loop"):
            second.run(dsec.sandboxes.list())
        first.run(dsec.close())


# Servers that stop, or make things up


STOPPING = b'{"error":{"code":"runtime_unavailable","message":"the server is stopping","hint":"","facts":{"stopping":true}}}'


def answered(status: bytes, body: bytes = b"", *, length: int = 0) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        status,
        length or len(body),
        body,
    )


@asynccontextmanager
async def saying(*answers: bytes) -> AsyncIterator[tuple[Connection, list[bytes]]]:
    """A client of a server that gives these answers, one to each connection, and the last to all others; and what it was asked."""
    asked: list[bytes] = []
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()

    async with listening(handle) as url:
        connection = Connection(parse_endpoint(url), KEY, patience=5.0)
        try:
            yield connection, asked
        finally:
            await connection.close()


async def test_a_stream_is_asked_for_again_while_a_server_stops() -> None:
    stopping = answered(b"503 No", STOPPING)
    async with saying(stopping, stopping, answered(b"200 OK", b"content")) as (connection, asked):
        pieces = connection.pieces(Call(method="GET", path="/x"))
        assert b"".join([piece async for piece in pieces]) == b"content"
        assert len(asked) == 3


async def test_a_websocket_is_asked_for_again_while_a_server_stops() -> None:
    stopping = answered(b"503 No", STOPPING)
    async with saying(stopping, answered(b"404 No")) as (connection, asked):
        session = RemoteSession(connection, new_sandbox_id(), new_exec_id(), 1, 0, 0)
        with pytest.raises(NotFound):
            await anext(aiter(session.output()))
        assert len(asked) == 2


async def test_an_error_that_breaks_off_is_no_error_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACK_OFF", (0.01,))
    async with saying(answered(b"404 No", b'{"error"', length=100)) as (connection, _):
        with pytest.raises(RuntimeUnavailable):
            await anext(aiter(connection.pieces(Call(method="GET", path="/x"))))


async def test_a_list_that_does_not_go_on_ends() -> None:
    page = answered(b"200 OK", b'{"items":[1],"next":"here"}')
    async with saying(page) as (connection, asked):
        with pytest.raises(ProtocolError, match="twice"):
            await every(connection, int, Call(method="GET", path="/x"))
        assert len(asked) == 2
