"""Values across HTTP: what goes in comes out, names that are no UTF-8 included."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.errors import BadRequest
from dsec.model.execs import ExecResult
from dsec.model.files import Entry, FileEvent, FileEventKind, FileType, Listing
from dsec.model.ids import new_exec_id, new_sandbox_id
from dsec.model.sandbox import Flag, Limits, SandboxInfo, SandboxSpec, State, Volume
from dsec.wire.values import decode, encode

ODD = "odd-\udcff\udc80-ü"


def test_a_sandbox() -> None:
    spec = SandboxSpec(
        limits=Limits(memory_mib=64),
        volumes=(Volume(Path("/srv"), "/a", read_only=True), Volume("data", "/b")),
        env={"A": "ü\n"},
    )
    info = SandboxInfo(
        id=new_sandbox_id(),
        state=State.RUNNING,
        spec=spec,
        flags=frozenset({Flag.PAUSE, Flag.PTY}),
        created_at=1.5,
    )
    back = decode(SandboxInfo, encode(info))
    assert back == info
    assert [type(volume.source) for volume in back.spec.volumes] == [type(Path("/srv")), str]


def test_bytes_are_exact() -> None:
    every = bytes(range(256))
    result = ExecResult(id=new_exec_id(), exit_code=1, stdout=every, stderr=b"")
    assert decode(ExecResult, encode(result)) == result


def test_names_that_are_no_utf_8() -> None:
    entry = Entry(
        name=ODD, type=FileType.SYMLINK, mode=0o777, size=1, uid=0, gid=0, mtime_ns=2**62, target=ODD
    )
    body = encode(Listing((entry,)))
    assert body.isascii()
    assert rb"odd-\udcff" in body
    assert decode(Listing, body) == Listing((entry,))
    event = FileEvent(FileEventKind.CREATED, ODD)
    assert decode(FileEvent, encode(event)) == event


def test_values_are_checked_as_when_they_are_made() -> None:
    with pytest.raises(BadRequest, match="memory_mib"):
        decode(Limits, b'{"memory_mib": -1}')
    with pytest.raises(BadRequest):
        decode(Limits, b'{"memory_mib": "64"}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'"\\ud800',
        b'{"path":"\\udcff","kind":NaN}',
        b"[" * 100_000,
        b'["\\udcff"' + b"," * 5,
    ],
)
def test_what_is_no_json_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest, match="body"):
        decode(FileEvent, body)
