"""What is written in one turn of the loop is one write."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsec.server.joined import Joined

pytestmark = pytest.mark.anyio


class Kept(asyncio.Transport):
    """A transport that keeps what happened to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.seen.append(bytes(data))

    def close(self) -> None:
        self.closing = True
        self.seen.append("close")

    def abort(self) -> None:
        self.closing = True
        self.seen.append("abort")

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0


async def test_pieces_of_one_turn_go_together_and_in_order() -> None:
    inner = Kept()
    joined = Joined(inner, asyncio.get_running_loop())
    joined.write(b"head")
    joined.write(bytearray(b"body"))
    assert inner.seen == []
    assert joined.get_write_buffer_size() == 8
    await asyncio.sleep(0)
    assert inner.seen == [b"headbody"]
    joined.write(b"more")
    await asyncio.sleep(0)
    assert inner.seen == [b"headbody", b"more"]


async def test_much_is_written_at_once_so_that_it_can_be_too_much() -> None:
    inner = Kept()
    joined = Joined(inner, asyncio.get_running_loop())
    joined.write(b"head")
    joined.write(b"x" * 20_000)
    assert inner.seen == [b"head" + b"x" * 20_000]
    await asyncio.sleep(0)
    assert len(inner.seen) == 1


async def test_a_close_sends_what_was_written_before_it_and_nothing_after() -> None:
    inner = Kept()
    joined = Joined(inner, asyncio.get_running_loop())
    joined.write(b"last words")
    joined.close()
    joined.write(b"too late")
    await asyncio.sleep(0)
    assert inner.seen == [b"last words", "close"]


async def test_an_abort_sends_nothing_more() -> None:
    inner = Kept()
    joined = Joined(inner, asyncio.get_running_loop())
    joined.write(b"never")
    joined.abort()
    await asyncio.sleep(0)
    assert inner.seen == ["abort"]
