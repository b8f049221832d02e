"""EXEC is encoded by hand: it must be the bytes that its layout gives, and refuse what its layout refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.errors import BadRequest, ProtocolError
from dsec.model.execs import Command
from dsec.model.ids import new_exec_id
from dsec.runtimes.guest_exec import Requests
from dsec.wire import guest as wire

words = st.lists(st.binary(max_size=40).filter(lambda word: b"\0" not in word), max_size=6).map(tuple)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
u16 = st.integers(0, 2**16 - 1)
execs = st.builds(
    wire.Exec,
    id=st.binary(min_size=1, max_size=64),
    argv=words,
    env=words,
    cwd=st.binary(max_size=40).filter(lambda path: b"\0" not in path),
    uid=u32,
    gid=u32,
    groups=st.lists(u32, max_size=4).map(tuple),
    flags=st.integers(0, 7),
    rows=u16,
    cols=u16,
    timeout_ms=u64,
    keep=u64,
    nofile=u64,
    credit=u32,
)


def by_hand(message: wire.Exec, **changes: object) -> bytes:
    values: dict[str, object] = {name: getattr(message, name) for name in wire.Exec.__match_args__} | changes
    return wire.encode_exec(
        values["id"],  # type: ignore[arg-type]
        wire.pack_strings(values["argv"]),  # type: ignore[arg-type]
        wire.pack_strings(values["env"]),  # type: ignore[arg-type]
        values["cwd"],  # type: ignore[arg-type]
        (values["uid"], values["gid"], values["groups"]),  # type: ignore[arg-type]
        tuple(  # type: ignore[arg-type]
            values[name] for name in ("flags", "rows", "cols", "timeout_ms", "keep", "nofile", "credit")
        ),
    )


@given(execs)
def test_the_same_bytes(message: wire.Exec) -> None:
    payload = by_hand(message)
    assert payload == message.encode()
    assert wire.Exec.decode(payload) == message


SMALL = wire.Exec(b"ex", (b"a",), (), b"/", 0, 0, (), 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": b""},
        {"id": b"x" * 65},
        {"argv": (b"a\0b",)},
        {"argv": (b"x",) * 4097},
        {"argv": (b"x" * 196_609,)},
        {"argv": (b"x" * 100_000,), "env": (b"y" * 100_000,)},
        {"argv": ("text",)},
        {"cwd": b"/\0"},
        {"cwd": b"/" * 4096},
        {"uid": -1},
        {"groups": (2**32,)},
        {"groups": (0,) * 4097},
        {"flags": 8},
        {"rows": 65_536},
        {"timeout_ms": 2**64},
        {"credit": 2**32},
    ],
)
def test_the_same_refusals(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        by_hand(SMALL, **changes)
    with pytest.raises(ProtocolError):
        replace(SMALL, **changes).encode()  # type: ignore[arg-type]


def sent(requests: Requests, **more: object) -> wire.Exec:
    command = Command(id=new_exec_id(), argv=[b"true"], **more)  # type: ignore[arg-type]
    return wire.Exec.decode(requests.payload(command, 7))


def test_what_is_kept_is_what_was_given() -> None:
    requests, env = Requests(), {"A": "1"}
    assert sent(requests, env=env, cwd="/a").env == (b"A=1",)
    env["A"] = "2"  # ours keeps its own copy
    again = sent(requests, env=env, cwd="/b")
    assert (again.env, again.cwd) == ((b"A=2",), b"/b")
    big = {"A": "x" * 5000}
    assert sent(requests, env=big).env == (b"A=" + b"x" * 5000,)
    assert sent(requests, env={"A": "2"}).env == (b"A=2",)
    assert sent(requests).env == ()


def test_a_bad_name_is_refused_every_time() -> None:
    requests = Requests()
    for _ in range(2):
        with pytest.raises(BadRequest):
            sent(requests, env={"A=B": "c"})
        with pytest.raises(BadRequest):
            sent(requests, env={"A": "b\0c"})


@pytest.mark.parametrize("how", range(4))
@pytest.mark.parametrize("reason", range(5))
def test_exit_is_unpacked_as_its_layout_says(how: int, reason: int) -> None:
    message = wire.ExitStatus(0, -1, 0, 2, 3, 4, 5, 6, 2**63)
    whole = bytes((how,)) + message.encode()[1:5] + bytes((reason,)) + message.encode()[6:]
    if how > 2 or reason > 3:
        with pytest.raises(ProtocolError):
            wire.unpack_exit(whole)
        with pytest.raises(ProtocolError):
            wire.ExitStatus.decode(whole)
        return
    decoded = wire.ExitStatus.decode(whole)
    assert wire.unpack_exit(whole) == tuple(getattr(decoded, name) for name in decoded.__match_args__)


@pytest.mark.parametrize("change", [-1, 1])
def test_started_and_exit_of_another_length_are_malformed(change: int) -> None:
    started, ended = wire.Started(7, 1, 2).encode(), wire.ExitStatus(0, 0, 0, 0, 0, 0, 0, 0, 0).encode()
    assert wire.unpack_started(started) == (7, 1, 2)
    for unpack, payload in ((wire.unpack_started, started), (wire.unpack_exit, ended)):
        with pytest.raises(ProtocolError):
            unpack((payload + b"\0")[: len(payload) + change])
