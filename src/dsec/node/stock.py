"""The ready sandboxes of an engine: which there are, whose they are, and how they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from dsec.errors import DsecError
from dsec.model.ids import SandboxId
from dsec.node.kinds import Kind, Kinds, Ready
from dsec.ports.runtime import Ended, Runtime

log: Final = logging.getLogger("dsec.pool")


class Stock:
    """Every sandbox of the pool, from the moment on at which it is made until somebody else has it or it is ended.

    Attributes:
        kinds: with the ready ones of each. claimed: those whose claimer did not take them over yet.
        hidden: those that are being made or ended. wasted: made and never used.
    """

    def __init__(self, kinds: Kinds, clock: Callable[[], float]) -> None:
        self.kinds = kinds
        self._clock = clock
        self.claimed: dict[SandboxId, Ready] = {}
        self.hidden: set[SandboxId] = set()
        self.wasted = 0
        self._ready: dict[SandboxId, Ready] = {}
        self._jobs: set[asyncio.Task[None]] = set()

    def add(self, one: Ready) -> None:
        """It is ready."""
        one.kind.ready.append(one)
        self._ready[one.id] = one

    def take(self, kind: Kind) -> Ready:
        """The oldest that is ready, which is no longer.  Raises: IndexError: there is none."""
        one = kind.ready.popleft()
        del self._ready[one.id]
        return one

    def all(self) -> tuple[Ready, ...]:
        """Those that are ready."""
        return tuple(self._ready.values())

    def spare(self, sandbox: SandboxId) -> bool:
        """Whether it is nobody's yet, or was nobody's and is being ended."""
        if sandbox in self._ready or sandbox in self.hidden:
            return True
        one = self.claimed.get(sandbox)
        return one is not None and not one.taken

    # Ending

    def waste(self, one: Ready) -> None:
        """End one that nobody used. It is no longer among the others."""
        self.count_waste(one)
        self.later(self.end(one))

    def bad(self, one: Ready) -> None:
        """End one that died or does not answer."""
        one.kind.put_off(self._clock())
        self.waste(one)

    def count_waste(self, one: Ready) -> None:
        """It was made in vain."""
        one.kind.wasted += 1
        self.wasted += 1
        self.hidden.add(one.id)

    def empty(self, kind: Kind) -> None:
        """End all of a kind that are ready."""
        while kind.ready:
            self.waste(self.take(kind))

    def lose(self, one: Ready) -> None:
        """End one that is ready and must not be handed out. One that was claimed meanwhile is its claimer's."""
        if self._ready.pop(one.id, None) is not None:
            one.kind.ready.remove(one)
            self.bad(one)

    async def end(self, one: Ready) -> None:
        """End it.  Raises: CleanupFailed: the reconciler finds it, and tries again."""
        with suppress(DsecError, OSError):
            await one.guest.close()
        await self.discard(one.id, one.kind.runtime)

    async def discard(self, sandbox: SandboxId, runtime: Runtime) -> None:
        """End what was not made completely.  Raises: as :meth:`end`."""
        self.hidden.add(sandbox)
        try:
            await runtime.destroy(sandbox)
        finally:
            self.hidden.discard(sandbox)

    def ended(self, ended: Ended) -> bool:
        """News of a runtime: True when it was of one that nobody has yet, and nobody else needs to know."""
        one = self._ready.get(ended.id)
        if one is not None:
            self.lose(one)
            return True
        one = self.claimed.get(ended.id)
        if one is not None and not one.taken:
            one.dead = True
            return True
        return ended.id in self.hidden

    # Work in the background

    def later(self, job: Coroutine[Any, Any, None]) -> None:
        """Do it meanwhile; when it fails, that is logged."""
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("a ready sandbox could not be checked or ended: %s", task.exception())

    @property
    def busy(self) -> bool:
        """Something is being checked or ended."""
        return bool(self._jobs)

    async def settle(self) -> None:
        """Wait until nothing is being checked or ended."""
        while self._jobs:
            await asyncio.wait(set(self._jobs))
