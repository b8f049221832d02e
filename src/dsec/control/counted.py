"""Records of sandboxes, snapshots and volumes that keep the accounts of their projects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dsec.control.accounts import ACTIVE, Accounts
from dsec.control.changes import Changes
from dsec.core.quotas import DORMANT, NOTHING, Holding, Reservation, held, may_be_refused, snapshot_of, volume
from dsec.errors import BadRequest
from dsec.model.ids import SandboxId, SnapshotId
from dsec.model.journal import Draft
from dsec.model.paging import MOST_IN_PAGE, PAGE, Page
from dsec.model.sandbox import SandboxInfo, SandboxSpec, State
from dsec.model.snapshots import SnapshotInfo
from dsec.model.volumes import VolumeInfo
from dsec.ports.journal import Sandboxes, SnapshotRecords, Standing, VolumeRecords

T = TypeVar("T")


Done = Callable[[T], None]
Rooms = list[Reservation]  # before the class, in which `list` is a method


class CountedSandboxes(Sandboxes):
    """The records ``inner``, whose every change is counted."""

    def __init__(self, inner: Sandboxes, accounts: Accounts) -> None:
        self._inner = inner
        self._accounts = accounts
        self._known: set[str] = set()  # projects whose cold ones are counted
        self._missed = 0  # changes of other projects
        self._knowing = asyncio.Lock()
        self._changes = Changes()

    # Opening

    async def load(self, projects: Iterable[str]) -> None:
        """Count what is recorded, before anything changes. ``projects``: that may have cold ones; others are met later."""
        found = set(projects)
        for info in await self._inner.list(ACTIVE):
            found.add(info.spec.project)
            self._accounts.found(info)
        async for info in self._hibernated():
            found.add(info.spec.project)
            self._accounts.found(info)
        for project in sorted(found):
            await self._know(project)

    async def _hibernated(self) -> AsyncIterator[SandboxInfo]:
        after, more = "", True
        while more:
            page = await self._inner.page(states=(State.HIBERNATED,), after=after, limit=MOST_IN_PAGE)
            for info in page.items:
                yield info
            after, more = page.next, bool(page.next)

    async def _know(self, project: str) -> None:
        """Count the cold ones of a project of which nothing was heard before."""
        if project in self._known:
            return
        async with self._knowing:
            while project not in self._known:
                missed = self._missed
                counts = await self._inner.count(project)
                if missed == self._missed:  # else it may be of before or after
                    self._known.add(project)
                    self._accounts.ledger.put(project, Holding(dormant=counts.get(State.COLD, 0)))

    # Changing

    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        project = info.spec.project
        await self._know(project)
        room = self._accounts.room(project, held(info.state, info.spec))

        def done(_: None) -> None:
            self._accounts.moved(info.id, info.spec, None, info.state, room)

        await self._counted(info.id, self._inner.add(info, draft), done, [room])

    async def add_many(self, infos: Sequence[SandboxInfo], drafts: Sequence[Draft]) -> None:
        if any(info.state not in DORMANT for info in infos):
            raise BadRequest("only dormant sandboxes are added many at a time")
        if not infos:
            return
        alike = Counter([(info.spec.project, info.state, info.spec.limits) for info in infos])
        totals: dict[str, Holding] = {}
        for (project, state, limits), count in alike.items():
            await self._know(project)
            more = held(state, SandboxSpec(limits=limits)) * count
            totals[project] = totals.get(project, NOTHING) + more
        rooms: Rooms = []

        def done(_: None) -> None:
            for room in rooms:
                self._accounts.ledger.settle(room, totals[room.project])

        try:
            for project, total in totals.items():
                rooms.append(self._accounts.room(project, total))
        except BaseException:
            self._release(rooms)
            raise
        await self._counted(infos[0].id, self._inner.add_many(infos, drafts), done, rooms)

    async def move(
        self, sandbox: SandboxId, *, seen: State, to: State, draft: Draft, reason: str = ""
    ) -> SandboxInfo:
        await self._changes.earlier(sandbox)  # whose caller went away meanwhile
        room = None
        if may_be_refused(seen, to):
            spec = (await self._inner.get(sandbox)).spec
            await self._know(spec.project)
            room = self._accounts.room(spec.project, self._accounts.change(sandbox, spec, seen, to))

        def done(info: SandboxInfo) -> None:
            if info.spec.project in self._known:
                self._accounts.moved(info.id, info.spec, seen, to, room)
            else:
                self._missed += 1  # it is counted when its project is

        moving = self._inner.move(sandbox, seen=seen, to=to, draft=draft, reason=reason)
        return await self._counted(sandbox, moving, done, [] if room is None else [room])

    async def _counted(
        self, sandbox: SandboxId, change: Coroutine[Any, Any, T], done: Done[T], rooms: Rooms
    ) -> T:
        """A change that is made to its end, and counted then, whether or not its caller still waits. Of one that failed nothing is held."""
        return await self._changes.make(sandbox, change, done, lambda: self._release(rooms))

    def _release(self, rooms: Rooms) -> None:
        for room in rooms:
            self._accounts.ledger.release(room)

    async def settled(self) -> None:
        """Wait until every change that was begun is counted."""
        await self._changes.settled()

    # Looking

    async def expire_at(self, sandbox: SandboxId, at: float, draft: Draft) -> SandboxInfo:
        return await self._inner.expire_at(sandbox, at, draft)

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._inner.get(sandbox)

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        return await self._inner.list(states)

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        return await self._inner.page(states=states, project=project, after=after, limit=limit)

    async def count(self, project: str = "") -> Mapping[State, int]:
        return await self._inner.count(project)

    async def expiring(self, before: float, limit: int = 1000) -> tuple[SandboxInfo, ...]:
        return await self._inner.expiring(before, limit)

    async def standing(self) -> frozenset[Standing]:
        return await self._inner.standing()

    async def prune(self, keep: int = 10_000) -> int:
        return await self._inner.prune(keep)


class CountedVolumes(VolumeRecords):
    """The records ``inner`` of volumes, whose disk is counted."""

    def __init__(self, inner: VolumeRecords, accounts: Accounts) -> None:
        self._inner = inner
        self._accounts = accounts
        self._changes = Changes()

    async def load(self) -> None:
        """Count what is recorded, before anything changes."""
        for info in await self._inner.all():
            self._accounts.ledger.put(info.project, volume(info))

    async def keep(self, info: VolumeInfo, draft: Draft) -> None:
        ledger, room = self._accounts.ledger, self._accounts.room(info.project, volume(info))
        await self._changes.make(
            info.id,
            self._inner.keep(info, draft),
            lambda _: ledger.settle(room, volume(info)),
            lambda: ledger.release(room),
        )

    async def forget(self, project: str, name: str, draft: Draft) -> None:
        info = await self._inner.find(project, name)
        await self._changes.make(
            info.id,
            self._inner.forget(project, name, draft),
            lambda _: self._accounts.ledger.put(project, volume(info) * -1),
            _nothing,
        )

    async def find(self, project: str, name: str) -> VolumeInfo:
        return await self._inner.find(project, name)

    async def all(self, project: str | None = None) -> tuple[VolumeInfo, ...]:
        return await self._inner.all(project)


class CountedSnapshots(SnapshotRecords):
    """The records ``inner`` of snapshots, whose disk is counted: each may hold what its sandbox might."""

    def __init__(self, inner: SnapshotRecords, accounts: Accounts) -> None:
        self._inner = inner
        self._accounts = accounts
        self._changes = Changes()

    async def load(self) -> None:
        """Count what is recorded, before anything changes."""
        for info in await self._inner.all():
            self._accounts.ledger.put(info.spec.project, snapshot_of(info))

    async def keep(self, info: SnapshotInfo, draft: Draft) -> None:
        """See :class:`SnapshotRecords`.  Raises: OverQuota."""
        ledger, room = self._accounts.ledger, self._accounts.room(info.spec.project, snapshot_of(info))
        await self._changes.make(
            info.id,
            self._inner.keep(info, draft),
            lambda _: ledger.settle(room, snapshot_of(info)),
            lambda: ledger.release(room),
        )

    async def forget(self, snapshot: SnapshotId, draft: Draft) -> None:
        info = await self._inner.find(snapshot)
        await self._changes.make(
            snapshot,
            self._inner.forget(snapshot, draft),
            lambda _: self._accounts.ledger.put(info.spec.project, snapshot_of(info) * -1),
            _nothing,
        )

    async def find(self, snapshot: SnapshotId) -> SnapshotInfo:
        return await self._inner.find(snapshot)

    async def all(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        return await self._inner.all(sandbox, project=project)


def _nothing() -> None:
    """What was to go is still there."""
