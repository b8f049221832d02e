"""Long answers: bytes as they come, no faster than the client takes them, and no longer than it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

WRITE_SECONDS: Final = 60.0
"""For which a client may take nothing; then it is taken for gone."""


async def outflow(
    pieces: AsyncIterator[bytes], media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer that streams ``pieces``. The first is fetched here: what goes wrong before it is told as an error."""
    try:
        first = await anext(pieces, b"")
    except BaseException:
        await close(pieces)
        raise
    return Outflow(first, pieces, media_type, headers or {})


class Outflow(Response):
    """A body of unknown length, ended early with its connection when its source fails: a cut-off body cannot be taken for a whole one."""

    def __init__(
        self, first: bytes, pieces: AsyncIterator[bytes], media_type: str, headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.body = b""
        self.init_headers(headers)
        del self.headers["content-length"]
        self._first = first
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. The request's body has been read."""
        await while_connected(receive, self._flow(send))

    async def _flow(self, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            await put(send, self._first)
            async for piece in self._pieces:
                await put(send, piece)
            await put(send, b"", more=False)
        finally:
            await close(self._pieces)


async def put(send: Send, body: bytes, *, more: bool = True) -> None:
    """Raises: TimeoutError: the client takes nothing."""
    async with asyncio.timeout(WRITE_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do it until it is done, or the client has gone; then it is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait((task, gone))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def ending(pieces: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Let a source end with whoever reads it."""
    try:
        yield pieces
    finally:
        await close(pieces)


async def close(pieces: AsyncIterator[Any]) -> None:
    """Let the source of an answer end now and not when it is collected."""
    if isinstance(pieces, AsyncGenerator):
        with suppress(RuntimeError):  # it is ending already
            await pieces.aclose()
