"""Streams of bytes on one channel, within the windows of both ends: an inlet from init, an outlet to it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from dsec.errors import ProtocolError
from dsec.runtimes.channel import SEND_PIECE, Channel, Notice
from dsec.runtimes.link import Link
from dsec.wire import guest as wire

_JOIN_BELOW: Final = 4096
_JOIN_UP_TO: Final = 65536


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
                return min(wanted, self._credit, SEND_PIECE)
            await self._granted
        return 0
