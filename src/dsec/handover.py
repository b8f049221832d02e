"""What a thread makes, handed to whoever waits for it, or given back when nobody does any more.

A thread cannot be cancelled: without this, what it makes for somebody who was cancelled meanwhile (a directory, a descriptor) has no owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


async def handed(make: Callable[[], T], back: Callable[[T], object]) -> T:
    """What ``make`` makes, in a thread.

    Args:
        back: called in a thread with what was made when we are cancelled meanwhile; the cancellation goes on when it is done.

    Raises:
        What ``make`` raises.
    """
    loop = asyncio.get_running_loop()
    making = loop.run_in_executor(None, copy_context().run, make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await _over(making)
        if not making.cancelled() and making.exception() is None:
            await _over(loop.run_in_executor(None, copy_context().run, back, making.result()))
        raise


async def _over(work: asyncio.Future[T]) -> None:
    """Wait for it, however often we are cancelled, and whatever comes of it."""
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([work])
