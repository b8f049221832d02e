"""What the engine sends to init, one frozen class a payload; they read like the tables of the protocol's page."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from dsec.errors import ProtocolError
from dsec.model.files import BatchKind, BatchOp
from dsec.wire.frames import MAX_ARGUMENTS, MAX_ID, MAX_ITEMS, MAX_PATH, MAX_PAYLOAD, U32, VERSION, Kind
from dsec.wire.layouts import GROUPS, ID, PATH, STRINGS, Bytes, Layout, ListOf, Rest, fields_of
from dsec.wire.messages import Message


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
    LAYOUT = Layout(ID, STRINGS, STRINGS, PATH, "II", GROUPS, "IHHQQQI")
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
    parts = [U32.pack(len(items))]
    for item in items:
        parts += (U32.pack(len(item)), item)
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
                U32.pack(len(identifier)),
                identifier,
                argv.data,
                env.data,
                U32.pack(len(cwd)),
                cwd,
                _EXEC_WHO.pack(uid, gid),
                struct.pack(f"<I{len(groups)}I", len(groups), *groups) if groups else _NO_GROUPS,
                _EXEC_TAIL.pack(*tail),
            )
        )
    except (struct.error, TypeError) as wrong:
        raise ProtocolError(f"a field is out of range: {wrong}") from None


_NO_GROUPS: Final = U32.pack(0)


@dataclass(frozen=True, slots=True)
class Attach(Message):
    KIND = Kind.ATTACH
    LAYOUT = Layout(ID, "QQI")
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
    LAYOUT = Layout(ID, "IB")
    MOST = (("scope", 2),)
    id: bytes
    signo: int
    scope: int


@dataclass(frozen=True, slots=True)
class Winsize(Message):
    KIND = Kind.WINSIZE
    LAYOUT = Layout(ID, "HH")
    id: bytes
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Forget(Message):
    KIND = Kind.FORGET
    LAYOUT = Layout(ID)
    id: bytes


def encode_forget(identifier: bytes) -> bytes:
    """The payload of :class:`Forget`.  Raises: ProtocolError: not 1 to 64 bytes."""
    if not 1 <= len(identifier) <= MAX_ID:
        raise ProtocolError(f"an exec id of {len(identifier)} bytes, 1 to {MAX_ID} are allowed")
    return U32.pack(len(identifier)) + identifier


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
    LAYOUT = Layout(Bytes(MAX_PAYLOAD - 4))
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Usage(Message):
    KIND = Kind.USAGE


@dataclass(frozen=True, slots=True)
class Data(Message):
    """Raw bytes: standard input, or content of a file. Stream and end are in the frame's flags."""

    KIND = Kind.DATA
    LAYOUT = Layout(Rest())
    data: bytes


@dataclass(frozen=True, slots=True)
class Read(Message):
    KIND = Kind.READ
    LAYOUT = Layout("II", PATH, "QQI")
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
    LAYOUT = Layout("II", PATH, "II", PATH)
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
    LAYOUT = Layout("II", PATH, "I")
    uid: int
    gid: int
    path: bytes
    limit: int


@dataclass(frozen=True, slots=True)
class Stat(Message):
    KIND = Kind.STAT
    LAYOUT = Layout("II", PATH, "B")
    MOST = (("follow", 1),)
    uid: int
    gid: int
    path: bytes
    follow: int


@dataclass(frozen=True, slots=True)
class Mkdir(Message):
    KIND = Kind.MKDIR
    LAYOUT = Layout("II", PATH, "IB")
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
    LAYOUT = Layout("II", PATH, PATH, "B")
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
    LAYOUT = Layout("II", PATH, "B")
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
    LAYOUT = Layout("II", PATH, "BIIIq")
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
    LAYOUT = Layout("II", PATH, "B")
    MOST = (("recursive", 1),)
    uid: int
    gid: int
    path: bytes
    recursive: int


def _make_op(kind: int, path: bytes, mode: int, mtime_ns: int, data: bytes) -> BatchOp:
    if not 1 <= kind <= 4 or mode > 0o7777:
        raise ProtocolError(f"a batch op has kind {kind} and mode {mode:#o}")
    return BatchOp(BatchKind(kind), path, mode, mtime_ns, data)


_OPS: Final = ListOf(Layout("B", PATH, "Iq", Bytes(MAX_PAYLOAD)), _make_op, fields_of, least=21)


@dataclass(frozen=True, slots=True)
class BatchOps(Message):
    """The payload of ``BATCH``."""

    KIND = Kind.BATCH
    LAYOUT = Layout("II", PATH, _OPS)
    uid: int
    gid: int
    root: bytes
    ops: tuple[BatchOp, ...]

    FIXED: ClassVar[int] = 16
    PER_OP: ClassVar[int] = 21


@dataclass(frozen=True, slots=True)
class Tree(Message):
    KIND = Kind.TREE
    LAYOUT = Layout("II", PATH, "QII")
    uid: int
    gid: int
    path: bytes
    max_bytes: int
    max_entries: int
    credit: int
