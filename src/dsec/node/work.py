"""Work that belongs to the engine and not to whoever asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

Report = Callable[[BaseException], None]


class Work:
    """Owns tasks: a caller that vanishes ends none of them. One that fails tells ``report`` and harms no other."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a job whose result somebody waits for, or not."""
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a job that nobody need wait for; its failure is reported."""
        task = self.start(job)
        task.add_done_callback(self._reported)
        return task

    def _reported(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._report(error)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # somebody may have stopped waiting; then nobody else would look at it

    async def drain(self, patience: float) -> None:
        """Wait until no job runs, ``patience`` seconds at most."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=patience)

    async def close(self) -> None:
        """Cancel what still runs, and wait for it."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(set(self._tasks), timeout=5)


async def settled(task: asyncio.Task[T], on_cancel: Callable[[], object]) -> T:
    """Wait for an owned task. When the *waiter* is cancelled, ``on_cancel`` is called and the task, unless it has just ended, goes on."""
    if not task.done():
        waiter: asyncio.Future[None] = task.get_loop().create_future()

        def wake(_: asyncio.Task[T]) -> None:
            if not waiter.done():
                waiter.set_result(None)

        task.add_done_callback(wake)
        try:
            await waiter  # `asyncio.shield` does the same with twice the callbacks
        except asyncio.CancelledError:
            task.remove_done_callback(wake)
            on_cancel()  # also of one that has just ended: nobody is told its result
            raise
    return task.result()


def ignore() -> None:
    """For work that is finished whether or not somebody waits."""


Cleanup = Callable[[], Awaitable[None]]
