"""Frames of the init protocol (``docs/reference/protocol.md``): cut out of a byte stream, and put together."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple

from dsec.errors import ProtocolError

VERSION: Final = 1
MAX_PAYLOAD: Final = 262_144
HEADER: Final = struct.Struct("<IBBHI")
MAX_PATH: Final = 4095
MAX_ID: Final = 64
MAX_ITEMS: Final = 4096
MAX_ARGUMENTS: Final = 196_608
MAX_MESSAGE: Final = 512
MAX_EXEC_DATA: Final = MAX_PAYLOAD - 8
INITIAL_CREDIT: Final = 262_144
END: Final = 0x80
_STREAM: Final = 0x0F
U32: Final = struct.Struct("<I")
U64: Final = struct.Struct("<Q")
_HEAD: Final = HEADER.size


class Kind(IntEnum):
    """Frame kinds. ``CREDIT`` and ``DATA`` travel both ways; 0x80 and above come from init only."""

    HELLO = 0x01
    EXEC = 0x02
    ATTACH = 0x03
    SIGNAL = 0x04
    WINSIZE = 0x05
    FORGET = 0x06
    LIST_EXECS = 0x07
    SHIFT = 0x08
    CREDIT = 0x09
    CLOSE = 0x0A
    PING = 0x0B
    USAGE = 0x0C
    DATA = 0x10
    READ = 0x20
    WRITE = 0x21
    LIST = 0x22
    STAT = 0x23
    MKDIR = 0x24
    RENAME = 0x25
    REMOVE = 0x26
    SETATTR = 0x27
    WATCH = 0x28
    BATCH = 0x29
    TREE = 0x2A
    OK = 0x80
    WELCOME = 0x81
    ERROR = 0x82
    STARTED = 0x83
    EXIT = 0x84
    EXECS = 0x85
    ENTRY = 0x86
    ENTRIES = 0x87
    EVENTS = 0x88
    BATCH_DONE = 0x89
    PONG = 0x8A
    USAGE_IS = 0x8B


class Frame(NamedTuple):
    """One frame; ``payload`` is not decoded yet."""

    kind: int
    flags: int
    channel: int
    payload: bytes

    @property
    def stream(self) -> int:
        """The stream of a ``DATA`` frame: 0 stdin or file, 1 stdout, 2 stderr."""
        return self.flags & _STREAM

    @property
    def end(self) -> bool:
        """Bit 7: the last of its stream, or the last ``ENTRIES``."""
        return self.flags & END != 0


def encode_frame(kind: int, channel: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """The bytes of one frame.

    Raises:
        ProtocolError: the payload is too long or a field is out of range.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError(f"payload of {len(payload)} bytes, at most {MAX_PAYLOAD}", kind=kind)
    try:
        return HEADER.pack(len(payload), kind, flags, 0, channel) + payload
    except struct.error as wrong:
        raise ProtocolError(f"frame field out of range: {wrong}", kind=kind) from None


class FrameReader:
    """Cuts a byte stream into frames, in place.

    A transport that can receive into a buffer uses :meth:`space` and :meth:`advance`; anything else :meth:`feed`.
    Memory: a small buffer at rest, up to two frames while large ones arrive.
    """

    __slots__ = ("_buffer", "_filled", "_start")

    REST: ClassVar[int] = 4096
    FULL: ClassVar[int] = 2 * (MAX_PAYLOAD + HEADER.size)

    def __init__(self) -> None:
        self._buffer = bytearray(self.REST)
        self._start = 0
        self._filled = 0

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return self._filled - self._start

    def space(self) -> memoryview:
        """Where the next bytes go: never empty."""
        return memoryview(self._buffer)[self._filled :]

    def advance(self, count: int) -> list[Frame]:
        """``count`` bytes were put into :meth:`space`: the frames that are whole now.

        Raises:
            ProtocolError: a header is malformed; the reader must not be used again.
        """
        self._filled += count
        frames: list[Frame] = []
        need = self._cut(frames)
        if self._start == self._filled < len(self._buffer):
            self._start = self._filled = 0
        else:
            self._make_room(need)
        return frames

    def rest(self) -> None:
        """Nothing large is expected: give memory back, if no frame is under way."""
        if self._start == self._filled and len(self._buffer) > self.REST:
            self._buffer = bytearray(self.REST)
            self._start = self._filled = 0

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """As :meth:`advance`, copying ``data`` in first."""
        frames: list[Frame] = []
        view = memoryview(data)
        while view:
            space = self.space()
            count = min(len(space), len(view))
            space[:count] = view[:count]
            space.release()
            frames += self.advance(count)
            view = view[count:]
        return frames

    def _cut(self, frames: list[Frame]) -> int:
        """Take whole frames off the front; the size of the frame that is not whole (at least a header)."""
        buffer, start, filled = self._buffer, self._start, self._filled
        need = _HEAD
        view = memoryview(buffer)
        while filled - start >= _HEAD:
            length, kind, flags, reserved, channel = HEADER.unpack_from(buffer, start)
            if length > MAX_PAYLOAD or reserved or flags & 0x70:
                raise ProtocolError(
                    f"malformed header: length {length}, kind {kind:#x}, flags {flags:#x}, reserved {reserved}",
                    kind=kind,
                    channel=channel,
                )
            need = _HEAD + length
            if filled - start < need:
                break
            payload = bytes(view[start + _HEAD : start + need])
            frames.append(tuple.__new__(Frame, (kind, flags, channel, payload)))
            start += need
            need = _HEAD
        self._start = start
        return need

    def _make_room(self, need: int) -> None:
        """See that a frame of ``need`` bytes fits: grow, or move what is left to the front."""
        left, size = self.pending, len(self._buffer)
        full = self._filled == size
        if need > size or (full and size < self.FULL):
            fresh = bytearray(min(self.FULL, max(need, 8 * size)))
            fresh[:left] = memoryview(self._buffer)[self._start : self._filled]
            self._buffer = fresh
        elif left and (full or size - self._start < need):
            self._buffer[:left] = self._buffer[self._start : self._filled]
        elif left:
            return
        self._start, self._filled = 0, left
