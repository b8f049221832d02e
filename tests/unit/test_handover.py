"""What a thread makes reaches whoever waits for it, or is given back."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from dsec.handover import handed
from dsec.wiring.state import sweep

pytestmark = pytest.mark.anyio


class _Maker:
    """Makes a thing when it is let go; notes what is given back."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.back: list[str] = []

    def make(self) -> str:
        self.begun.set()
        assert self.go.wait(10)
        return "made"

    def fail(self) -> str:
        self.make()
        raise OSError("it cannot be made")


async def _begun(maker: _Maker) -> None:
    assert await asyncio.to_thread(maker.begun.wait, 10)


async def test_what_is_made_is_handed_over() -> None:
    maker = _Maker()
    maker.go.set()
    assert await handed(maker.make, maker.back.append) == "made"
    assert maker.back == []


async def test_what_fails_is_told() -> None:
    maker = _Maker()
    maker.go.set()
    with pytest.raises(OSError, match="it cannot be made"):
        await handed(maker.fail, maker.back.append)
    assert maker.back == []


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_cancelled_one_goes_on_when_all_is_given_back(cancels: int) -> None:
    maker = _Maker()
    waiting = asyncio.create_task(handed(maker.make, maker.back.append))
    await _begun(maker)
    for _ in range(cancels):
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    maker.go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert maker.back == ["made"]


async def test_a_cancelled_one_that_fails_gives_nothing_back() -> None:
    maker = _Maker()
    waiting = asyncio.create_task(handed(maker.fail, maker.back.append))
    await _begun(maker)
    waiting.cancel()
    maker.go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert maker.back == []


async def test_one_that_is_cancelled_as_it_comes_is_given_back() -> None:
    """The thread is done, and whoever waits for it has not been told yet."""
    maker = _Maker()
    maker.go.set()
    waiting = asyncio.create_task(handed(maker.make, maker.back.append))
    asyncio.get_running_loop().call_soon(lambda: maker.begun.wait(10) and time.sleep(0.05))
    asyncio.get_running_loop().call_soon(waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert maker.back == ["made"]


def test_a_directory_whose_maker_died_before_it_was_locked_is_swept(tmp_path: Path) -> None:
    old, fresh, full, named = (
        tmp_path / name for name in ("dsec-abcd_123", "dsec-bbbbbbbb", "dsec-cccccccc", "dsec-mine")
    )
    for directory in (old, fresh, full, named):
        directory.mkdir()
    (full / "file").touch()
    for directory in (old, full, named):
        os.utime(directory, (0, 0))
    sweep(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {fresh.name, full.name, named.name}
