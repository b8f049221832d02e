"""Waiting for what may take long: bounded, and over when the client leaves, its key ends, or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Final, TypeVar

from fastapi import Query, Request
from starlette.requests import HTTPConnection

from dsec.errors import DsecError
from dsec.server.presence import while_there
from dsec.server.stays import Stop

T = TypeVar("T")

LONGEST: Final = 600.0  # seconds
Timeout = Annotated[float, Query(ge=0, le=LONGEST, allow_inf_nan=False)]


def stop_of(request: Request) -> asyncio.Event:
    """Set when the server stops, or the key of the request has ended."""
    stop = request.scope["dsec.stop"]
    assert isinstance(stop, asyncio.Event)
    return stop


def why_of(request: HTTPConnection) -> DsecError | None:
    """Why its stop is set; None: the server stops, or it is not set."""
    stop = request.scope["dsec.stop"]
    return stop.why if isinstance(stop, Stop) else None


async def within(request: Request, work: Awaitable[T], seconds: float) -> T | None:
    """What it gives; None when the time is up, or the server stops, before that.  Raises: ClientDisconnect."""
    return await while_there(request, _first(work, stop_of(request), seconds))


async def _first(work: Awaitable[T], stop: asyncio.Event, seconds: float) -> T | None:
    doing = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((doing, stopping), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, stopping):
            task.cancel()
