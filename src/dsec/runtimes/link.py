"""One connection to an init: frames out, frames in, and the channels that they belong to.

Everything that init sends is hostile. A frame that the protocol does not allow ends the connection, and with it every
operation that was running on it; nothing that init does can make the engine hold more than the bounds below.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dsec.errors import BadRequest, Busy, DsecError, ProtocolError, RuntimeUnavailable
from dsec.runtimes.channel import SEND_PIECE, Channel, Notice, unexpected
from dsec.runtimes.stream import Receiver, Stream
from dsec.wire import guest as wire

_LATE_BYTES: Final = 64 * 2**20
_OUT_HIGH: Final = 512 * 1024
_OUT_HARD: Final = 16 * 2**20
_LEAST_WINDOW: Final = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one connection may hold.

    Attributes:
        window: bytes that init may send ahead of the consumer, per operation.
        total: bytes of all windows together; beyond it new operations get the smallest window (64 KiB).
        channels: operations at once; one more is :class:`~dsec.errors.Busy`.
    """

    window: int = 2**20
    total: int = 64 * 2**20
    channels: int = (
        1280  # a sandbox may run 1,024 commands: the rest is room to signal them, and for its files
    )

    def __post_init__(self) -> None:
        if not _LEAST_WINDOW <= self.window <= 2**31:
            raise BadRequest(f"window: {self.window} is not from {_LEAST_WINDOW} to {2**31} bytes")
        if not 1 <= self.channels <= 4095:
            raise BadRequest(f"channels: {self.channels} is not from 1 to 4095")


class _Closing(Channel):
    """A channel after CLOSE: what was under way is dropped until the PONG that follows it."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._late = 0
        self.number = number

    def on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.Kind.PONG:
            self._link.release(self)
            return
        self._late += wire.HEADER.size + len(frame.payload)
        if self._late > _LATE_BYTES:
            raise ProtocolError(f"more than {_LATE_BYTES} bytes on a channel that was closed")

    def on_lost(self, reason: DsecError) -> None:
        """Nobody waits."""


class _Greeting(Channel):
    """Channel 0: WELCOME once, and never anything else."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._overdue: asyncio.TimerHandle | None = None
        self.welcome: asyncio.Future[wire.Welcome] = link.loop.create_future()

    def hurry(self, seconds: float) -> None:
        """Without an answer for so long the connection ends."""
        self._overdue = self._link.loop.call_later(seconds, self._late, seconds)

    def _late(self, seconds: float) -> None:
        self._link.fail(RuntimeUnavailable(f"init did not answer within {seconds:g} s"))

    def _settle(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()

    def on_frame(self, frame: wire.Frame) -> None:
        message = wire.decode_reply(frame)
        if isinstance(message, wire.Error):
            text = message.message.decode("utf-8", "replace")
            raise ProtocolError(f"init refused the connection: {text}", errno=message.errno)
        if not isinstance(message, wire.Welcome) or self.welcome.done():
            raise unexpected(frame, "on channel 0")
        if message.version != wire.VERSION or message.max_payload < SEND_PIECE:
            raise ProtocolError(
                f"init speaks version {message.version} with payloads of {message.max_payload} bytes; "
                f"this engine needs version {wire.VERSION} and at least {SEND_PIECE}"
            )
        self._settle()
        self.welcome.set_result(message)

    def on_lost(self, reason: DsecError) -> None:
        self._settle()
        if not self.welcome.done():
            self.welcome.set_exception(reason)
            self.welcome.exception()  # heard even when nobody waits for it


class Link(Receiver):
    """The connection. Works under asyncio and uvloop alike. ``held``: init does not read as fast as we write."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bounds: Bounds) -> None:
        self.loop = loop
        self.bounds = bounds
        self.failure: DsecError | None = None
        self.over: asyncio.Future[None] = loop.create_future()
        self.greeting = _Greeting(self)
        self._stream: Stream | None = None
        self._reader = wire.FrameReader()
        self._channels: dict[int, Channel] = {0: self.greeting}
        self._last = 0
        self._granted = 0
        self.held = False
        self._writable = Notice(loop)

    # the stream's side

    def attach(self, sock: socket.socket) -> None:
        """Use this connected socket, which is owned here."""
        self._stream = Stream(self.loop, sock, self, high=_OUT_HIGH, low=_OUT_HIGH // 4)

    def space(self) -> memoryview:
        """Where the next bytes go."""
        return self._reader.space()

    def received(self, count: int) -> None:
        """Bytes came: hand their frames out."""
        if self.failure is not None:
            return
        try:
            for frame in self._reader.advance(count):
                channel = self._channels.get(frame.channel)
                if channel is None:
                    raise unexpected(frame, f"on channel {frame.channel}, which is not open")
                channel.on_frame(frame)
        except ProtocolError as wrong:
            self.fail(wrong)

    def full(self, is_full: bool) -> None:
        """Init does not read as fast as we write, or has read."""
        self.held = is_full
        if not is_full:
            self._writable.notify()

    def ended(self, error: OSError | None) -> None:
        """The socket is closed."""
        self.fail(RuntimeUnavailable(f"the connection to init ended{f': {error}' if error else ''}"))
        if not self.over.done():
            self.over.set_result(None)

    # our side

    def fail(self, reason: DsecError) -> None:
        """End the connection, once; every open operation hears of it."""
        if self.failure is not None:
            return
        self.failure = reason
        if self._stream is not None:
            self._stream.abort()
        elif not self.over.done():
            self.over.set_result(None)
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.number = 0
            channel.on_lost(self.gone())
        self._writable.notify()

    async def finish(self, seconds: float) -> None:
        """End the connection after what was written has gone out, or after ``seconds``."""
        if self._stream is not None and self.failure is None and self._stream.waiting:
            self._stream.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.over), seconds)
        self.fail(RuntimeUnavailable("the connection was closed here"))

    def gone(self) -> RuntimeUnavailable:
        """A new error that says why the connection ended."""
        reason = self.failure
        error = RuntimeUnavailable(
            f"the sandbox's init cannot be reached: {reason.message if reason else 'not connected'}",
            hint="connect again if the sandbox still runs; otherwise look at why it ended",
            cause=reason.code if reason else "internal",
        )
        error.__cause__ = reason
        return error

    def write(self, data: bytes) -> None:
        """Send; an init that reads nothing at all for too long loses the connection."""
        if self.failure is not None or self._stream is None:
            return
        self._stream.write(data)
        if self.held and self._stream.waiting > _OUT_HARD:
            self.fail(ProtocolError(f"init leaves more than {_OUT_HARD} bytes unread"))

    async def drain(self) -> None:
        """Wait until the transport takes more.  Raises: RuntimeUnavailable."""
        while self.held and self.failure is None:
            await self._writable
        if self.failure is not None:
            raise self.gone()

    def grant(self) -> int:
        """The window of a new operation, so that all together stay within the bound."""
        left = self.bounds.total - self._granted
        return max(_LEAST_WINDOW, min(self.bounds.window, left))

    async def start(self, channel: Channel, message: wire.Message, *, window: int = 0) -> None:
        """Open a channel for ``message`` and send it.

        Raises:
            BadRequest: a field is out of range. Busy: too many operations. RuntimeUnavailable: init is gone.
        """
        payload = outgoing(message)
        if self.held or self.failure is not None:
            await self.drain()
        self.begin(channel, message.KIND, payload, window=window)

    def begin(self, channel: Channel, kind: int, payload: bytes, *, window: int = 0) -> None:
        """As :meth:`start`, at once."""
        self.write(self._opening(channel, kind, payload, window))

    def begin_all(self, channels: Sequence[Channel], kind: int, payloads: Sequence[bytes]) -> None:
        """As :meth:`begin` for each, in one write."""
        parts = zip(channels, payloads, strict=True)
        self.write(b"".join([self._opening(channel, kind, payload, 0) for channel, payload in parts]))

    def _opening(self, channel: Channel, kind: int, payload: bytes, window: int) -> bytes:
        """The first frame of an operation, which counts as open now.  Raises: RuntimeUnavailable, Busy."""
        if self.failure is not None:
            raise self.gone()
        if len(self._channels) > self.bounds.channels:
            raise Busy(
                f"{self.bounds.channels} operations are running in this sandbox", hint="try again later"
            )
        number = self._last
        while number == 0 or number in self._channels:
            number = (number + 1) & 0xFFFF_FFFF
        self._last = (number + 1) & 0xFFFF_FFFF
        channel.number, channel.window = number, window
        self._granted += window
        self._channels[number] = channel
        return wire.encode_frame(kind, number, payload)

    def release(self, channel: Channel) -> None:
        """The operation has had its last frame."""
        if channel.number and self._channels.get(channel.number) is channel:
            del self._channels[channel.number]
            self._granted -= channel.window
            channel.number = channel.window = 0
            if len(self._channels) == 1:
                self._reader.rest()

    def abandon(self, channel: Channel) -> None:
        """Cancel the operation, if it has not had its last frame.

        CLOSE has no answer, so a PING on the same number follows: until its PONG the number is not used again.
        """
        number = channel.number
        if not number or self._channels.get(number) is not channel:
            return
        self._granted -= channel.window
        channel.number = channel.window = 0
        self._channels[number] = _Closing(self, number)
        close = wire.encode_frame(wire.Kind.CLOSE, number)
        self.write(close + wire.Ping().frame(number))

    @property
    def open_channels(self) -> int:
        """Operations under way, those being closed included."""
        return max(0, len(self._channels) - 1)


def outgoing(message: wire.Message) -> bytes:
    """The payload of a request.  Raises: BadRequest: a field that the caller chose is out of range."""
    try:
        return message.encode()
    except ProtocolError as wrong:
        raise BadRequest(f"{message.KIND.name.lower()}: {wrong.message}") from None
