"""One engine for all sandboxes of an evaluation, opened by the first task that starts and closed by the last that ends."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from dsec import AsyncDsec
from dsec.errors import Conflict, Unsupported


@dataclass(slots=True)
class _Shared:
    dsec: AsyncDsec
    tasks: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Engines:
    """The engine of each event loop. Keyed weakly: a loop that ends without its clean-up takes its engine along."""

    def __init__(self) -> None:
        self._shared: MutableMapping[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    async def acquire(self) -> AsyncDsec:
        """The engine of this loop, opened when it is the first task's.

        Raises:
            Unsupported: not in an asyncio event loop. Otherwise as :meth:`AsyncDsec.open`.
        """
        shared = self._shared.setdefault(_loop(), _Shared(AsyncDsec()))
        async with shared.lock:
            await shared.dsec.open()
            shared.tasks += 1
        return shared.dsec

    async def release(self) -> None:
        """One task less; with the last one the engine closes and its sandboxes end. Too often is no error."""
        shared = self._shared.get(_loop())
        if shared is None:
            return
        async with shared.lock:
            shared.tasks = max(0, shared.tasks - 1)
            if shared.tasks == 0:
                await shared.dsec.close()

    def current(self) -> AsyncDsec:
        """The open engine of this loop.  Raises: Conflict: no task has started. Unsupported: as :meth:`acquire`."""
        shared = self._shared.get(_loop())
        if shared is None or shared.tasks == 0:
            raise Conflict("no task has started the engine", hint="task_init comes before sample_init")
        return shared.dsec


def _loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise Unsupported(
            "the dsec sandbox runs on asyncio only, and this evaluation runs on another event loop",
            hint="unset INSPECT_ASYNC_BACKEND, or set it to asyncio",
        ) from None
