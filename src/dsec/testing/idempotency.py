"""Keys of requests in memory, for tests; a crash of the server is another server over the same one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from dsec.errors import Conflict
from dsec.ports.idempotency import Begun, IdempotencyStore, Recorded


class FakeIdempotency(IdempotencyStore):
    """Remembers in memory.

    Args:
        now: seconds since the epoch.

    Attributes:
        broken: raised by every method, when it is set.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._known: dict[tuple[str, str], tuple[str, Begun]] = {}
        self.broken: Exception | None = None

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    async def begin(self, project: str, key: str, request: str) -> Begun:
        self._check()
        known = self._known.get((project, key))
        if known is None:
            begun = Begun(at=self._now(), fresh=True)
            self._known[project, key] = (request, replace(begun, fresh=False))
            return begun
        if known[0] != request:
            raise Conflict("this key was given with another request", hint="a new key for a new request")
        return known[1]

    async def finish(self, project: str, key: str, answer: Recorded) -> None:
        self._check()
        request, begun = self._known[project, key]
        if begun.answer is None:
            self._known[project, key] = (request, replace(begun, answer=answer))

    async def forget(self, project: str, key: str) -> None:
        self._check()
        known = self._known.get((project, key))
        if known is not None and known[1].answer is None:
            del self._known[project, key]

    async def sweep(self, before: float, limit: int) -> int:
        self._check()
        old = [name for name, (_, begun) in self._known.items() if begun.at < before][:limit]
        for name in old:
            del self._known[name]
        return len(old)
