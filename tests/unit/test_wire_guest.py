"""The codec of the init protocol: what goes in comes out, and hostile bytes only ever raise ProtocolError."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.errors import ProtocolError
from dsec.model.files import BatchKind, BatchOp, Entry, FileType, TreePiece, TreeTag
from dsec.wire import guest as wire

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
i32, i64 = (st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (32, 64))
bit = st.integers(0, 1)
mode = st.integers(0, 0o7777)
ident = st.binary(min_size=1, max_size=64)
clean = st.binary(max_size=60).map(lambda value: value.replace(b"\0", b"_"))
text = clean.map(os.fsdecode)
message = st.binary(max_size=512)


def tuples(item: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(item, max_size=6).map(tuple)


entry = st.builds(
    Entry,
    name=text,
    type=st.sampled_from(FileType),
    mode=mode,
    size=u64,
    uid=u32,
    gid=u32,
    mtime_ns=i64,
    inode=u64,
    links=u32,
    target=text,
)
op = st.builds(BatchOp, st.sampled_from(BatchKind), clean, mode, i64, st.binary(max_size=80))
row = st.builds(wire.ExecRow, ident, u32, bit, st.integers(0, 2), i32, st.integers(0, 3), i64, u64, u64)
event = st.builds(wire.EventRow, st.integers(1, 7), bit, clean, u32)

REQUESTS: dict[type[wire.Message], st.SearchStrategy[wire.Message]] = {
    wire.Hello: st.builds(wire.Hello, u32),
    wire.Exec: st.builds(
        wire.Exec,
        *(ident, tuples(clean), tuples(clean), clean, u32, u32, tuples(u32), st.integers(0, 3)),
        *(u16, u16, u64, u64, u64, u32),
    ),
    wire.Attach: st.builds(wire.Attach, ident, u64, u64, u32),
    wire.Signal: st.builds(wire.Signal, ident, u32, st.integers(0, 2)),
    wire.Winsize: st.builds(wire.Winsize, ident, u16, u16),
    wire.Forget: st.builds(wire.Forget, ident),
    wire.ListExecs: st.just(wire.ListExecs()),
    wire.Shift: st.builds(wire.Shift, u64),
    wire.Credit: st.builds(wire.Credit, u32),
    wire.Close: st.just(wire.Close()),
    wire.Ping: st.builds(wire.Ping, st.binary(max_size=40)),
    wire.Usage: st.just(wire.Usage()),
    wire.Data: st.builds(wire.Data, st.binary(max_size=100)),
    wire.Read: st.builds(wire.Read, u32, u32, clean, u64, u64, u32),
    wire.Write: st.builds(wire.Write, u32, u32, clean, mode, st.integers(0, 31), clean),
    wire.List: st.builds(wire.List, u32, u32, clean, u32),
    wire.Stat: st.builds(wire.Stat, u32, u32, clean, bit),
    wire.Mkdir: st.builds(wire.Mkdir, u32, u32, clean, mode, bit),
    wire.RenameTo: st.builds(wire.RenameTo, u32, u32, clean, clean, bit),
    wire.RemoveAt: st.builds(wire.RemoveAt, u32, u32, clean, bit),
    wire.SetAttrs: st.builds(wire.SetAttrs, u32, u32, clean, st.integers(0, 15), mode, u32, u32, i64),
    wire.Watch: st.builds(wire.Watch, u32, u32, clean, bit),
    wire.BatchOps: st.builds(wire.BatchOps, u32, u32, clean, tuples(op)),
    wire.Tree: st.builds(wire.Tree, u32, u32, clean, u64, u32, u32),
}
REPLIES: dict[type[wire.Message], st.SearchStrategy[wire.Message]] = {
    wire.Credit: REQUESTS[wire.Credit],
    wire.Data: REQUESTS[wire.Data],
    wire.Ok: st.just(wire.Ok()),
    wire.Welcome: st.builds(wire.Welcome, u32, u32, u32, u32),
    wire.Error: st.builds(wire.Error, i32, st.integers(0, 4), message),
    wire.Started: st.builds(wire.Started, u32, u64, u64),
    wire.ExitStatus: st.builds(
        wire.ExitStatus, st.integers(0, 2), i32, st.integers(0, 3), u64, u64, u64, u64, u64, u64
    ),
    wire.Execs: st.builds(wire.Execs, tuples(row)),
    wire.EntryIs: st.builds(wire.EntryIs, entry),
    wire.Entries: st.builds(wire.Entries, tuples(entry), bit),
    wire.Events: st.builds(wire.Events, tuples(event)),
    wire.BatchDone: st.builds(wire.BatchDone, u32, i32, message),
    wire.Pong: st.builds(wire.Pong, st.binary(max_size=40)),
    wire.UsageIs: st.builds(wire.UsageIs, u32, u32, u64, u64),
}
request = st.one_of(*REQUESTS.values())
reply = st.one_of(*REPLIES.values())


def frames_of(data: bytes, cut: int) -> list[wire.Frame]:
    reader = wire.FrameReader()
    found = []
    for at in range(0, len(data), cut):
        found += reader.feed(data[at : at + cut])
    assert reader.pending == 0
    return found


def test_every_kind_has_a_strategy() -> None:
    kinds = {cls.KIND for cls in (*REQUESTS, *REPLIES)}
    assert kinds == set(wire.Kind)


@given(st.lists(st.tuples(request, u32), max_size=5), st.integers(1, 200))
def test_requests_come_back(sent: list[tuple[wire.Message, int]], cut: int) -> None:
    stream = b"".join(value.frame(channel) for value, channel in sent)
    got = [(wire.decode_request(frame), frame.channel) for frame in frames_of(stream, cut)]
    assert got == sent


@given(st.lists(st.tuples(reply, u32), max_size=5), st.integers(1, 200))
def test_replies_come_back(sent: list[tuple[wire.Message, int]], cut: int) -> None:
    stream = b"".join(value.frame(channel) for value, channel in sent)
    got = [(wire.decode_reply(frame), frame.channel) for frame in frames_of(stream, cut)]
    assert got == sent


@given(reply | request, st.data())
def test_a_shortened_payload_is_malformed(value: wire.Message, data: st.DataObject) -> None:
    payload = value.encode()
    if not payload or isinstance(value, wire.Data):
        return
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(ProtocolError):
        type(value).decode(payload[:cut])
    with pytest.raises(ProtocolError):
        type(value).decode(payload + b"\0")


@settings(max_examples=300)
@given(st.lists(request | reply, min_size=1, max_size=3), st.data())
def test_changed_bytes_raise_nothing_else(values: list[wire.Message], data: st.DataObject) -> None:
    stream = bytearray(b"".join(value.frame(7) for value in values))
    for _ in range(data.draw(st.integers(1, 6))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(u8)
    with suppress(ProtocolError):
        for frame in wire.FrameReader().feed(bytes(stream)):
            for decode in (wire.decode_request, wire.decode_reply):
                with suppress(ProtocolError):
                    decode(frame)


@settings(max_examples=300)
@given(st.integers(0, 255), st.binary(max_size=300), u8)
def test_any_payload_raises_nothing_else(kind: int, payload: bytes, flags: int) -> None:
    frame = wire.Frame(kind, flags, 1, payload)
    for decode in (wire.decode_request, wire.decode_reply):
        with suppress(ProtocolError):
            again = decode(frame)
            assert type(again).decode(again.encode()) == again


@pytest.mark.parametrize(
    "header",
    [
        wire.HEADER.pack(wire.MAX_PAYLOAD + 1, wire.Kind.OK, 0, 0, 1),
        wire.HEADER.pack(2**32 - 1, wire.Kind.DATA, 0, 0, 1),
        wire.HEADER.pack(0, wire.Kind.OK, 0, 1, 1),
        wire.HEADER.pack(0, wire.Kind.DATA, 0x10, 0, 1),
    ],
)
def test_bad_headers(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.FrameReader().feed(header)


def test_a_list_cannot_claim_more_than_is_there() -> None:
    with pytest.raises(ProtocolError, match="claims"):
        wire.Execs.decode((2**32 - 1).to_bytes(4, "little") + bytes(100))


def test_flags_belong_to_data_and_entries_only() -> None:
    for kind, flags in ((wire.Kind.OK, wire.END), (wire.Kind.ENTRIES, 1), (wire.Kind.DATA, 3)):
        with pytest.raises(ProtocolError):
            wire.decode_reply(wire.Frame(kind, flags, 1, wire.Entries((), 0).encode()))


def test_directions_are_kept_apart() -> None:
    with pytest.raises(ProtocolError):
        wire.decode_reply(wire.Frame(wire.Kind.HELLO, 0, 0, wire.Hello().encode()))
    with pytest.raises(ProtocolError):
        wire.decode_request(wire.Frame(wire.Kind.OK, 0, 1, b""))


def test_limits_hold_when_encoding() -> None:
    good = wire.Stat(0, 0, b"x" * wire.MAX_PATH, 0)
    assert wire.Stat.decode(good.encode()) == good
    for bad in (
        dataclasses.replace(good, path=b"x" * (wire.MAX_PATH + 1)),
        dataclasses.replace(good, path=b"a\0b"),
        dataclasses.replace(good, uid=-1),
        dataclasses.replace(good, follow=2),
    ):
        with pytest.raises(ProtocolError):
            bad.encode()
    with pytest.raises(ProtocolError):
        wire.encode_frame(wire.Kind.DATA, 1, bytes(wire.MAX_PAYLOAD + 1))


def test_the_largest_frames_pass_and_memory_goes_back() -> None:
    reader = wire.FrameReader()
    body = os.urandom(wire.MAX_PAYLOAD)
    frames = reader.feed(wire.encode_data(3, body, end=True) * 5)
    assert [frame.payload for frame in frames] == [body] * 5
    assert all(frame.end and frame.stream == 0 for frame in frames)
    reader.rest()
    assert len(reader.space()) == wire.FrameReader.REST


def test_output_has_its_offset() -> None:
    (frame,) = wire.FrameReader().feed(wire.encode_output(9, 2, 2**40, b"abc"))
    assert (frame.stream, wire.split_output(frame.payload)) == (2, (2**40, b"abc"))
    with pytest.raises(ProtocolError):
        wire.split_output(b"1234567")


# --- tree records ------------------------------------------------------------------------------------------------


def node(name: str, kind: FileType = FileType.FILE) -> TreePiece:
    return TreePiece(
        TreeTag.ENTRY, entry=Entry(name=name, type=kind, mode=0o644, size=1, uid=0, gid=0, mtime_ns=1)
    )


TREE = [
    node(".", FileType.DIRECTORY),
    node("a"),
    TreePiece(TreeTag.CONTENT, content=b"hello"),
    TreePiece(TreeTag.FILE_END),
    node("d/\udcff", FileType.SYMLINK),
    node("e"),
    TreePiece(TreeTag.FILE_END, status=2),
    TreePiece(TreeTag.TREE_END),
]


def read_tree(data: bytes, cut: int) -> list[TreePiece]:
    reader = wire.TreeReader()
    pieces: list[TreePiece] = []
    for at in range(0, len(data), cut):
        pieces += reader.feed(data[at : at + cut])
    return pieces


@given(st.integers(1, 400))
def test_trees_come_back_however_they_are_cut(cut: int) -> None:
    pieces = read_tree(b"".join(map(wire.encode_tree, TREE)), cut)
    content = b"".join(piece.content for piece in pieces)
    assert content == b"hello"
    assert [piece for piece in pieces if piece.tag is not TreeTag.CONTENT] == [
        piece for piece in TREE if piece.tag is not TreeTag.CONTENT
    ]


@settings(max_examples=200)
@given(st.integers(1, 60), st.data())
def test_changed_trees_raise_nothing_else(cut: int, data: st.DataObject) -> None:
    stream = bytearray(b"".join(map(wire.encode_tree, TREE)))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(u8)
    with suppress(ProtocolError):
        read_tree(bytes(stream), cut)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../b", "a//b", "", "a/", "./a", "."])
def test_tree_names_stay_below_the_root(name: str) -> None:
    with pytest.raises(ProtocolError):
        read_tree(wire.encode_tree(TREE[0]) + wire.encode_tree(node(name)), 10_000)


@pytest.mark.parametrize(
    "pieces",
    [
        [TREE[1]],
        [TREE[0], TREE[2]],
        [TREE[0], TREE[3]],
        [TREE[0], TREE[1], TREE[1]],
        [TREE[0], TREE[1], TREE[7]],
        [TREE[7]],
        [TREE[0], TREE[7], TREE[7]],
        [TREE[0], TreePiece(TreeTag.TREE_END, status=3)],
    ],
)
def test_tree_records_out_of_place(pieces: list[TreePiece]) -> None:
    with pytest.raises(ProtocolError):
        read_tree(b"".join(map(wire.encode_tree, pieces)), 10_000)
