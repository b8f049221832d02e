"""Clients that leave: work that is only for them ends with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")

PATIENT: Final = "dsec.patient"
"""In the scope of a request, where a connection puts it: call it when the body may pause for as long as it likes."""
PATIENCE: Final = 0.01  # seconds: most work is done before anybody has to look


def patient_with(request: Request) -> None:
    """Let its body pause for as long as it likes: somebody types it."""
    wait = request.scope.get(PATIENT)
    if wait is not None:
        wait()


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Do it; whoever asked leaves meanwhile: cancel it. The body has been read.

    Raises:
        ClientDisconnect: nobody is there any more.
    """
    watch = _Watch(request)
    timer = asyncio.get_running_loop().call_later(PATIENCE, watch.begin)
    try:
        return await watch.over(work)
    finally:
        timer.cancel()


async def while_sending(
    request: Request, pieces: AsyncIterator[bytes], do: Callable[[AsyncIterator[bytes]], Awaitable[T]]
) -> T:
    """As :func:`while_there`, with the body as what the work reads: who leaves before its end, or after it, has left."""
    watch = _Watch(request)

    async def watched() -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece
        except ClientDisconnect:
            watch.left()
            raise
        watch.begin()

    return await watch.over(do(watched()))


class _Watch:
    """Listens for the end of a connection, and cancels the task then."""

    def __init__(self, request: Request) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._request = request
        self._task = task
        self._listener: asyncio.Task[None] | None = None
        self.gone = False

    def begin(self) -> None:
        self._listener = asyncio.ensure_future(self._listen())

    async def over(self, work: Awaitable[T]) -> T:
        """Wait for it.  Raises: ClientDisconnect."""
        try:
            return await work
        except asyncio.CancelledError:
            if self.gone and self._task.uncancel() == 0:
                raise ClientDisconnect from None
            raise
        finally:
            if self._listener is not None:
                self._listener.cancel()

    def left(self) -> None:
        """Nobody is there any more."""
        self.gone = True
        self._task.cancel()

    async def _listen(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.left()
