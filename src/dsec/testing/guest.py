"""A fake init: speaks the protocol over one end of a socket pair, in this process, and does what a test tells it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from dsec.runtimes.guest import GuestConnection, connect
from dsec.runtimes.link import Bounds
from dsec.wire import guest as wire

Handler = Callable[["FakeInit", int, wire.Message], None]


class FakeInit(asyncio.Protocol):
    """One end of a connection. ``on`` maps a kind of request to what answers it; what has no handler is only recorded.

    HELLO and PING are answered unless ``on`` says otherwise.

    Attributes:
        seen: every request with its channel and frame flags, in order.
    """

    def __init__(self, on: dict[wire.Kind, Handler] | None = None) -> None:
        self.on: dict[wire.Kind, Handler] = {wire.Kind.HELLO: welcome, wire.Kind.PING: pong, **(on or {})}
        self.seen: list[tuple[int, wire.Message, int]] = []
        self._reader = wire.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._arrived = asyncio.Event()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other end is there."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Requests: recorded, then handled."""
        for frame in self._reader.feed(data):
            message = wire.decode_request(frame)
            self.seen.append((frame.channel, message, frame.flags))
            handler = self.on.get(message.KIND)
            if handler is not None:
                handler(self, frame.channel, message)
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        self.lost.set()
        self._arrived.set()

    def send(self, channel: int, *messages: wire.Message, flags: int = 0) -> None:
        """Send frames."""
        for message in messages:
            self.raw(message.frame(channel, flags))

    def output(self, channel: int, stream: int, offset: int, data: bytes, *, end: bool = False) -> None:
        """Send output of an exec."""
        self.raw(wire.encode_output(channel, stream, offset, data, end=end))

    def data(self, channel: int, data: bytes, *, end: bool = False) -> None:
        """Send content of a file."""
        self.raw(wire.encode_data(channel, data, end=end))

    def raw(self, data: bytes) -> None:
        """Send any bytes at all."""
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        """Vanish."""
        assert self._transport is not None
        self._transport.abort()

    def pause(self) -> None:
        """Read nothing more."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        assert self._transport is not None
        self._transport.resume_reading()

    def requests(self, kind: wire.Kind) -> list[tuple[int, wire.Message]]:
        """Channel and message of every request of one kind so far."""
        return [(channel, message) for channel, message, _ in self.seen if kind == message.KIND]

    async def wait_for(self, kind: wire.Kind, count: int = 1) -> int:
        """Wait for the ``count``-th request of a kind; its channel.  Raises: ConnectionError: it will not come."""
        while len(found := self.requests(kind)) < count:
            if self.lost.is_set():
                raise ConnectionError(f"the connection ended before request {count} of kind {kind.name}")
            self._arrived.clear()
            await self._arrived.wait()
        return found[count - 1][0]


def welcome(fake: FakeInit, channel: int, message: wire.Message) -> None:
    """Answer HELLO."""
    fake.send(channel, wire.Welcome(wire.VERSION, wire.MAX_PAYLOAD, 1, 1))


def pong(fake: FakeInit, channel: int, message: wire.Message) -> None:
    """Answer PING."""
    assert isinstance(message, wire.Ping)
    fake.send(channel, wire.Pong(message.data))


def answer(*messages: wire.Message) -> Handler:
    """A handler that sends these messages."""

    def handler(fake: FakeInit, channel: int, _: wire.Message) -> None:
        fake.send(channel, *messages)

    return handler


def exit_status(
    code: int = 0, *, how: int = 0, reason: int = 0, stdout: int = 0, stderr: int = 0
) -> wire.ExitStatus:
    """An EXIT with round figures."""
    return wire.ExitStatus(how, code, reason, stdout, stderr, 1000, 2000, 3, 4_000_000)


def runs(stdout: bytes = b"", stderr: bytes = b"", code: int = 0) -> Handler:
    """A handler for EXEC: this output, this exit code."""

    def handler(fake: FakeInit, channel: int, _: wire.Message) -> None:
        fake.send(channel, wire.Started(7, 0, 0))
        for stream, data in ((1, stdout), (2, stderr)):
            for at in range(0, len(data), wire.MAX_EXEC_DATA):
                fake.output(channel, stream, at, data[at : at + wire.MAX_EXEC_DATA])
        fake.send(channel, exit_status(code, stdout=len(stdout), stderr=len(stderr)))

    return handler


@asynccontextmanager
async def fake_guest(
    on: dict[wire.Kind, Handler] | None = None, *, bounds: Bounds | None = None
) -> AsyncIterator[tuple[FakeInit, GuestConnection]]:
    """A fake init and a client connected to it."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    fake = FakeInit(on)
    transport, _ = await loop.create_unix_connection(lambda: fake, sock=theirs)
    try:
        guest = await connect(ours, bounds=bounds)
        try:
            yield fake, guest
        finally:
            await guest.close()
    finally:
        transport.abort()
        await fake.lost.wait()
