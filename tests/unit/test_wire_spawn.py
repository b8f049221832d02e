"""The spawner's wire shapes: what is written can be read, and nothing else is believed."""

from __future__ import annotations

import contextlib
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.errors import ProtocolError
from dsec.wire import spawn
from dsec.wire.spawn import Created, CreateRequest, EndedEvent, Listed, Op

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
NAMES = st.binary(min_size=1, max_size=60).filter(lambda raw: b"\0" not in raw).map(os.fsdecode)


class _Reader:
    """A second reading of the layout in docs/reference/spawner.md."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def text(self) -> str:
        size = self.number("I")
        self.at += size
        assert self.at <= len(self.data)
        return os.fsdecode(self.data[self.at - size : self.at])

    def texts(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self.number("I")))


REQUESTS = st.builds(
    CreateRequest,
    id=NAMES,
    hostname=NAMES,
    memory=U64,
    pids=U64,
    cpu_millis=U64,
    open_files=U64,
    deadline=U64,
    writable=NAMES,
    directory=NAMES,
    read_only=st.booleans(),
    layers=st.lists(NAMES, max_size=5).map(tuple),
    volumes=st.lists(st.tuples(NAMES, st.booleans()), max_size=5).map(tuple),
)


@given(REQUESTS)
def test_create_is_laid_out_as_documented(request: CreateRequest) -> None:
    r = _Reader(request.encode())
    assert (r.text(), r.text(), r.text(), r.text()) == (
        request.id,
        request.hostname,
        request.writable,
        request.directory,
    )
    assert r.number("B") == request.read_only
    numbers = (request.memory, request.pids, request.cpu_millis, request.open_files, request.deadline)
    assert tuple(r.number("Q") for _ in numbers) == numbers
    assert r.texts() == tuple(request.layers)
    volumes = tuple((r.text(), bool(r.number("B"))) for _ in range(r.number("I")))
    assert volumes == tuple(request.volumes)
    assert r.at == len(r.data)


@given(st.sampled_from(list(Op)), U32, st.binary(max_size=200))
def test_a_request_begins_with_what_and_its_number(op: Op, seq: int, body: bytes) -> None:
    assert spawn.encode(op, seq, body) == struct.pack("<II", op, seq) + body


def test_a_request_that_is_too_long_is_not_sent() -> None:
    most = spawn.MAX_MESSAGE - 8
    assert len(spawn.encode(Op.CREATE, 1, bytes(most))) == spawn.MAX_MESSAGE
    with pytest.raises(ProtocolError):
        spawn.encode(Op.CREATE, 1, bytes(most + 1))


def _text(text: str) -> bytes:
    raw = os.fsencode(text)
    return struct.pack("<I", len(raw)) + raw


@given(U32, st.integers(1, 2**32 - 1), NAMES)
def test_a_failure_names_its_step(seq: int, errno: int, step: str) -> None:
    answer = spawn.decode(struct.pack("<II", seq, errno) + _text(step))
    assert (answer.seq, answer.errno, answer.step, answer.body) == (seq, errno, step, b"")


@given(U32, st.binary(max_size=100))
def test_a_success_carries_its_body(seq: int, body: bytes) -> None:
    answer = spawn.decode(struct.pack("<II", seq, 0) + body)
    assert (answer.seq, answer.errno, answer.body) == (seq, 0, body)


LISTED = st.builds(Listed, NAMES, st.builds(Created, U32, U32, U64, U64), U64, st.booleans())


@given(U32, st.lists(LISTED, max_size=6))
def test_a_list_comes_back(following: int, items: list[Listed]) -> None:
    body = struct.pack("<II", following, len(items))
    for item in items:
        c = item.created
        body += _text(item.id)
        body += struct.pack("<IIQQQB", c.pid, c.slot, c.oom_base, c.cpu_base, item.deadline, item.frozen)
    assert spawn.decode_list(body) == (following, tuple(items))


@given(NAMES, U32, st.booleans(), U64)
def test_an_event_comes_back(name: str, status: int, expired: bool, kills: int) -> None:
    body = _text(name) + struct.pack("<IBQ", status, expired, kills)
    wanted = EndedEvent(name, status if status < 2**31 else -1, expired, kills)
    assert spawn.decode_ended(body) == wanted


@given(U32, U32, U64, U64)
def test_what_was_created_comes_back(pid: int, slot: int, oom: int, cpu: int) -> None:
    assert spawn.decode_created(struct.pack("<IIQQ", pid, slot, oom, cpu)) == Created(pid, slot, oom, cpu)


def test_another_version_is_not_believed() -> None:
    assert spawn.decode_hello(struct.pack("<IIIi", spawn.VERSION, 42, 0, -941)) == (42, -941)
    for other in (spawn.VERSION - 1, spawn.VERSION + 1):
        with pytest.raises(ProtocolError):
            spawn.decode_hello(struct.pack("<IIIi", other, 42, 0, 0))


DECODERS = (spawn.decode, spawn.decode_hello, spawn.decode_created, spawn.decode_list, spawn.decode_ended)


@settings(max_examples=300)
@given(st.sampled_from(DECODERS), st.binary(max_size=300))
def test_noise_is_an_answer_or_a_protocol_error(decode: object, noise: bytes) -> None:
    with contextlib.suppress(ProtocolError):  # any other exception fails
        decode(noise)  # type: ignore[operator]


@given(st.lists(LISTED, min_size=1, max_size=3), st.data())
def test_a_list_that_is_cut_is_refused(items: list[Listed], data: st.DataObject) -> None:
    body = struct.pack("<II", 0, len(items))
    for item in items:
        body += _text(item.id) + struct.pack("<IIQQQB", 1, 2, 3, 4, 5, 0)
    with pytest.raises(ProtocolError):
        spawn.decode_list(body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(ProtocolError):
        spawn.decode_list(struct.pack("<II", 0, 2**32 - 1) + body[8:])
