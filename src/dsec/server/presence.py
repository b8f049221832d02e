"""Clients that leave: work that is only for them ends with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")

PATIENCE: Final = 0.01  # seconds: most work is done before anybody has to look


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Do it; whoever asked leaves meanwhile: cancel it. The body has been read.

    Raises:
        ClientDisconnect: nobody is there any more.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = _Watch(request, task)
    timer = asyncio.get_running_loop().call_later(PATIENCE, watch.begin)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        timer.cancel()
        watch.end()


class _Watch:
    """Listens for the end of a connection, and cancels the task then."""

    def __init__(self, request: Request, task: asyncio.Task[object]) -> None:
        self._request = request
        self._task = task
        self._listener: asyncio.Task[None] | None = None
        self.gone = False

    def begin(self) -> None:
        self._listener = asyncio.ensure_future(self._listen())

    def end(self) -> None:
        if self._listener is not None:
            self._listener.cancel()

    async def _listen(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()
