"""The blocking client's way to its loop and back: values, errors, interrupts, cancellation at any moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator

import pytest

from dsec.client.sync_link import Bridge, _Crossing
from dsec.errors import Conflict


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    bridge = Bridge()
    bridge.start()
    yield bridge
    bridge.stop()


async def _value() -> int:
    await asyncio.sleep(0)
    return 7


def test_a_value_comes_back(bridge: Bridge) -> None:
    assert bridge.call(_value()) == 7


def test_an_awaitable_that_is_no_coroutine(bridge: Bridge) -> None:
    class Later:
        def __await__(self) -> Generator[object, None, int]:
            yield from asyncio.sleep(0).__await__()
            return 8

    assert bridge.call(Later()) == 8


def test_an_error_comes_back_and_nothing_is_kept(bridge: Bridge) -> None:
    async def fail() -> None:
        raise ValueError("here")

    for _ in range(2):
        with pytest.raises(ValueError, match="here"):
            bridge.call(fail())


def test_many_threads_at_once(bridge: Bridge) -> None:
    found: list[int] = []

    def ask() -> None:
        found.extend([bridge.call(_value()) for _ in range(50)])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [7] * 400


def test_not_from_its_own_loop_and_not_when_stopped(bridge: Bridge) -> None:
    async def nested() -> None:
        bridge.call(_value())

    with pytest.raises(Conflict, match="own event loop"):
        bridge.call(nested())
    bridge.stop()
    with pytest.raises(Conflict):
        bridge.call(_value())


def test_an_interrupt_cancels_the_work_and_waits_for_its_end(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            seen.append("ended")
            raise

    wait = _Crossing.wait

    def interrupted(self: _Crossing[None]) -> None:
        monkeypatch.setattr(_Crossing, "wait", wait)
        assert begun.wait(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Crossing, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bridge.call(work())
    assert seen == ["ended"]


@pytest.mark.anyio
async def test_cancelled_before_its_first_step() -> None:
    """Begin and cancel in one turn of the loop: the work never runs, and the caller is let go all the same."""
    crossing = _Crossing(asyncio.get_running_loop(), _value())
    crossing.begin()
    crossing.cancel()
    await asyncio.sleep(0.01)
    crossing.wait()
    with pytest.raises(asyncio.CancelledError):
        crossing.outcome()


@pytest.mark.anyio
async def test_cancelled_at_every_step() -> None:
    async def steps() -> AsyncIterator[int]:
        for number in range(5):
            await asyncio.sleep(0)
            yield number

    async def work() -> list[int]:
        return [number async for number in steps()]

    for turns in range(8):
        crossing = _Crossing(asyncio.get_running_loop(), work())
        crossing.begin()
        for _ in range(turns):
            await asyncio.sleep(0)
        crossing.cancel()
        await asyncio.sleep(0.01)
        await asyncio.to_thread(crossing.wait)
        try:
            assert crossing.outcome() == [0, 1, 2, 3, 4]
        except asyncio.CancelledError:
            assert turns < 7


def test_an_interrupt_when_the_wait_is_over_does_not_wait_for_ever(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waits = _Crossing.wait, []

    def wait(self: _Crossing[int]) -> None:
        real(self)
        waits.append(self)
        if len(waits) == 1:
            raise KeyboardInterrupt  # as Ctrl-C may, after the lock was had

    monkeypatch.setattr(_Crossing, "wait", wait)
    done = threading.Event()

    def ask() -> None:
        with pytest.raises(KeyboardInterrupt):
            bridge.call(_value())
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    assert done.wait(10)
    assert bridge.call(_value()) == 7


def test_an_interrupt_before_the_work_was_handed_over(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = bridge._loop
    assert loop is not None
    work = _value()
    crossing = _Crossing(loop, work)
    loop.call_soon_threadsafe(crossing.cancel)
    crossing.wait()
    with pytest.raises(asyncio.CancelledError):
        crossing.outcome()


def test_what_was_made_and_not_handed_over_is_undone(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is there, and the interrupt comes before anybody has it."""
    undone: list[int] = []
    outcome = _Crossing.outcome

    async def undo(value: int) -> None:
        await asyncio.sleep(0)
        undone.append(value)

    def interrupted(self: _Crossing[int]) -> int:
        monkeypatch.setattr(_Crossing, "outcome", outcome)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Crossing, "outcome", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bridge.make(_value(), str, undo)
    assert undone == [7]
    assert bridge.make(_value(), str, undo) == "7"
    assert undone == [7]


def test_an_error_of_the_work_undoes_nothing(bridge: Bridge) -> None:
    async def fail() -> int:
        raise ValueError("here")

    async def undo(value: object) -> None:
        raise AssertionError(value)

    with pytest.raises(ValueError, match="here"):
        bridge.make(fail(), str, undo)


def test_a_second_interrupt_leaves_and_the_undoing_goes_on(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone: list[int] = []
    go = threading.Event()
    wait, waits = _Crossing.wait, []

    async def undo(value: int) -> None:
        await asyncio.to_thread(go.wait, 5)
        undone.append(value)

    def interrupted(self: _Crossing[int]) -> None:
        waits.append(self)
        if len(waits) == 1:
            wait(self)
        if len(waits) <= 2:
            raise KeyboardInterrupt
        wait(self)

    monkeypatch.setattr(_Crossing, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bridge.make(_value(), str, undo)
    assert undone == []
    go.set()
    bridge.call(bridge.settled())  # as closing does
    assert undone == [7]
