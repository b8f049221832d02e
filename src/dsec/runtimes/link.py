"""One connection to an init: frames out, frames in, channels, and windows in both directions.

Everything that init sends is hostile. A frame that the protocol does not allow ends the connection, and with it every
operation that was running on it; nothing that init does can make the engine hold more than the bounds below.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from dsec.errors import BadRequest, Busy, DsecError, ProtocolError, RuntimeUnavailable
from dsec.runtimes.stream import Receiver, Stream
from dsec.wire import guest as wire

_Answer = TypeVar("_Answer", bound=wire.Message)
_JOIN_BELOW: Final = 4096
_JOIN_UP_TO: Final = 65536
_SEND_PIECE: Final = 131_072
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


class Notice:
    """Wakes everybody who waits now. Cheap enough to have one per operation."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Wake all."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def __await__(self) -> Generator[object, None, None]:
        future = self._loop.create_future()
        self._waiting.append(future)
        try:
            yield from future
        finally:
            if future.cancelled() and future in self._waiting:
                self._waiting.remove(future)


class Channel(ABC):
    """One operation. ``number`` is 0 while it is not open."""

    number: int = 0
    window: int = 0

    @abstractmethod
    def on_frame(self, frame: wire.Frame) -> None:
        """A frame for this operation.  Raises: ProtocolError: before anything has changed."""

    @abstractmethod
    def on_lost(self, reason: DsecError) -> None:
        """The connection ended; the channel is closed already."""


def unexpected(frame: wire.Frame, when: str) -> ProtocolError:
    """A frame of a known or unknown kind that may not come now."""
    return ProtocolError(
        f"init sent a frame of kind {frame.kind:#x} {when}", kind=frame.kind, channel=frame.channel
    )


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
        if message.version != wire.VERSION or message.max_payload < _SEND_PIECE:
            raise ProtocolError(
                f"init speaks version {message.version} with payloads of {message.max_payload} bytes; "
                f"this engine needs version {wire.VERSION} and at least {_SEND_PIECE}"
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


class Call(Channel):
    """An operation with one answer: ``accepts`` it, or ERROR."""

    def __init__(self, link: Link, accepts: type[wire.Message]) -> None:
        self._link = link
        self._accepts = accepts
        self.answer: asyncio.Future[wire.Message] = link.loop.create_future()

    def on_frame(self, frame: wire.Frame) -> None:
        message = wire.decode_reply(frame)
        if not isinstance(message, self._accepts | wire.Error):
            raise unexpected(frame, f"where {self._accepts.KIND.name} was due")
        self._link.release(self)
        if not self.answer.done():
            self.answer.set_result(message)

    def on_lost(self, reason: DsecError) -> None:
        if not self.answer.done():
            self.answer.set_exception(reason)


async def call(link: Link, message: wire.Message, accepts: type[_Answer]) -> _Answer | wire.Error:
    """One request and its answer.  Raises: as :meth:`Link.start`."""
    channel = Call(link, accepts)
    await link.start(channel, message)
    try:
        answer = await channel.answer
    finally:
        link.abandon(channel)
    assert isinstance(answer, accepts | wire.Error)
    return answer


class _Told(Channel):
    """One of several requests that were sent together; ``error``: the answer was not OK."""

    def __init__(self, link: Link, waiting: set[_Told], answered: Notice) -> None:
        self._link = link
        self._waiting = waiting
        self._answered = answered
        self.error: wire.Error | None = None

    def on_frame(self, frame: wire.Frame) -> None:
        message = wire.decode_reply(frame)
        if isinstance(message, wire.Error):
            self.error = message
        elif not isinstance(message, wire.Ok):
            raise unexpected(frame, "where OK was due")
        self._link.release(self)
        self.on_lost(None)

    def on_lost(self, reason: DsecError | None) -> None:
        """It is over, one way or the other; the link knows which."""
        self._waiting.discard(self)
        if not self._waiting:
            self._answered.notify()


async def tell_all(link: Link, kind: wire.Kind, payloads: Sequence[bytes]) -> list[wire.Error | None]:
    """Requests sent together, each answered by OK (None here) or ERROR.  Raises: as :meth:`Link.start`."""
    await link.drain()
    waiting: set[_Told] = set()
    answered = Notice(link.loop)
    channels = [_Told(link, waiting, answered) for _ in payloads]
    waiting.update(channels)
    try:
        link.begin_all(channels, kind, payloads)
        while waiting:
            await answered
    finally:
        for channel in tuple(waiting):
            link.abandon(channel)
    if link.failure is not None:
        raise link.gone()
    return [channel.error for channel in channels]


class Unheard(Channel):
    """An operation whose answer nobody waits for."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def on_frame(self, frame: wire.Frame) -> None:
        if not isinstance(wire.decode_reply(frame), wire.Ok | wire.Error):
            raise unexpected(frame, "where OK was due")
        self._link.release(self)

    def on_lost(self, reason: DsecError) -> None:
        """Nobody waits."""


class Piece:
    """Bytes of one stream that wait for the consumer; small neighbours are joined."""

    __slots__ = ("data", "offset", "stream")

    def __init__(self, stream: int, offset: int, data: bytes) -> None:
        self.stream = stream
        self.offset = offset
        self.data: bytes | bytearray = data


class Inlet:
    """What init has sent on one channel and the consumer has not taken: at most ``window`` bytes."""

    __slots__ = (
        "_channel",
        "_credit",
        "_dropping",
        "_link",
        "_owed",
        "_queue",
        "_tails",
        "_window",
        "arrived",
    )

    def __init__(self, link: Link, channel: Channel, window: int) -> None:
        self._link = link
        self._channel: Channel | None = channel
        self._window = self._credit = window
        self._owed = 0
        self._queue: deque[Piece] = deque()
        self._tails: dict[int, Piece] = {}
        self._dropping = False
        self.arrived = Notice(link.loop)

    def check(self, frame: wire.Frame, count: int) -> None:
        """Raises: ProtocolError: more than the credit, or a frame with nothing in it."""
        if count > self._credit:
            raise ProtocolError(
                f"init sent {count} bytes with {self._credit} bytes of credit", channel=frame.channel
            )
        if count == 0 and not frame.end:
            raise ProtocolError("init sent an empty DATA frame", channel=frame.channel)

    def put(self, stream: int, offset: int, data: bytes) -> None:
        """Keep ``data``, which was checked, for the consumer."""
        if not data:
            return
        self._credit -= len(data)
        if self._dropping:
            self._consumed(len(data))
            return
        tail = self._tails.get(stream) if len(data) < _JOIN_BELOW else None
        if tail is not None and len(tail.data) < _JOIN_UP_TO:
            if isinstance(tail.data, bytes):
                tail.data = bytearray(tail.data)
            tail.data += data
            return
        piece = Piece(stream, offset, data)
        self._queue.append(piece)
        self._tails[stream] = piece
        self.arrived.notify()

    def pop(self) -> Piece | None:
        """The next piece, whose credit goes back to init; None when there is none now."""
        if not self._queue:
            return None
        piece = self._queue.popleft()
        if self._tails.get(piece.stream) is piece:
            del self._tails[piece.stream]
        self._consumed(len(piece.data))
        return piece

    def finish(self) -> None:
        """Init sends no more. Also ends the cycle of references between an operation and what it holds."""
        self._channel = None
        self.arrived.notify()

    def drop(self) -> None:
        """Forget what is held and all that follows."""
        self._dropping = True
        while self.pop() is not None:
            pass

    def _consumed(self, count: int) -> None:
        self._owed += count
        channel = self._channel
        if self._owed * 4 >= self._window and channel is not None and channel.number:
            self._link.write(wire.Credit(self._owed).frame(channel.number))
            self._credit += self._owed
            self._owed = 0


class Outlet:
    """Bytes towards init, within its credit and what the transport takes. ``close`` lets every sender go."""

    __slots__ = ("_channel", "_closed", "_credit", "_granted", "_link", "_turn")

    def __init__(self, link: Link, channel: Channel) -> None:
        self._link = link
        self._channel = channel
        self._credit = wire.INITIAL_CREDIT
        self._closed = False
        self._granted = Notice(link.loop)
        self._turn = asyncio.Lock()

    def grant(self, frame: wire.Frame) -> None:
        """A CREDIT frame.  Raises: ProtocolError: more credit than there were bytes."""
        more = wire.Credit.decode(frame.payload).bytes
        if frame.flags or self._credit + more > wire.INITIAL_CREDIT:
            raise ProtocolError(f"init gave {more} bytes of credit too much", channel=frame.channel)
        self._credit += more
        self._granted.notify()

    def close(self) -> None:
        """Nothing more can be sent."""
        self._closed = True
        self._granted.notify()

    async def send(self, data: bytes | memoryview, *, end: bool = False) -> bool:
        """Send all of ``data`` in order, then ``end``; False when the operation ended before that.

        Raises:
            RuntimeUnavailable: init is gone.
        """
        async with self._turn:
            view = memoryview(data).cast("B")
            while view:
                count = await self._room(len(view))
                if not count:
                    return False
                last = end and count == len(view)
                self._link.write(wire.encode_data(self._channel.number, view[:count], end=last))
                self._credit -= count
                view = view[count:]
                end = end and not last
            if end and await self._ready():
                self._link.write(wire.encode_data(self._channel.number, b"", end=True))
            return self._open()

    def _open(self) -> bool:
        return not self._closed and self._channel.number != 0

    async def _ready(self) -> bool:
        if not self._closed:
            await self._link.drain()
        return self._open()

    async def _room(self, wanted: int) -> int:
        """How much may go now, waiting until it is something; 0 when the operation ended."""
        while await self._ready():
            if self._credit:
                return min(wanted, self._credit, _SEND_PIECE)
            await self._granted
        return 0
