"""Requests to the spawner and its answers (``docs/reference/spawner.md``): pure, no I/O.

One SEQPACKET message each way. The spawner is ours and trusted, but a message of another version must not be
misread: whatever does not fit is a :class:`~dsec.errors.ProtocolError`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from dsec.errors import ProtocolError

VERSION: Final = 2
MAX_MESSAGE: Final = 65536
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<II")
_CREATED: Final = struct.Struct("<IIQQ")
_LISTED: Final = struct.Struct("<IIQQQB")
_ENDED: Final = struct.Struct("<IBQ")
_NUMBERS: Final = struct.Struct("<?5Q")
_HELLO: Final = struct.Struct("<IIIi")


class Op(IntEnum):
    """What is asked."""

    HELLO = 1
    TREE = 2
    CREATE = 3
    DESTROY = 4
    FREEZE = 5
    DEADLINE = 6
    LIST = 7
    SHUTDOWN = 8
    UNTREE = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest:
    """A sandbox to make. Descriptors travel beside it: the listener of init, then one detached mount a volume.

    Attributes:
        writable: name of the writable layer below the tree ``rw``. layers: names of attached trees, topmost first.
        directory: the sandbox's own directory (level ``process``).
        volumes: target and read-only. memory: bytes. deadline: CLOCK_BOOTTIME ns, 0 = none.
    """

    id: str
    hostname: str
    memory: int
    pids: int
    cpu_millis: int
    open_files: int
    deadline: int
    writable: str = "none"
    directory: str = "/"
    read_only: bool = False
    layers: Sequence[str] = ()
    volumes: Sequence[tuple[str, bool]] = ()

    def encode(self) -> bytes:
        """The body of ``CREATE``."""
        parts = [_bytes(self.id), _bytes(self.hostname), _bytes(self.writable), _bytes(self.directory)]
        numbers = (self.memory, self.pids, self.cpu_millis, self.open_files, self.deadline)
        parts.append(_NUMBERS.pack(self.read_only, *numbers))
        parts.append(_list(self.layers))
        parts.append(_U32.pack(len(self.volumes)))
        parts += [_bytes(target) + bytes([read_only]) for target, read_only in self.volumes]
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Created:
    """``oom_base`` and ``cpu_base`` (µs): counters that its recycled cgroup had before."""

    pid: int
    slot: int
    oom_base: int
    cpu_base: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A running sandbox, as the spawner knows it. ``deadline``: CLOCK_BOOTTIME ns."""

    id: str
    created: Created
    deadline: int
    frozen: bool


@dataclass(frozen=True, slots=True)
class EndedEvent:
    """A sandbox ended unasked. ``status`` as of wait(2), -1 unknown; ``oom_kills``: its cgroup's counter."""

    id: str
    status: int
    expired: bool
    oom_kills: int


@dataclass(frozen=True, slots=True)
class Answer:
    """``seq`` 0 is an event. ``errno`` 0 is success; otherwise ``step`` names what failed."""

    seq: int
    errno: int
    step: str
    body: bytes


def _bytes(text: str) -> bytes:
    raw = os.fsencode(text)
    return _U32.pack(len(raw)) + raw


def _list(items: Sequence[str]) -> bytes:
    return _U32.pack(len(items)) + b"".join([_bytes(item) for item in items])


def encode(op: Op, seq: int, body: bytes = b"") -> bytes:
    """One request.  Raises: ProtocolError: longer than a message may be."""
    message = _HEAD.pack(op, seq) + body
    if len(message) > MAX_MESSAGE:
        raise ProtocolError(f"a request of {len(message)} bytes does not fit {MAX_MESSAGE}")
    return message


def of_id(sandbox: str, value: int | None = None) -> bytes:
    """The body of ``DESTROY``, ``FREEZE`` (0 or 1) and ``DEADLINE`` (ns)."""
    return _bytes(sandbox) + (b"" if value is None else _U64.pack(value))


def hello() -> bytes:
    """The body of ``HELLO``."""
    return _U32.pack(VERSION)


def tree(name: str) -> bytes:
    """The body of ``TREE`` and of ``UNTREE`` (where "" is every tree but ``rw``)."""
    return _bytes(name)


def bucket(number: int) -> bytes:
    """The body of ``LIST``."""
    return _U32.pack(number)


def _take(body: bytes, at: int) -> tuple[str, int]:
    (length,) = _U32.unpack_from(body, at)
    end = at + 4 + length
    if end > len(body):
        raise ProtocolError("the spawner's message ends within a text")
    return os.fsdecode(body[at + 4 : end]), end


def decode(message: bytes) -> Answer:
    """Raises: ProtocolError."""
    try:
        seq, errno = _HEAD.unpack_from(message)
        if errno:
            return Answer(seq, errno, _take(message, _HEAD.size)[0], b"")
    except struct.error as wrong:
        raise ProtocolError(f"the spawner's message is malformed: {wrong}") from None
    return Answer(seq, 0, "", message[_HEAD.size :])


def decode_hello(body: bytes) -> tuple[int, int]:
    """The spawner's pid and the ``oom_score_adj`` that init gets.  Raises: ProtocolError."""
    try:
        version, pid, _level, oom = _HELLO.unpack(body)
    except struct.error as wrong:
        raise ProtocolError(f"the spawner's greeting is malformed: {wrong}") from None
    if version != VERSION:
        raise ProtocolError(f"the spawner speaks version {version}, we speak {VERSION}")
    return pid, oom


def decode_created(body: bytes) -> Created:
    """Raises: ProtocolError."""
    try:
        return Created(*_CREATED.unpack(body))
    except struct.error as wrong:
        raise ProtocolError(f"the answer to create is malformed: {wrong}") from None


def decode_list(body: bytes) -> tuple[int, tuple[Listed, ...]]:
    """The next bucket (0 = no more) and what is in this piece.  Raises: ProtocolError."""
    try:
        following, count = _HEAD.unpack_from(body)
        at, found = _HEAD.size, []
        for _ in range(count):
            name, at = _take(body, at)
            pid, slot, oom, cpu, deadline, frozen = _LISTED.unpack_from(body, at)
            at += _LISTED.size
            found.append(Listed(name, Created(pid, slot, oom, cpu), deadline, bool(frozen)))
    except struct.error as wrong:
        raise ProtocolError(f"the spawner's list is malformed: {wrong}") from None
    return following, tuple(found)


def decode_ended(body: bytes) -> EndedEvent:
    """Raises: ProtocolError."""
    try:
        name, at = _take(body, 0)
        status, expired, oom = _ENDED.unpack_from(body, at)
    except struct.error as wrong:
        raise ProtocolError(f"the spawner's event is malformed: {wrong}") from None
    return EndedEvent(name, status if status < 2**31 else -1, bool(expired), oom)
