"""Long work that ends when nobody waits for it any more, however that comes about: asyncio's own cancellation, or a scope's.

What is cancelled twice loses what it was about to clean up. So work is given a task of its own here, which is told once that it is
not wanted, and whoever asked waits until it has ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread

from dsec.errors import Busy
from dsec.images.tools import Check, Stopped

T = TypeVar("T")
Fill = Callable[[Path], Awaitable[None]]
"""Writes what is to be kept into an empty directory."""


async def attended(work: Callable[[Check], T], *, limiter: CapacityLimiter | None = None) -> T:
    """In a thread. When the caller is cancelled, the work's next check raises, and this returns once the thread is free.

    Args:
        work: is given what it has to call again and again.
        limiter: whose threads; None = the default ones, which are for what is short or bounded elsewhere.
    """
    unwanted, begun = threading.Event(), threading.Event()

    def check() -> None:
        if unwanted.is_set():
            raise Stopped

    def run() -> T:
        begun.set()
        check()
        return work(check)

    def stop(task: asyncio.Task[T]) -> None:
        unwanted.set()
        if not begun.is_set():  # should it begin now, it ends at once
            task.cancel()

    return await _settled(to_thread.run_sync(run, limiter=limiter), stop)


async def cancelled_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled once when the caller is, however often; its cleaning up is waited for."""

    def stop(task: asyncio.Task[T]) -> None:
        task.cancel()

    return await _settled(work, stop)


async def _settled(work: Coroutine[Any, Any, T], stop: Callable[[asyncio.Task[T]], None]) -> T:
    task = asyncio.create_task(work)
    task.add_done_callback(_noted)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            stop(task)
            with CancelScope(shield=True):
                await asyncio.wait([task])
        raise


def _noted(task: asyncio.Task[Any]) -> None:
    """Whoever was cancelled does not want to hear of errors."""
    if not task.cancelled():
        task.exception()


def threaded(fill: Callable[[Path, Check], None]) -> Fill:
    """What fills a directory in a thread."""

    async def filled(tree: Path) -> None:
        await attended(lambda check: fill(tree, check))

    return filled


class Turns:
    """A few at once; others wait for their turn, without a thread; too many are refused.

    Args:
        at_once: that work. most: that work or wait.
    """

    def __init__(self, at_once: int, most: int) -> None:
        self._limiter = CapacityLimiter(at_once)
        self._most = most
        self._asked = 0

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """One of those that may come to have a turn.  Raises: Busy."""
        if self._asked >= self._most:
            raise Busy(
                f"{self._asked} builds are under way or waiting", hint="try again later", limit=self._most
            )
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One of those that work."""
        async with self._limiter:
            yield
