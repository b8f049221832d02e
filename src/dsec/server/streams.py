"""Server-sent events: as they come, with a sign of life in between, until their end, the client's, or the server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from fastapi import Request
from starlette.responses import Response

from dsec.errors import DsecError
from dsec.server.documents import EVENTS
from dsec.server.outflow import close, outflow
from dsec.server.waits import stop_of, why_of
from dsec.wire.problems import to_body
from dsec.wire.values import encode

BEAT: Final = 15.0  # seconds
_ALIVE: Final = b": alive\n\n"
_BEGUN: Final = b": begun\n\n"
_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}


def event(kind: str, value: object, id: str = "") -> bytes:
    """One event; ``id`` comes back as ``Last-Event-ID`` from a client that connects again."""
    name = f"id: {id}\n".encode() if id else b""
    return b"%bevent: %b\ndata: %b\n\n" % (name, kind.encode(), encode(value))


async def event_stream(request: Request, events: AsyncIterator[bytes]) -> Response:
    """The answer that tells events; an error on the way is the last of them."""
    return await outflow(_told(request, events), EVENTS, _HEADERS)


async def _told(request: Request, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield _BEGUN
    try:
        async for piece in alive(events, stop_of(request), BEAT):
            yield piece
        why = why_of(request)
        if why is not None:
            yield event("error", to_body(why))
    except DsecError as error:
        yield event("error", to_body(error))


async def alive(events: AsyncIterator[bytes], stop: asyncio.Event, beat: float) -> AsyncIterator[bytes]:
    """The same, with a comment where nothing came for ``beat`` seconds; ends with ``stop``."""
    stopping = asyncio.ensure_future(stop.wait())
    coming: asyncio.Future[bytes] | None = None
    try:
        while not stopping.done():
            coming = coming or asyncio.ensure_future(anext(events))
            await asyncio.wait((coming, stopping), timeout=beat, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                done, coming = coming, None
                yield done.result()
            elif not stopping.done():
                yield _ALIVE
    except StopAsyncIteration:
        return
    finally:
        stopping.cancel()
        if coming is not None:
            coming.cancel()
            await asyncio.wait((coming,))
        await close(events)
