"""Snapshots, forks and rollbacks: files of a sandbox as they were at one moment, and what is made of them.

A sandbox stands still only while its layer is copied, which is a change of metadata: whatever it has written is written out before, while
it still runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Final
from uuid import uuid4

from dsec.errors import BadRequest, CleanupFailed, Conflict, DsecError, FileProblem, NotFound, Unsupported
from dsec.failpoints import reach
from dsec.model.files import FileType, Identity, WriteOptions
from dsec.model.ids import SandboxId, SnapshotId, is_snapshot, new_sandbox_id, new_snapshot_id
from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import (
    MIB,
    ROOT_UID,
    SandboxInfo,
    SandboxSpec,
    State,
)
from dsec.model.snapshots import MOST_CHILDREN, Fork, SnapshotInfo, SnapshotKind
from dsec.node.copies import Copies
from dsec.node.handles import Handle, refusal
from dsec.node.kinship import FORK_LABEL, check_same, child_of
from dsec.node.kit import Kit
from dsec.node.lifecycle import Lifecycle
from dsec.node.work import ignore, settled
from dsec.ports.engine import Arrivals, Changes, SnapshotService
from dsec.ports.journal import SnapshotRecords
from dsec.ports.storage import Fill, Snapshots

TAKE: Final = "sandbox.snapshot"
REMOVE: Final = "snapshot.remove"
FORK: Final = "sandbox.fork"
IMPORT: Final = "snapshot.import"
ENGINE: Final = "engine"
PARTIAL: Final = "not all of the fork could be made"
MACHINE_ID: Final = "/etc/machine-id"
ROOT: Final = Identity(ROOT_UID, ROOT_UID)
AT_ONCE: Final = 8  # children that are made at the same time
Made = list[SandboxId]  # before the class, in which `list` is a method


class Snapshotting(SnapshotService, Changes, Arrivals):
    """See the module.

    Args:
        store: where layers are kept; None: no level here has layers.
    """

    def __init__(
        self, store: Snapshots | None, records: SnapshotRecords, lifecycle: Lifecycle, kit: Kit
    ) -> None:
        self._store = store
        self._copies = Copies(store, kit)
        self._records = records
        self._lifecycle = lifecycle
        self._kit = kit
        self._read: Counter[SnapshotId] = Counter()  # by what is being made of them
        self._going: set[SnapshotId] = set()

    # Looking

    async def get(self, snapshot: SnapshotId) -> SnapshotInfo:
        return await self._records.find(snapshot)

    async def list(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        return await self._records.all(sandbox, project=project)

    # Taking

    async def take(self, sandbox: SandboxId, kind: SnapshotKind) -> SnapshotInfo:
        if kind is not SnapshotKind.FILES:
            raise Unsupported(f"kind: a snapshot of {kind} cannot be taken here", hint="kind='files'")
        handle = await self._kit.table.present(sandbox)
        store = self._copies.stored(handle.info)
        return await settled(self._kit.work.start(self._take(handle, store, kind)), ignore)

    async def _take(self, handle: Handle, store: Snapshots, kind: SnapshotKind) -> SnapshotInfo:
        snapshot = new_snapshot_id()
        with self._kit.table.using(handle):
            reach("snapshot.begin")
            await self._copies.say(handle.id, TAKE, Phase.INTENT, snapshot)
            reach("snapshot.recorded")
            try:
                paused = await self._copies.copy(handle, store, snapshot)
                reach("snapshot.taken")
                await store.secure()
                reach("snapshot.secured")
                info = SnapshotInfo(
                    id=snapshot,
                    sandbox=handle.id,
                    kind=kind,
                    spec=handle.info.spec,
                    created_at=self._kit.clock.now().wall,
                    paused=paused,
                )
                facts: dict[str, Json] = {"outcome": "ok", "paused": round(paused, 6)}
                await self._records.keep(
                    info,
                    Draft(chain=handle.id, act=TAKE, phase=Phase.RESULT, ref=snapshot, payload=facts),
                )
                reach("snapshot.done")
            except Exception as error:
                with suppress(DsecError, OSError):  # what cannot be removed now is found by the next engine
                    await store.drop(snapshot)
                await self._copies.failed(handle.id, TAKE, snapshot, error)
                raise
        return info

    # Making sandboxes of them

    async def create(self, snapshot: SnapshotId, spec: SandboxSpec) -> SandboxInfo:
        found = await self._records.find(snapshot)
        check_same(found, spec)
        return await self._begin(spec, snapshot)

    async def _begin(self, spec: SandboxSpec, snapshot: SnapshotId) -> SandboxInfo:
        """A sandbox with those files, but for what says which machine it is."""
        info = await self._lifecycle.create(spec, files_of=snapshot)
        try:
            await self._renew(info.id)
        except BaseException:
            with suppress(DsecError, OSError):  # with the janitor
                await self._lifecycle.destroy(info.id, reason="it could not be made another machine")
            raise
        return info

    async def _renew(self, sandbox: SandboxId) -> None:
        """An id of the machine that programs have written is another one in every copy."""
        handle = await self._kit.table.held(sandbox)  # waking may need a turn, and this has one
        if handle.info.state is not State.RUNNING:
            raise refusal(handle.info)
        files = (await self._kit.guests.get(handle)).files
        with suppress(FileProblem):  # there is none, or it is no file
            entry = await files.stat(MACHINE_ID, who=ROOT, follow=False)
            if entry.type is FileType.FILE and entry.size > 0:
                await files.write(
                    MACHINE_ID, _one(f"{uuid4().hex}\n".encode()), who=ROOT, options=WriteOptions()
                )

    async def fork(self, sandbox: SandboxId, count: int) -> Fork:
        if not 1 <= count <= MOST_CHILDREN:
            raise BadRequest(f"count: {count} is not from 1 to {MOST_CHILDREN}")
        # Awake first: who has a turn waits for nobody who needs one.
        handle = await self._kit.table.present(sandbox)
        store = self._copies.stored(handle.info)
        with self._kit.table.using(handle):
            async with self._kit.admission.turn(handle.info.spec, count):
                forking = self._kit.work.start(self._fork(handle, store, count))
                return await settled(forking, lambda: self._kit.work.spawn(self._give_up(forking)))

    async def _give_up(self, forking: asyncio.Task[Fork]) -> None:
        """Whoever asked vanished before all were made: nobody knows their ids."""
        with suppress(DsecError, OSError):  # then none is left
            await self._end((await asyncio.shield(forking)).children, "its creator vanished")

    async def _fork(self, handle: Handle, store: Snapshots, count: int) -> Fork:
        """The copy that all begin with is nobody's: it goes when they are made."""
        origin = new_snapshot_id()
        with self._kit.table.using(handle):
            reach("fork.begin")
            await self._copies.say(handle.id, FORK, Phase.INTENT, origin, count=count)
            reach("fork.recorded")
            made: Made = []
            try:
                paused = await self._copies.copy(handle, store, origin)
                reach("fork.copied")
                await self._make_children(child_of(handle.info), origin, count, made)
                reach("fork.made")
                await self._copies.say(
                    handle.id,
                    FORK,
                    Phase.RESULT,
                    origin,
                    outcome="ok",
                    paused=round(paused, 6),
                    children=[*made[:100]],
                )
                reach("fork.done")
            except BaseException as error:
                await self._end(made, PARTIAL)
                await self._copies.failed(handle.id, FORK, origin, error)
                raise
            finally:
                with suppress(CleanupFailed):  # the next engine finds it
                    await store.drop(origin)
        return Fork(children=tuple(made), paused=paused)

    async def _make_children(self, spec: SandboxSpec, origin: SnapshotId, count: int, made: Made) -> None:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with turns:
                own = replace(spec, hostname=f"sandbox-{token_hex(4)}")  # siblings live at once
                made.append((await self._begin(own, origin)).id)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(one())
        except* DsecError as errors:
            raise errors.exceptions[0] from None

    async def _end(self, children: Sequence[SandboxId], reason: str) -> None:
        for child in children:
            with suppress(DsecError, OSError):  # with the janitor
                await self._lifecycle.destroy(child, reason=reason)

    # Going back

    async def rollback(self, sandbox: SandboxId, snapshot: SnapshotId) -> SandboxInfo:
        handle = await self._kit.table.running(sandbox)
        self._copies.stored(handle.info)
        return await settled(self._kit.work.start(self._rollback(handle, snapshot)), ignore)

    async def _rollback(self, handle: Handle, snapshot: SnapshotId) -> SandboxInfo:
        with self._kit.table.using(handle), self._reading(snapshot):
            check_same(await self._records.find(snapshot), handle.info.spec)
            return await self._lifecycle.remake(handle, snapshot)

    @contextmanager
    def _reading(self, snapshot: SnapshotId) -> Iterator[None]:
        """It is not removed within.  Raises: NotFound: it is being removed."""
        if snapshot in self._going:
            raise NotFound(f"there is no snapshot {snapshot}", snapshot=snapshot)
        self._read[snapshot] += 1
        try:
            yield
        finally:
            self._read[snapshot] -= 1
            self._read += Counter()  # without those that nobody reads

    # Taking in what was taken elsewhere

    async def adopt(self, spec: SandboxSpec, kind: SnapshotKind, fill: Fill, size: int) -> SnapshotInfo:
        """See :class:`~dsec.ports.engine.Arrivals`. What was put and not recorded is removed by the next engine."""
        if self._store is None:
            raise Unsupported(
                "snapshots: no level here can keep the files of a sandbox",
                hint="use level='container', as root",
            )
        return await settled(self._kit.work.start(self._adopt(self._store, spec, kind, fill, size)), ignore)

    async def _adopt(
        self, store: Snapshots, spec: SandboxSpec, kind: SnapshotKind, fill: Fill, size: int
    ) -> SnapshotInfo:
        least = -(-size // MIB)  # what it says of itself is its maker's word, and quotas count by it
        if least > spec.limits.disk_mib:
            spec = replace(spec, limits=replace(spec.limits, disk_mib=least))
        info = SnapshotInfo(
            id=new_snapshot_id(),
            sandbox=new_sandbox_id(),  # nobody's: its own id is another engine's
            kind=kind,
            spec=spec,
            created_at=self._kit.clock.now().wall,
            paused=0.0,
        )
        await self._copies.say(ENGINE, IMPORT, Phase.INTENT, info.id)
        try:
            await store.put(info.id, fill, size)
            await store.secure()
            facts: dict[str, Json] = {"outcome": "ok", "base": spec.base_digest, "layers": [*spec.layers]}
            await self._records.keep(
                info, Draft(chain=ENGINE, act=IMPORT, phase=Phase.RESULT, ref=info.id, payload=facts)
            )
        except Exception as error:
            with suppress(DsecError, OSError):  # what cannot be removed now is found by the next engine
                await store.drop(info.id)
            await self._copies.failed(ENGINE, IMPORT, info.id, error)
            raise
        return info

    # Looking into them

    @asynccontextmanager
    async def changes(self, of: SandboxId | SnapshotId) -> AsyncIterator[Path]:
        """See :class:`~dsec.ports.engine.Changes`. Of a sandbox: a copy that is nobody's, and goes afterwards."""
        if is_snapshot(of):
            snapshot = SnapshotId(of)
            await self._records.find(snapshot)
            if self._store is None:
                raise NotFound(f"there is no snapshot {snapshot}", snapshot=snapshot)
            with self._reading(snapshot):
                yield self._store.changes(snapshot)
            return
        handle = await self._kit.table.present(SandboxId(of))
        store, origin = self._copies.stored(handle.info), new_snapshot_id()
        copying = self._kit.work.start(self._copies.copy(handle, store, origin))
        try:
            await settled(copying, ignore)
            yield store.changes(origin)
        finally:  # however it was left: whoever looks may have been cancelled, while it was copied even
            await settled(self._kit.work.start(self._give_back(copying, store, origin)), ignore)

    async def _give_back(self, copying: asyncio.Task[float], store: Snapshots, origin: SnapshotId) -> None:
        await asyncio.wait([copying])
        with suppress(CleanupFailed):  # the next engine finds it
            await store.drop(origin)

    # Removing

    async def remove(self, snapshot: SnapshotId) -> None:
        try:
            await self._records.find(snapshot)
        except NotFound:
            if self._store is not None:  # its files, if an earlier removal left them
                await self._store.drop(snapshot)
            return
        await settled(self._kit.work.start(self._remove(snapshot)), ignore)

    async def _remove(self, snapshot: SnapshotId) -> None:
        if self._read[snapshot]:
            raise Conflict(
                f"snapshot {snapshot} is in use: a sandbox is being rolled back to it, or something is made of it",
                hint="try again",
                snapshot=snapshot,
            )
        self._going.add(snapshot)
        try:
            await self._forget(snapshot)
        finally:
            self._going.discard(snapshot)

    async def _forget(self, snapshot: SnapshotId) -> None:
        facts: dict[str, Json] = {"outcome": "ok"}
        draft = Draft(chain=ENGINE, act=REMOVE, phase=Phase.NOTE, ref=snapshot, payload=facts)
        with suppress(NotFound):  # another was faster
            await self._records.forget(snapshot, draft)
        if self._store is not None:
            await self._store.drop(snapshot)

    async def compare(self) -> None:
        """After a start: what was taken and never recorded, or recorded as removed, goes; a record without its files is told and goes;
        so do the children of a fork that was cut off.
        """
        for handle in self._kit.table:
            if FORK_LABEL in handle.info.spec.labels and await self._cut_off(handle):
                await self._end((handle.id,), PARTIAL)
        if self._store is None:
            return
        kept = {info.id for info in await self._records.all()}
        there = set(await self._store.list())
        for snapshot in there - kept:
            with suppress(CleanupFailed):  # the next engine finds it again
                await self._store.drop(snapshot)
        for snapshot in kept - there:
            facts: dict[str, Json] = {"outcome": "lost", "message": "its files are not there any more"}
            draft = Draft(chain=ENGINE, act=REMOVE, phase=Phase.NOTE, ref=snapshot, payload=facts)
            await self._records.forget(snapshot, draft)

    async def _cut_off(self, child: Handle) -> bool:
        """Whether nobody was told of it, because its engine died before its siblings were made."""
        first = await self._kit.journal.read(child.id, limit=1)
        origin = str(first[0].payload.get("files_of", "")) if first else ""
        parent = child.info.spec.labels[FORK_LABEL]
        last = await self._kit.journal.latest(parent, FORK, ref=origin, limit=1)
        return bool(last) and last[0].payload.get("outcome") != "ok"


async def _one(content: bytes) -> AsyncIterator[bytes]:
    yield content
