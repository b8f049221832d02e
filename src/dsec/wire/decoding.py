"""Output and content of files, and what a frame of either direction is."""

from __future__ import annotations

from typing import Final

from dsec.errors import ProtocolError
from dsec.wire.frames import END, HEADER, U64, Frame, Kind, encode_frame
from dsec.wire.messages import Message
from dsec.wire.replies import (
    BatchDone,
    Entries,
    EntryIs,
    Error,
    Events,
    Execs,
    ExitStatus,
    Ok,
    Pong,
    Started,
    UsageIs,
    Welcome,
)
from dsec.wire.requests import (
    Attach,
    BatchOps,
    Close,
    Credit,
    Data,
    Exec,
    Forget,
    Hello,
    List,
    ListExecs,
    Mkdir,
    Ping,
    Read,
    RemoveAt,
    RenameTo,
    SetAttrs,
    Shift,
    Signal,
    Stat,
    Tree,
    Usage,
    Watch,
    Winsize,
    Write,
)


def encode_data(channel: int, data: bytes | memoryview, *, stream: int = 0, end: bool = False) -> bytes:
    """A ``DATA`` frame with raw bytes."""
    header = HEADER.pack(len(data), Kind.DATA, stream | (END if end else 0), 0, channel)
    return b"".join((header, data))


def encode_output(channel: int, stream: int, offset: int, data: bytes, *, end: bool = False) -> bytes:
    """A ``DATA`` frame with output of an exec."""
    return encode_frame(Kind.DATA, channel, U64.pack(offset) + data, stream | (END if end else 0))


def split_output(payload: bytes) -> tuple[int, bytes]:
    """Offset and bytes of an exec's output.  Raises: ProtocolError."""
    if len(payload) < 8:
        raise ProtocolError(f"output frame of {len(payload)} bytes has no offset")
    return U64.unpack_from(payload)[0], payload[8:]


_TO_INIT: Final[dict[int, type[Message]]] = {
    cls.KIND: cls
    for cls in (
        *(Hello, Exec, Attach, Signal, Winsize, Forget, ListExecs, Shift, Credit, Close, Ping, Usage, Data),
        *(Read, Write, List, Stat, Mkdir, RenameTo, RemoveAt, SetAttrs, Watch, BatchOps, Tree),
    )
}
_FROM_INIT: Final[dict[int, type[Message]]] = {
    cls.KIND: cls
    for cls in (
        *(Credit, Data, Ok, Welcome, Error, Started, ExitStatus, Execs, EntryIs, Entries, Events),
        *(BatchDone, Pong, UsageIs),
    )
}


def _decode(frame: Frame, known: dict[int, type[Message]]) -> Message:
    cls = known.get(frame.kind)
    if cls is None:
        raise ProtocolError(f"frame kind {frame.kind:#x} is unknown in this direction", kind=frame.kind)
    if frame.kind == Kind.DATA:
        if frame.stream > 2:
            raise ProtocolError(f"DATA on stream {frame.stream}, at most 2")
    elif frame.flags and not (frame.kind == Kind.ENTRIES and frame.flags == END):
        raise ProtocolError(f"flags {frame.flags:#x} on a {cls.KIND.name} frame")
    return cls.decode(frame.payload)


def decode_request(frame: Frame) -> Message:
    """What the engine sent.  Raises: ProtocolError."""
    return _decode(frame, _TO_INIT)


def decode_reply(frame: Frame) -> Message:
    """What init sent; the ``DATA`` of an exec goes through :func:`split_output` instead.  Raises: ProtocolError."""
    cls = _FROM_INIT.get(frame.kind)
    if cls is None or frame.flags:
        return _decode(frame, _FROM_INIT)
    return cls.decode(frame.payload)
