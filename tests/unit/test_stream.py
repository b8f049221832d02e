"""A stream socket on a loop: order, back-pressure, both ways of ending, errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from dsec.runtimes.stream import Receiver, Stream

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
HIGH, LOW = 1 << 18, 1 << 16


class Heard(Receiver):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.fullness: list[bool] = []
        self.ends: list[OSError | None] = []
        self.over = asyncio.Event()
        self._space = bytearray(1000)

    def space(self) -> memoryview:
        return memoryview(self._space)

    def received(self, count: int) -> None:
        self.data += self._space[:count]

    def full(self, is_full: bool) -> None:
        self.fullness.append(is_full)

    def ended(self, error: OSError | None) -> None:
        self.ends.append(error)
        self.over.set()


def play(
    run: Callable[[Awaitable[None]], None],
    body: Callable[[Stream, Heard, socket.socket], Awaitable[None]],
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        with theirs:
            heard = Heard()
            stream = Stream(asyncio.get_running_loop(), ours, heard, high=HIGH, low=LOW)
            try:
                await body(stream, heard, theirs)
            finally:
                stream.abort()
            assert (stream.open, stream.waiting, len(heard.ends)) == (False, 0, 1)

    run(main())


async def read_all(sock: socket.socket) -> bytes:
    loop, found = asyncio.get_running_loop(), bytearray()
    while piece := await loop.sock_recv(sock, 1 << 16):
        found += piece
    return bytes(found)


@LOOPS
def test_bytes_in_order_and_the_peers_end(run: Callable[[Awaitable[None]], None]) -> None:
    async def body(stream: Stream, heard: Heard, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        stream.write(b"a")
        stream.write(b"b")
        assert await loop.sock_recv(theirs, 10) == b"ab"
        await loop.sock_sendall(theirs, bytes(range(256)) * 100)
        theirs.shutdown(socket.SHUT_WR)
        await heard.over.wait()
        assert (heard.data, heard.ends) == (bytes(range(256)) * 100, [None])
        stream.write(b"late")  # nothing, and no error

    play(run, body)


@LOOPS
def test_a_peer_that_does_not_read_is_told_of_and_gets_all_later(
    run: Callable[[Awaitable[None]], None],
) -> None:
    async def body(stream: Stream, heard: Heard, theirs: socket.socket) -> None:
        sent = b"".join(bytes([n % 251]) * 10_000 for n in range(200))
        for at in range(0, len(sent), 10_000):
            stream.write(sent[at : at + 10_000])
        assert stream.waiting > HIGH
        assert heard.fullness == [True]
        stream.close()
        assert stream.open  # what was written goes out first
        stream.write(b"refused")
        assert await read_all(theirs) == sent
        await heard.over.wait()
        assert (heard.fullness, heard.ends) == ([True, False], [None])

    play(run, body)


@LOOPS
def test_an_abort_ends_it_at_once(run: Callable[[Awaitable[None]], None]) -> None:
    async def body(stream: Stream, heard: Heard, theirs: socket.socket) -> None:
        stream.write(bytes(1 << 20))
        stream.abort()
        assert heard.ends == [None]
        stream.close()
        assert len(await read_all(theirs)) < 1 << 20

    play(run, body)


@LOOPS
@pytest.mark.parametrize("waiting", [False, True])
def test_a_vanished_peer_is_an_error_told_later(
    run: Callable[[Awaitable[None]], None], waiting: bool
) -> None:
    async def body(stream: Stream, heard: Heard, theirs: socket.socket) -> None:
        if waiting:
            stream.write(bytes(1 << 20))
        theirs.close()
        stream.write(b"x")
        assert heard.ends == []  # not while the writer is writing
        async with asyncio.timeout(5):
            await heard.over.wait()

    play(run, body)
