"""Long work ends with whoever asked for it, however he was cancelled, and holds nothing that others need."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from anyio import CapacityLimiter

from dsec.errors import Busy
from dsec.images.attended import Turns, attended, cancelled_once, threaded
from dsec.images.tools import Check
from dsec.testing.harness import until

pytestmark = pytest.mark.anyio


class Work:
    """Goes on until its check raises, which it tells."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()

    def __call__(self, check: Check) -> None:
        self.begun.set()
        try:
            while not self.ended.wait(0.001):
                check()
        finally:
            self.ended.set()


async def begun(event: threading.Event) -> None:
    await until(event.is_set)


async def by_asyncio(work: Callable[[], asyncio.Task[None]], event: threading.Event, times: int = 1) -> None:
    task = work()
    await begun(event)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_result_and_the_error_are_those_of_the_work() -> None:
    assert await attended(lambda _: 7) == 7

    def fail(_: Check) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await attended(fail)


async def test_a_thread_has_ended_when_its_caller_was_cancelled_by_asyncio() -> None:
    work = Work()
    await by_asyncio(lambda: asyncio.create_task(attended(work)), work.begun)
    assert work.ended.is_set()


async def test_a_thread_has_ended_when_its_caller_was_cancelled_by_a_scope() -> None:
    work = Work()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(attended, work)
            await begun(work.begun)
            scope.cancel()
    assert work.ended.is_set()


async def test_a_caller_who_is_cancelled_again_and_again_leaves_no_thread() -> None:
    work = Work()
    await by_asyncio(lambda: asyncio.create_task(attended(work)), work.begun, times=5)
    await begun(work.ended)


async def test_work_that_waits_for_a_thread_is_not_waited_for() -> None:
    limiter, first, second = CapacityLimiter(1), Work(), Work()
    holding = asyncio.create_task(attended(first, limiter=limiter))
    await begun(first.begun)
    waiting = asyncio.create_task(attended(second, limiter=limiter))
    await until(lambda: limiter.statistics().tasks_waiting > 0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not second.begun.is_set()
    first.ended.set()
    await holding


async def test_cleaning_up_is_not_cut_off_by_the_next_cancellation() -> None:
    cleaned = threading.Event()
    inside = threading.Event()

    async def work() -> None:
        try:
            inside.set()
            await anyio.sleep(60)
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            cleaned.set()

    await by_asyncio(lambda: asyncio.create_task(cancelled_once(work())), inside, times=4)
    await begun(cleaned)
    assert cleaned.is_set()


async def test_what_fills_in_a_thread_ends_too(tmp_path: Path) -> None:
    work = Work()
    fill = threaded(lambda _, check: work(check))

    async def filled() -> None:
        await fill(tmp_path)

    await by_asyncio(lambda: asyncio.create_task(filled()), work.begun)
    assert work.ended.is_set()


async def test_turns_are_taken_by_a_few_and_too_many_are_refused() -> None:
    turns = Turns(2, 3)
    at_once, most, gate = 0, 0, asyncio.Event()

    async def take() -> None:
        nonlocal at_once, most
        with turns.admitted():
            async with turns.turn():
                at_once += 1
                most = max(most, at_once)
                await gate.wait()
                at_once -= 1

    tasks = [asyncio.create_task(take()) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(Busy), turns.admitted():
        pass
    gate.set()
    await asyncio.gather(*tasks)
    assert most == 2
    with turns.admitted():
        pass
