"""What init sends, one frozen class a payload."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dsec.errors import ProtocolError
from dsec.model.files import Entry
from dsec.wire.entries import ENTRY, ENTRY_LEAST, EntryPart, make_entry, split_entry
from dsec.wire.frames import MAX_PAYLOAD, Kind
from dsec.wire.layouts import ID, PATH, TEXT, Bytes, Layout, ListOf, fields_of
from dsec.wire.messages import Message


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
    LAYOUT = Layout("iB", TEXT)
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
    LAYOUT = Layout(ListOf(Layout(ID, "IBBiBqQQ"), _make_row, fields_of, least=40))
    rows: tuple[ExecRow, ...]


@dataclass(frozen=True, slots=True)
class EntryIs(Message):
    """The payload of ``ENTRY``."""

    KIND = Kind.ENTRY
    LAYOUT = Layout(EntryPart())
    entry: Entry


@dataclass(frozen=True, slots=True)
class Entries(Message):
    KIND = Kind.ENTRIES
    LAYOUT = Layout(ListOf(ENTRY, make_entry, split_entry, least=ENTRY_LEAST), "B")
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
    LAYOUT = Layout(ListOf(Layout("BB", PATH, "I"), _make_event, fields_of, least=10))
    rows: tuple[EventRow, ...]


@dataclass(frozen=True, slots=True)
class BatchDone(Message):
    KIND = Kind.BATCH_DONE
    LAYOUT = Layout("Ii", TEXT)
    done: int
    errno: int
    message: bytes


@dataclass(frozen=True, slots=True)
class Pong(Message):
    KIND = Kind.PONG
    LAYOUT = Layout(Bytes(MAX_PAYLOAD - 4))
    data: bytes


@dataclass(frozen=True, slots=True)
class UsageIs(Message):
    KIND = Kind.USAGE_IS
    LAYOUT = Layout("IIQQ")
    processes: int
    execs: int
    user_us: int
    system_us: int
