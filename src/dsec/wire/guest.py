"""Frames and payloads of the init protocol (``docs/reference/protocol.md``): pure, no I/O, both directions.

Each payload is one frozen class with a ``LAYOUT``, so the classes read like the tables of the page. Whatever bytes come
in, decoding returns a value or raises :class:`~dsec.errors.ProtocolError`; nothing is allocated that the bytes do not back.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Final, NamedTuple, Self

from dsec.errors import ProtocolError
from dsec.model.files import BatchKind, BatchOp, Entry, FileType, TreePiece, TreeTag

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
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
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


# --- layouts -----------------------------------------------------------------------------------------------------


class _Part:
    """One or more neighbouring fields of a payload."""

    __slots__ = ("count",)
    count: int

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        raise NotImplementedError

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        raise NotImplementedError


class _Numbers(_Part):
    """Numbers side by side, as one ``struct``."""

    __slots__ = ("_struct",)

    def __init__(self, form: str) -> None:
        self._struct = struct.Struct("<" + form)
        self.count = len(form)

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        out.append(self._struct.pack(*values))

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        out += self._struct.unpack_from(data, at)
        return at + self._struct.size


class _Bytes(_Part):
    """u32 length and that many bytes."""

    __slots__ = ("_least", "_most", "_nul")

    def __init__(self, most: int, *, least: int = 0, nul: bool = True) -> None:
        self.count = 1
        self._most, self._least, self._nul = most, least, nul

    def _check(self, value: bytes) -> None:
        if not self._least <= len(value) <= self._most:
            raise ProtocolError(f"{len(value)} bytes where {self._least} to {self._most} are allowed")
        if not self._nul and b"\0" in value:
            raise ProtocolError("a NUL byte in a path")

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        value = values[0]
        self._check(value)
        out.append(_U32.pack(len(value)))
        out.append(value)

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        at += 4
        end: int = at + _U32.unpack_from(data, at - 4)[0]
        if end > len(data):
            raise ProtocolError(f"bytes end {end - len(data)} beyond the payload")
        value = data[at:end]
        self._check(value)
        out.append(value)
        return end


class _Rest(_Part):
    """All bytes that remain, without a length."""

    __slots__ = ()

    def __init__(self) -> None:
        self.count = 1

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        out.append(values[0])

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        out.append(data[at:])
        return len(data)


class _List(_Part):
    """u32 count and the items, each of at least ``least`` bytes (so a count cannot claim more than is there)."""

    __slots__ = ("_item", "_least", "_make", "_most", "_split")

    def __init__(
        self,
        item: Layout,
        make: Callable[..., Any],
        split: Callable[[Any], Sequence[Any]],
        *,
        least: int,
        most: int = MAX_PAYLOAD,
    ) -> None:
        self.count = 1
        self._item, self._make, self._split, self._least, self._most = item, make, split, least, most

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        items = values[0]
        if len(items) > self._most:
            raise ProtocolError(f"{len(items)} items, at most {self._most}")
        out.append(_U32.pack(len(items)))
        for item in items:
            self._item.put(self._split(item), out)

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        (count,) = _U32.unpack_from(data, at)
        at += 4
        if count > self._most or count * self._least > len(data) - at:
            raise ProtocolError(f"a list claims {count} items in {len(data) - at} bytes")
        items = []
        for _ in range(count):
            fields: list[Any] = []
            at = self._item.take(data, at, fields)
            items.append(self._make(*fields))
        out.append(tuple(items))
        return at


class Layout:
    """The fields of a payload or item, in order."""

    __slots__ = ("_parts", "numbers")

    def __init__(self, *parts: _Part | str) -> None:
        self._parts = tuple(_Numbers(part) if isinstance(part, str) else part for part in parts)
        only = parts[0] if len(parts) == 1 else None if parts else ""
        self.numbers = struct.Struct("<" + only) if isinstance(only, str) else None

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        """Append the bytes of ``values``."""
        at = 0
        for part in self._parts:
            end = at + part.count
            part.put(values[at:end], out)
            at = end

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        """Append the values at ``at``; where they end."""
        for part in self._parts:
            at = part.take(data, at, out)
        return at

    def encode(self, values: Sequence[Any]) -> bytes:
        """Raises: ProtocolError: a value is out of range."""
        out: list[bytes] = []
        try:
            self.put(values, out)
        except (struct.error, TypeError) as wrong:
            raise ProtocolError(f"a field is out of range: {wrong}") from None
        return b"".join(out)

    def decode(self, data: bytes) -> Sequence[Any]:
        """All of ``data``.  Raises: ProtocolError: cut short, too long or out of range."""
        out: list[Any] = []
        try:
            end = self.take(data, 0, out)
        except struct.error:
            raise ProtocolError(f"payload of {len(data)} bytes is cut short") from None
        if end != len(data):
            raise ProtocolError(f"{len(data) - end} bytes after the end of the payload")
        return out


def _same(value: Any) -> tuple[Any]:
    return (value,)


def _fields(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__match_args__]


def _one(value: Any) -> Any:
    return value


_ID: Final = _Bytes(MAX_ID, least=1)
_PATH: Final = _Bytes(MAX_PATH, nul=False)
_STRING: Final = _Bytes(MAX_ARGUMENTS, nul=False)
_STRINGS: Final = _List(Layout(_STRING), _one, _same, least=4, most=MAX_ITEMS)
_GROUPS: Final = _List(Layout("I"), _one, _same, least=4, most=MAX_ITEMS)
_TEXT: Final = _Bytes(MAX_MESSAGE)


# --- entries -----------------------------------------------------------------------------------------------------

_TYPES: Final = (
    FileType.FILE,
    FileType.DIRECTORY,
    FileType.SYMLINK,
    FileType.FIFO,
    FileType.SOCKET,
    FileType.CHAR_DEVICE,
    FileType.BLOCK_DEVICE,
)
_NUMBER_OF: Final = {kind: number for number, kind in enumerate(_TYPES, 1)}
_ENTRY: Final = Layout(_PATH, "BIQIIqQI", _PATH)
_ENTRY_LEAST: Final = 49


def _make_entry(
    name: bytes,
    kind: int,
    mode: int,
    size: int,
    uid: int,
    gid: int,
    mtime_ns: int,
    inode: int,
    links: int,
    target: bytes,
) -> Entry:
    if not 1 <= kind <= len(_TYPES) or mode > 0o7777:
        raise ProtocolError(f"an entry has type {kind} and mode {mode:#o}")
    return Entry(
        name=os.fsdecode(name),
        type=_TYPES[kind - 1],
        mode=mode,
        size=size,
        uid=uid,
        gid=gid,
        mtime_ns=mtime_ns,
        inode=inode,
        links=links,
        target=os.fsdecode(target),
    )


def _split_entry(entry: Entry) -> tuple[Any, ...]:
    return (
        os.fsencode(entry.name),
        _NUMBER_OF[entry.type],
        entry.mode,
        entry.size,
        entry.uid,
        entry.gid,
        entry.mtime_ns,
        entry.inode,
        entry.links,
        os.fsencode(entry.target),
    )


class _EntryPart(_Part):
    """One ``entry`` as a field."""

    __slots__ = ()

    def __init__(self) -> None:
        self.count = 1

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        _ENTRY.put(_split_entry(values[0]), out)

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        fields: list[Any] = []
        at = _ENTRY.take(data, at, fields)
        out.append(_make_entry(*fields))
        return at


# --- messages ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded payload. ``MOST`` bounds fields that have fewer values than their width: without it all are allowed."""

    KIND: ClassVar[Kind]
    LAYOUT: ClassVar[Layout] = Layout()
    MOST: ClassVar[tuple[tuple[str, int], ...]] = ()

    def check(self) -> None:
        """Raises: ProtocolError: a field has a value that the page does not name."""
        for name, most in self.MOST:
            if getattr(self, name) > most:
                raise ProtocolError(f"{self.KIND.name}.{name} is {getattr(self, name)}, at most {most}")

    def encode(self) -> bytes:
        """The payload.  Raises: ProtocolError."""
        self.check()
        return self.LAYOUT.encode(_fields(self))

    def frame(self, channel: int, flags: int = 0) -> bytes:
        """The whole frame.  Raises: ProtocolError."""
        return encode_frame(self.KIND, channel, self.encode(), flags)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Raises: ProtocolError."""
        numbers = cls.LAYOUT.numbers
        if numbers is not None and len(payload) == numbers.size:
            message = cls(*numbers.unpack(payload))
        else:
            message = cls(*cls.LAYOUT.decode(payload))
        if cls.MOST:
            message.check()
        return message


@dataclass(frozen=True, slots=True)
class Hello(Message):
    KIND = Kind.HELLO
    LAYOUT = Layout("I")
    version: int = VERSION


class ExecFlag:
    """Bits of ``Exec.flags``."""

    PTY: Final = 1
    STDIN: Final = 2
    LATE: Final = 4


@dataclass(frozen=True, slots=True)
class Exec(Message):
    """Start a command; ``timeout_ms`` and ``nofile`` 0 mean none and unchanged."""

    KIND = Kind.EXEC
    LAYOUT = Layout(_ID, _STRINGS, _STRINGS, _PATH, "II", _GROUPS, "IHHQQQI")
    MOST = (("flags", 7),)
    id: bytes
    argv: tuple[bytes, ...]
    env: tuple[bytes, ...]
    cwd: bytes
    uid: int
    gid: int
    groups: tuple[int, ...]
    flags: int
    rows: int
    cols: int
    timeout_ms: int
    keep: int
    nofile: int
    credit: int

    def check(self) -> None:
        """Raises: ProtocolError: argv and env together are too long."""
        Message.check(self)
        total = sum(map(len, self.argv)) + sum(map(len, self.env))
        if total > MAX_ARGUMENTS:
            raise ProtocolError(f"argv and env have {total} bytes, at most {MAX_ARGUMENTS}")


class Packed(NamedTuple):
    """A list of strings as it travels, checked; ``size`` is what counts against :data:`MAX_ARGUMENTS`."""

    data: bytes
    size: int


def pack_strings(items: Sequence[bytes]) -> Packed:
    """Raises: ProtocolError: too many strings, too many bytes, or a NUL."""
    try:
        joined = b"".join(items)
    except TypeError as wrong:
        raise ProtocolError(f"not a list of bytes: {wrong}") from None
    if len(items) > MAX_ITEMS or len(joined) > MAX_ARGUMENTS:
        raise ProtocolError(
            f"{len(items)} strings of {len(joined)} bytes, at most {MAX_ITEMS} of {MAX_ARGUMENTS}"
        )
    if b"\0" in joined:
        raise ProtocolError("a NUL byte in a string")
    parts = [_U32.pack(len(items))]
    for item in items:
        parts += (_U32.pack(len(item)), item)
    return Packed(b"".join(parts), len(joined))


_EXEC_WHO: Final = struct.Struct("<II")
_EXEC_TAIL: Final = struct.Struct("<IHHQQQI")
_ExecTail = tuple[int, int, int, int, int, int, int]


def encode_exec(
    identifier: bytes,
    argv: Packed,
    env: Packed,
    cwd: bytes,
    who: tuple[int, int, Sequence[int]],
    tail: _ExecTail,
) -> bytes:
    """The payload of :class:`Exec`, in one join: there is one for every command.

    Args:
        who: uid, gid, groups. tail: the fields from ``flags`` on.

    Raises:
        ProtocolError: as :meth:`Exec.encode`.
    """
    uid, gid, groups = who
    if argv.size + env.size > MAX_ARGUMENTS:
        raise ProtocolError(f"argv and env have {argv.size + env.size} bytes, at most {MAX_ARGUMENTS}")
    if not 1 <= len(identifier) <= MAX_ID or len(cwd) > MAX_PATH or b"\0" in cwd or len(groups) > MAX_ITEMS:
        raise ProtocolError(
            f"an id of {len(identifier)} bytes, a cwd of {len(cwd)} and {len(groups)} groups are not allowed"
        )
    if tail[0] > 7:
        raise ProtocolError(f"EXEC.flags is {tail[0]}, at most 7")
    try:
        return b"".join(
            (
                _U32.pack(len(identifier)),
                identifier,
                argv.data,
                env.data,
                _U32.pack(len(cwd)),
                cwd,
                _EXEC_WHO.pack(uid, gid),
                struct.pack(f"<I{len(groups)}I", len(groups), *groups) if groups else _NO_GROUPS,
                _EXEC_TAIL.pack(*tail),
            )
        )
    except (struct.error, TypeError) as wrong:
        raise ProtocolError(f"a field is out of range: {wrong}") from None


_NO_GROUPS: Final = _U32.pack(0)


@dataclass(frozen=True, slots=True)
class Attach(Message):
    KIND = Kind.ATTACH
    LAYOUT = Layout(_ID, "QQI")
    id: bytes
    stdout: int
    stderr: int
    credit: int


class Scope:
    """Whom ``Signal`` reaches."""

    COMMAND: Final = 0
    GROUP: Final = 1
    TREE: Final = 2


@dataclass(frozen=True, slots=True)
class Signal(Message):
    KIND = Kind.SIGNAL
    LAYOUT = Layout(_ID, "IB")
    MOST = (("scope", 2),)
    id: bytes
    signo: int
    scope: int


@dataclass(frozen=True, slots=True)
class Winsize(Message):
    KIND = Kind.WINSIZE
    LAYOUT = Layout(_ID, "HH")
    id: bytes
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Forget(Message):
    KIND = Kind.FORGET
    LAYOUT = Layout(_ID)
    id: bytes


def encode_forget(identifier: bytes) -> bytes:
    """The payload of :class:`Forget`.  Raises: ProtocolError: not 1 to 64 bytes."""
    if not 1 <= len(identifier) <= MAX_ID:
        raise ProtocolError(f"an exec id of {len(identifier)} bytes, 1 to {MAX_ID} are allowed")
    return _U32.pack(len(identifier)) + identifier


@dataclass(frozen=True, slots=True)
class ListExecs(Message):
    KIND = Kind.LIST_EXECS


@dataclass(frozen=True, slots=True)
class Shift(Message):
    KIND = Kind.SHIFT
    LAYOUT = Layout("Q")
    ms: int


@dataclass(frozen=True, slots=True)
class Credit(Message):
    KIND = Kind.CREDIT
    LAYOUT = Layout("I")
    bytes: int


@dataclass(frozen=True, slots=True)
class Close(Message):
    KIND = Kind.CLOSE


@dataclass(frozen=True, slots=True)
class Ping(Message):
    KIND = Kind.PING
    LAYOUT = Layout(_Bytes(MAX_PAYLOAD - 4))
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Usage(Message):
    KIND = Kind.USAGE


@dataclass(frozen=True, slots=True)
class Data(Message):
    """Raw bytes: standard input, or content of a file. Stream and end are in the frame's flags."""

    KIND = Kind.DATA
    LAYOUT = Layout(_Rest())
    data: bytes


@dataclass(frozen=True, slots=True)
class Read(Message):
    KIND = Kind.READ
    LAYOUT = Layout("II", _PATH, "QQI")
    uid: int
    gid: int
    path: bytes
    offset: int
    length: int
    credit: int


class WriteFlag:
    """Bits of ``Write.flags``."""

    CREATE: Final = 1
    EXCLUSIVE: Final = 2
    APPEND: Final = 4
    PARENTS: Final = 8
    ATOMIC: Final = 16


@dataclass(frozen=True, slots=True)
class Write(Message):
    KIND = Kind.WRITE
    LAYOUT = Layout("II", _PATH, "II", _PATH)
    MOST = (
        ("mode", 0o7777),
        ("flags", 31),
    )
    uid: int
    gid: int
    path: bytes
    mode: int
    flags: int
    root: bytes


@dataclass(frozen=True, slots=True)
class List(Message):
    KIND = Kind.LIST
    LAYOUT = Layout("II", _PATH, "I")
    uid: int
    gid: int
    path: bytes
    limit: int


@dataclass(frozen=True, slots=True)
class Stat(Message):
    KIND = Kind.STAT
    LAYOUT = Layout("II", _PATH, "B")
    MOST = (("follow", 1),)
    uid: int
    gid: int
    path: bytes
    follow: int


@dataclass(frozen=True, slots=True)
class Mkdir(Message):
    KIND = Kind.MKDIR
    LAYOUT = Layout("II", _PATH, "IB")
    MOST = (
        ("mode", 0o7777),
        ("parents", 1),
    )
    uid: int
    gid: int
    path: bytes
    mode: int
    parents: int


@dataclass(frozen=True, slots=True)
class RenameTo(Message):
    """The payload of ``RENAME``."""

    KIND = Kind.RENAME
    LAYOUT = Layout("II", _PATH, _PATH, "B")
    MOST = (("replace", 1),)
    uid: int
    gid: int
    source: bytes
    target: bytes
    replace: int


@dataclass(frozen=True, slots=True)
class RemoveAt(Message):
    """The payload of ``REMOVE``."""

    KIND = Kind.REMOVE
    LAYOUT = Layout("II", _PATH, "B")
    MOST = (("recursive", 1),)
    uid: int
    gid: int
    path: bytes
    recursive: int


class AttrFlag:
    """Bits of ``SetAttrs.mask``."""

    MODE: Final = 1
    OWNER: Final = 2
    MTIME: Final = 4
    FOLLOW: Final = 8


@dataclass(frozen=True, slots=True)
class SetAttrs(Message):
    """The payload of ``SETATTR``."""

    KIND = Kind.SETATTR
    LAYOUT = Layout("II", _PATH, "BIIIq")
    MOST = (
        ("mask", 15),
        ("mode", 0o7777),
    )
    uid: int
    gid: int
    path: bytes
    mask: int
    mode: int
    owner: int
    group: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Watch(Message):
    KIND = Kind.WATCH
    LAYOUT = Layout("II", _PATH, "B")
    MOST = (("recursive", 1),)
    uid: int
    gid: int
    path: bytes
    recursive: int


def _make_op(kind: int, path: bytes, mode: int, mtime_ns: int, data: bytes) -> BatchOp:
    if not 1 <= kind <= 4 or mode > 0o7777:
        raise ProtocolError(f"a batch op has kind {kind} and mode {mode:#o}")
    return BatchOp(BatchKind(kind), path, mode, mtime_ns, data)


_OPS: Final = _List(Layout("B", _PATH, "Iq", _Bytes(MAX_PAYLOAD)), _make_op, _fields, least=21)


@dataclass(frozen=True, slots=True)
class BatchOps(Message):
    """The payload of ``BATCH``."""

    KIND = Kind.BATCH
    LAYOUT = Layout("II", _PATH, _OPS)
    uid: int
    gid: int
    root: bytes
    ops: tuple[BatchOp, ...]

    FIXED: ClassVar[int] = 16
    PER_OP: ClassVar[int] = 21


@dataclass(frozen=True, slots=True)
class Tree(Message):
    KIND = Kind.TREE
    LAYOUT = Layout("II", _PATH, "QII")
    uid: int
    gid: int
    path: bytes
    max_bytes: int
    max_entries: int
    credit: int


@dataclass(frozen=True, slots=True)
class Ok(Message):
    KIND = Kind.OK


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    KIND = Kind.WELCOME
    LAYOUT = Layout("IIII")
    version: int
    max_payload: int
    pid: int
    flags: int


class ErrorCode:
    """What ``Error.code`` adds to the errno."""

    ERRNO: Final = 0
    MALFORMED: Final = 1
    NOT_REGULAR: Final = 2
    BOUND: Final = 3
    UNKNOWN_EXEC: Final = 4


@dataclass(frozen=True, slots=True)
class Error(Message):
    KIND = Kind.ERROR
    LAYOUT = Layout("iB", _TEXT)
    MOST = (("code", 4),)
    errno: int
    code: int
    message: bytes


@dataclass(frozen=True, slots=True)
class Started(Message):
    KIND = Kind.STARTED
    LAYOUT = Layout("IQQ")
    pid: int
    stdout: int
    stderr: int


class How:
    """``ExitStatus.how``: what ``code`` means."""

    EXITED: Final = 0
    SIGNALLED: Final = 1
    NEVER_STARTED: Final = 2


@dataclass(frozen=True, slots=True)
class ExitStatus(Message):
    """The payload of ``EXIT``."""

    KIND = Kind.EXIT
    LAYOUT = Layout("BiBQQQQQQ")
    MOST = (
        ("how", 2),
        ("reason", 3),
    )
    how: int
    code: int
    reason: int
    stdout_bytes: int
    stderr_bytes: int
    user_us: int
    system_us: int
    max_rss_kib: int
    wall_ns: int


class ExitFields(NamedTuple):
    """The fields of :class:`ExitStatus`."""

    how: int
    code: int
    reason: int
    stdout_bytes: int
    stderr_bytes: int
    user_us: int
    system_us: int
    max_rss_kib: int
    wall_ns: int


_STARTED_FIELDS: Final = struct.Struct("<IQQ")
_EXIT_FIELDS: Final = struct.Struct("<BiBQQQQQQ")


def unpack_started(payload: bytes) -> tuple[int, int, int]:
    """Pid and both offsets of ``STARTED``.  Raises: ProtocolError: as :meth:`Started.decode`."""
    try:
        pid, stdout, stderr = _STARTED_FIELDS.unpack(payload)
    except struct.error:
        Started.decode(payload)
        raise
    return pid, stdout, stderr


def unpack_exit(payload: bytes) -> ExitFields:
    """The payload of ``EXIT``.  Raises: ProtocolError: as :meth:`ExitStatus.decode`."""
    try:
        fields = tuple.__new__(ExitFields, _EXIT_FIELDS.unpack(payload))
    except struct.error:
        ExitStatus.decode(payload)
        raise
    if fields.how > 2 or fields.reason > 3:
        raise ProtocolError(f"EXIT has how {fields.how} and reason {fields.reason}, at most 2 and 3")
    return fields


@dataclass(frozen=True, slots=True)
class ExecRow:
    """One line of ``Execs``; ``state`` 0 running, 1 ended; ``started_ns`` since the epoch."""

    id: bytes
    pid: int
    state: int
    how: int
    code: int
    reason: int
    started_ns: int
    stdout_bytes: int
    stderr_bytes: int


def _make_row(*fields: Any) -> ExecRow:
    row = ExecRow(*fields)
    if row.state > 1 or row.how > 2 or row.reason > 3:
        raise ProtocolError(f"an exec row has state {row.state}, how {row.how}, reason {row.reason}")
    return row


@dataclass(frozen=True, slots=True)
class Execs(Message):
    KIND = Kind.EXECS
    LAYOUT = Layout(_List(Layout(_ID, "IBBiBqQQ"), _make_row, _fields, least=40))
    rows: tuple[ExecRow, ...]


@dataclass(frozen=True, slots=True)
class EntryIs(Message):
    """The payload of ``ENTRY``."""

    KIND = Kind.ENTRY
    LAYOUT = Layout(_EntryPart())
    entry: Entry


@dataclass(frozen=True, slots=True)
class Entries(Message):
    KIND = Kind.ENTRIES
    LAYOUT = Layout(_List(_ENTRY, _make_entry, _split_entry, least=_ENTRY_LEAST), "B")
    MOST = (("truncated", 1),)
    entries: tuple[Entry, ...]
    truncated: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """One line of ``Events``."""

    what: int
    is_dir: int
    path: bytes
    cookie: int


def _make_event(*fields: Any) -> EventRow:
    row = EventRow(*fields)
    if not 1 <= row.what <= 7 or row.is_dir > 1:
        raise ProtocolError(f"an event has kind {row.what} and is_dir {row.is_dir}")
    return row


@dataclass(frozen=True, slots=True)
class Events(Message):
    KIND = Kind.EVENTS
    LAYOUT = Layout(_List(Layout("BB", _PATH, "I"), _make_event, _fields, least=10))
    rows: tuple[EventRow, ...]


@dataclass(frozen=True, slots=True)
class BatchDone(Message):
    KIND = Kind.BATCH_DONE
    LAYOUT = Layout("Ii", _TEXT)
    done: int
    errno: int
    message: bytes


@dataclass(frozen=True, slots=True)
class Pong(Message):
    KIND = Kind.PONG
    LAYOUT = Layout(_Bytes(MAX_PAYLOAD - 4))
    data: bytes


@dataclass(frozen=True, slots=True)
class UsageIs(Message):
    KIND = Kind.USAGE_IS
    LAYOUT = Layout("IIQQ")
    processes: int
    execs: int
    user_us: int
    system_us: int


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


# --- DATA --------------------------------------------------------------------------------------------------------


def encode_data(channel: int, data: bytes | memoryview, *, stream: int = 0, end: bool = False) -> bytes:
    """A ``DATA`` frame with raw bytes."""
    header = HEADER.pack(len(data), Kind.DATA, stream | (END if end else 0), 0, channel)
    return b"".join((header, data))


def encode_output(channel: int, stream: int, offset: int, data: bytes, *, end: bool = False) -> bytes:
    """A ``DATA`` frame with output of an exec."""
    return encode_frame(Kind.DATA, channel, _U64.pack(offset) + data, stream | (END if end else 0))


def split_output(payload: bytes) -> tuple[int, bytes]:
    """Offset and bytes of an exec's output.  Raises: ProtocolError."""
    if len(payload) < 8:
        raise ProtocolError(f"output frame of {len(payload)} bytes has no offset")
    return _U64.unpack_from(payload)[0], payload[8:]


# --- tree records ------------------------------------------------------------------------------------------------

_TAG_ENTRY, _TAG_CONTENT, _TAG_FILE_END, _TAG_TREE_END = 1, 2, 3, 4
_TAG_OF: Final = {TreeTag.FILE_END: _TAG_FILE_END, TreeTag.TREE_END: _TAG_TREE_END}
_MAX_ENTRY: Final = _ENTRY_LEAST + 2 * MAX_PATH


def encode_tree(piece: TreePiece) -> bytes:
    """One tree record.  Raises: ProtocolError."""
    if piece.tag is TreeTag.CONTENT:
        return bytes((_TAG_CONTENT,)) + _U32.pack(len(piece.content)) + piece.content
    if piece.tag is TreeTag.ENTRY:
        if piece.entry is None:
            raise ProtocolError("a tree entry without its entry")
        body = _ENTRY.encode(_split_entry(piece.entry))
        return bytes((_TAG_ENTRY,)) + _U32.pack(len(body)) + body
    return bytes((_TAG_OF[piece.tag], piece.status))


def check_relative(name: str) -> None:
    """Raises: ProtocolError: absolute, empty, or with an empty, ``.`` or ``..`` part."""
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise ProtocolError(f"path {name!r} is not relative without '.' and '..'", path=name)


class TreeReader:
    """Cuts the byte stream of ``TREE`` into pieces; content is handed on as it comes, never collected."""

    __slots__ = ("_buffer", "_content", "_in_file", "_started", "done")

    def __init__(self) -> None:
        self._buffer = b""
        self._content = 0
        self._in_file = False
        self._started = False
        self.done = False

    def feed(self, data: bytes) -> Iterator[TreePiece]:
        """The pieces in ``data``; consume them all before the next call.  Raises: ProtocolError."""
        view = memoryview(self._buffer + data if self._buffer else data)
        at = 0
        while at < len(view):
            if self.done:
                raise ProtocolError(f"{len(view) - at} bytes after the end of the tree")
            if self._content:
                take = min(self._content, len(view) - at)
                self._content -= take
                yield TreePiece(TreeTag.CONTENT, content=bytes(view[at : at + take]))
                at += take
                continue
            piece, used = self._record(view[at:])
            if not used:
                break
            at += used
            if piece is not None:
                yield piece
        self._buffer = bytes(view[at:])

    def _record(self, view: memoryview) -> tuple[TreePiece | None, int]:
        """One record (None for the head of content) and its size; size 0 when it is not whole yet."""
        tag = view[0]
        if tag in (_TAG_FILE_END, _TAG_TREE_END):
            return (self._end(tag, view[1]), 2) if len(view) > 1 else (None, 0)
        if tag not in (_TAG_ENTRY, _TAG_CONTENT):
            raise ProtocolError(f"tree record with tag {tag}")
        if len(view) < 5:
            return None, 0
        (length,) = _U32.unpack_from(view, 1)
        if tag == _TAG_CONTENT:
            if not self._in_file:
                raise ProtocolError("content in a tree outside a file")
            self._content = length
            return None, 5
        if length > _MAX_ENTRY:
            raise ProtocolError(f"tree entry of {length} bytes, at most {_MAX_ENTRY}")
        if len(view) < 5 + length:
            return None, 0
        return self._entry(bytes(view[5 : 5 + length])), 5 + length

    def _entry(self, body: bytes) -> TreePiece:
        if self._in_file:
            raise ProtocolError("a tree entry before the end of the file before it")
        entry = _make_entry(*_ENTRY.decode(body))
        if not self._started:
            if entry.name != ".":
                raise ProtocolError(f"a tree begins with {entry.name!r}, not '.'")
        else:
            check_relative(entry.name)
        self._started = True
        self._in_file = entry.type is FileType.FILE
        return TreePiece(TreeTag.ENTRY, entry=entry)

    def _end(self, tag: int, status: int) -> TreePiece:
        if status > 2:
            raise ProtocolError(f"end of a tree or file with status {status}")
        if tag == _TAG_FILE_END:
            if not self._in_file:
                raise ProtocolError("end of a file in a tree outside a file")
            self._in_file = False
            return TreePiece(TreeTag.FILE_END, status=status)
        if not self._started or (self._in_file and status == 0):
            raise ProtocolError("a tree ends before its root or inside a file")
        self.done = True
        return TreePiece(TreeTag.TREE_END, status=status)
