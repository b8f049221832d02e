"""What a project's templates may take where many share an engine: turns to be built in, and disk for the images that they stand on.

An image counts once against each project whose templates stand on it, whoever else has it too, so that what a project holds depends on
nothing that others do. What this machine gives everybody by name (``system``, ``debian:SUITE``) counts against nobody.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Final, TypeVar

from dsec.control.template_store import TemplateStore
from dsec.core.fairshare import FairQueue
from dsec.core.quotas import BYTES_PER_MIB, Holding, Ledger
from dsec.errors import Busy
from dsec.model.built import Built
from dsec.ports.admission import QuotaSource

T = TypeVar("T")

AT_ONCE: Final = 2  # builds and imports, of all projects
QUEUE: Final = 64  # of them that may wait
RETRY_SECONDS: Final = 5.0

Weigh = Callable[[frozenset[str]], int]
"""Bytes that images take which count, by their digests. Blocking."""


class Allowance:
    """Of whoever shares with nobody: no turns, and nothing is counted."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Within, one is built or brought in.  Raises: Busy, OverQuota."""
        return nullcontext()

    async def put(self, store: TemplateStore, built: Built, tag: str) -> None:
        """Keep one.  Raises: OverQuota: nothing is kept. As :meth:`TemplateStore.put`."""
        await asyncio.to_thread(store.put, built, tag)

    async def remove(self, store: TemplateStore, reference: str) -> tuple[Built, ...]:
        """As :meth:`TemplateStore.remove`."""
        return await asyncio.to_thread(store.remove, reference)


class BuildTurns:
    """The queue of what is to be built or brought in, fair between projects.

    Args:
        quotas: the weights of projects. at_once: places. queue: how many may wait.
    """

    def __init__(self, quotas: QuotaSource, *, at_once: int = AT_ONCE, queue: int = QUEUE) -> None:
        self._quotas = quotas
        self._at_once = at_once
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(queue)
        self._running: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, project: str) -> AsyncIterator[None]:
        """Raises: Busy: no more may wait, or no more of that project."""
        await self._enter(project)
        try:
            yield
        finally:
            self._leave(project)

    async def _enter(self, project: str) -> None:
        weight = self._quotas.quota(project).share
        if self._running.total() < self._at_once and not self._queue:
            self._queue.serve(project, weight=weight)
            self._running[project] += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(project, granted, weight=weight)
        if ticket is None:
            raise self._full(project)
        try:
            await granted
        except asyncio.CancelledError:
            self._queue.remove(ticket)
            if not granted.cancelled():
                self._leave(project)
            raise

    def _leave(self, project: str) -> None:
        self._running[project] -= 1
        if not self._running[project]:
            del self._running[project]
        while self._queue and self._running.total() < self._at_once:
            ticket = self._queue.pop()
            if ticket is not None and not ticket.item.done():
                self._running[ticket.project] += 1
                ticket.item.set_result(None)
        if not self._running:
            self._queue.idle()

    def _full(self, project: str) -> Busy:
        own, all_ = self._queue.waiting(project), len(self._queue)
        return Busy(
            f"{all_} templates wait to be built, {own} of them of project {project!r}, of {self._queue.bound} that may: "
            "no more of it may wait now",
            hint=f"try again in {RETRY_SECONDS:g} s",
            reason="builds",
            retry_after=RETRY_SECONDS,
            waiting=all_,
            waiting_of_project=own,
            bound=self._queue.bound,
        )


class ImageAccounts:
    """What the templates of every project stand on, in the ledger of what projects hold.

    Args:
        weigh: what images take.
    """

    def __init__(self, ledger: Ledger, weigh: Weigh) -> None:
        self._ledger = ledger
        self._weigh = weigh
        self._mib: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._acts: set[asyncio.Task[Any]] = set()

    async def load(self, project: str, store: TemplateStore) -> None:
        """Count what is there, whatever the quota is."""
        async with self._lock(project):
            self._known(project, await asyncio.to_thread(self._taken, store))

    async def put(self, project: str, store: TemplateStore, built: Built, tag: str) -> None:
        """Keep one, where the project may have its images.  Raises: OverQuota. As :meth:`TemplateStore.put`."""
        await self._whole(self._put(project, store, built, tag))

    async def _put(self, project: str, store: TemplateStore, built: Built, tag: str) -> None:
        async with self._lock(project):
            more = await asyncio.to_thread(self._taken, store, built)
            room = self._ledger.reserve(project, self._change(project, more))
            now = more
            try:
                await asyncio.to_thread(store.put, built, tag)
            except BaseException:
                now = await asyncio.to_thread(self._taken, store)
                raise
            finally:  # no pause in between: nobody else comes to have what was reserved
                self._ledger.release(room)
                self._known(project, now)

    async def remove(self, project: str, store: TemplateStore, reference: str) -> tuple[Built, ...]:
        """As :meth:`TemplateStore.remove`; what nothing stands on any more is the project's no more."""
        return await self._whole(self._remove(project, store, reference))

    async def _remove(self, project: str, store: TemplateStore, reference: str) -> tuple[Built, ...]:
        async with self._lock(project):
            try:
                return await asyncio.to_thread(store.remove, reference)
            finally:
                self._known(project, await asyncio.to_thread(self._taken, store))

    def check(self, project: str) -> None:
        """Whether it may have any more at all: a build takes minutes.  Raises: OverQuota."""
        self._ledger.check(project, Holding(disk_mib=1))

    def _taken(self, store: TemplateStore, built: Built | None = None) -> int:
        """MiB, with one more. Blocking."""
        digests = store.images()
        if built is not None:
            digests |= {built.base_digest, *built.layers}
        return -(-self._weigh(digests) // BYTES_PER_MIB)

    def _change(self, project: str, mib: int) -> Holding:
        return Holding(disk_mib=mib - self._mib.get(project, 0))

    def _known(self, project: str, mib: int) -> None:
        self._ledger.put(project, self._change(project, mib))
        self._mib[project] = mib

    def _lock(self, project: str) -> asyncio.Lock:
        return self._locks.setdefault(project, asyncio.Lock())

    async def _whole(self, act: Coroutine[Any, Any, T]) -> T:
        """To its end, whether or not whoever asked still waits: what is counted is what is kept."""
        task = asyncio.get_running_loop().create_task(act)
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)
        return await asyncio.shield(task)


class ProjectAllowance(Allowance):
    """Of one of several projects."""

    def __init__(self, project: str, turns: BuildTurns, accounts: ImageAccounts) -> None:
        self._project = project
        self._turns = turns
        self._accounts = accounts

    def turn(self) -> AbstractAsyncContextManager[None]:
        self._accounts.check(self._project)
        return self._turns.turn(self._project)

    async def put(self, store: TemplateStore, built: Built, tag: str) -> None:
        await self._accounts.put(self._project, store, built, tag)

    async def remove(self, store: TemplateStore, reference: str) -> tuple[Built, ...]:
        return await self._accounts.remove(self._project, store, reference)
