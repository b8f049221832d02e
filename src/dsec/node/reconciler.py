"""What runs against what is recorded, both ways: after a restart, and every now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from dsec.core.deadlines import Moment
from dsec.core.machine import LIVE, Event
from dsec.errors import DsecError, NotFound, SandboxFailed, UnknownOutcome
from dsec.model.execs import ExecInfo
from dsec.model.ids import ExecId, SandboxId
from dsec.model.journal import Draft, Phase
from dsec.model.sandbox import Flag, Level, SandboxInfo, State
from dsec.node import drafts
from dsec.node.execs import Execs
from dsec.node.handles import Handle
from dsec.node.janitor import Janitor
from dsec.node.kit import Kit
from dsec.node.lifecycle import RESIDENCE, Lifecycle
from dsec.node.reaper import end_of
from dsec.node.scratch import LABEL as SCRATCH
from dsec.node.steps import spawner_deadline
from dsec.ports.runtime import Ended, Runtime
from dsec.ports.storage import Layers

EVERY: Final = 60.0  # seconds
AT_ONCE: Final = 256  # records in one append

RESTARTED: Final = "the machine was restarted; its files were kept"

Found = dict[SandboxId, Level]


class Reconciler:
    """Compares and repairs. A runtime lists only what is ours, so nothing else is ever touched."""

    def __init__(
        self,
        runtimes: Mapping[Level, Runtime],
        layers: Layers | None,
        kit: Kit,
        lifecycle: Lifecycle,
        execs: Execs,
        janitor: Janitor,
        watch: Callable[[Handle], None],
    ) -> None:
        self._runtimes = runtimes
        self._layers = layers
        self._kit = kit
        self._lifecycle = lifecycle
        self._execs = execs
        self._janitor = janitor
        self._watch = watch
        self._left: dict[SandboxId, list[ExecId]] = {}

    async def run(self) -> None:
        """A pass now and then, for ever."""
        while True:
            await asyncio.sleep(EVERY)
            with suppress(DsecError, OSError):
                await self.compare()
                await self._kit.sandboxes.prune()

    async def compare(self) -> None:
        """One pass. What fails for one sandbox is a problem of that one only."""
        rows = {row.id: row for row in await self._kit.sandboxes.list(LIVE)}
        running, levels = await self._running()
        layers = set(await self._layers.list()) if self._layers is not None else set()
        for row in rows.values():
            if row.spec.level in levels:
                await self._alone(row.id, partial(self._row, row, running))
        for sandbox in (running.keys() | layers) - rows.keys():
            await self._alone(sandbox, partial(self._remains, sandbox, running.get(sandbox)))

    async def dormant(self) -> None:
        """After a start: of one that is recorded as hibernated the files must be there."""
        levels, after = {level for level, runtime in self._runtimes.items() if runtime.flags}, ""
        while True:
            page = await self._kit.sandboxes.page(states=(State.HIBERNATED,), after=after, limit=AT_ONCE)
            for row in page.items:
                there = row.spec.level not in levels or self._runtimes[row.spec.level].keeps(row.id)
                if not there and row.id not in self._kit.table:
                    await self._alone(row.id, partial(self._without_files, row))
            after = page.next
            if not after:
                return

    async def _without_files(self, row: SandboxInfo) -> None:
        handle = self._lifecycle.adopt(row)
        with suppress(SandboxFailed):
            await self._lifecycle.dormancy.lose(handle)

    async def _running(self) -> tuple[Found, set[Level]]:
        """What runs, and the levels that could tell. Of the others nothing is known, so nothing of theirs is touched."""
        found: Found = {}
        levels: set[Level] = set()
        for level, runtime in self._runtimes.items():
            with suppress(DsecError):
                for one in await runtime.list():
                    found[one.id] = level
                levels.add(level)
        return found, levels

    async def _alone(self, sandbox: SandboxId, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except (DsecError, OSError) as exc:
            # What could not be removed is with the janitor already; taking it twice is one.
            await self._janitor.take(sandbox, step, exc, "reconcile")

    async def _row(self, row: SandboxInfo, running: Found) -> None:
        handle = self._kit.table.find(row.id)
        if handle is not None:
            await self._held(handle, running)
        elif row.state is State.STOPPING:
            await self._lifecycle.destroy(row.id, reason=row.reason)
        elif row.state is State.PENDING:
            await self._half_made(self._lifecycle.adopt(row))
        elif row.id in running:
            await self._adopt(self._lifecycle.adopt(row))
        else:
            await self._missing(self._lifecycle.adopt(row))

    async def _held(self, handle: Handle, running: Found) -> None:
        """One that this engine made or adopted: it must run, unless something is being done to it."""
        settled = handle.info.state in (State.RUNNING, State.PAUSED) and not handle.lock.locked()
        if settled and handle.unsettled and handle.info.state is State.RUNNING:
            await self.settle(handle)
        if settled and handle.id not in running:
            listed = await handle.runtime.list()  # it may have been made after the first look
            if handle.id not in {one.id for one in listed} and handle.info.state in (
                State.RUNNING,
                State.PAUSED,
            ):
                await self._lifecycle.died(
                    handle, Ended(id=handle.id, reason="it was found not to run any more")
                )

    async def _half_made(self, handle: Handle) -> None:
        handle.failure = "the engine ended while it was being made"
        await self._lifecycle.clean(handle)

    async def _missing(self, handle: Handle) -> None:
        """It ran, and does not. What the machine's restart ended keeps its files, where they outlive that."""
        if handle.info.boot_id != self._kit.clock.now().boot_id and self._outlives(handle):
            await self._lose_execs(handle, "the machine was restarted while it ran")
            async with handle.lock:
                await self._lifecycle.dormancy.hibernate(handle, RESTARTED, event=Event.REBOOTED)
            return
        await self._lose_execs(handle, "its sandbox was lost while no engine ran")
        ended = Ended(id=handle.id, reason="it did not run any more when the engine came back")
        await self._lifecycle.died(handle, ended, Event.MISSING)

    def _outlives(self, handle: Handle) -> bool:
        """A throw-away copy, whose command nobody waits for any more, keeps nothing."""
        able = Flag.HIBERNATE in handle.info.flags and SCRATCH not in handle.info.spec.labels
        return able and handle.runtime.keeps(handle.id)

    async def _remains(self, sandbox: SandboxId, level: Level | None) -> None:
        """Runs or lies there, and is not recorded as living: end it."""
        if sandbox in self._kit.table or any(one.spare(sandbox) for one in self._runtimes.values()):
            return
        try:
            row = await self._kit.sandboxes.get(sandbox)
            if row.state in LIVE:
                return  # made since the first look
            if row.state is State.HIBERNATED:
                await self._half_dormant(row, level)
                return
        except NotFound:
            pass
        for runtime in self._runtimes.values():
            if level in (None, runtime.level):
                await runtime.destroy(sandbox)
        if self._layers is not None:
            await self._layers.discard(sandbox)
        note = Draft(chain="engine", act="sandbox.stray", phase=Phase.NOTE, payload={"sandbox": sandbox})
        await self._kit.journal.append(note)

    async def _half_dormant(self, row: SandboxInfo, level: Level | None) -> None:
        """Its files are as they should be; nothing of it may run."""
        await asyncio.sleep(0)  # there may be many
        if level is None:
            return
        listed = await self._runtimes[level].list()  # it may have ended since the first look
        if row.id in {one.id for one in listed} and row.id not in self._kit.table:
            await self._lifecycle.dormancy.finish(row)

    # Adopting

    async def _adopt(self, handle: Handle) -> None:
        now = self._kit.clock.boot()
        end = end_of(handle)
        if end and end <= now:
            await self._lifecycle.destroy(handle.id, reason="ttl")
            return
        if SCRATCH in handle.info.spec.labels:
            await self._lifecycle.destroy(handle.id, reason="nobody waits for its command any more")
            return
        paused = handle.info.state is State.PAUSED
        if Flag.PAUSE in handle.info.flags:
            await handle.runtime.freeze(handle.id, paused)  # a crash between record and act is finished here
        if end_of(handle):  # a spawner that was started meanwhile does not know it
            await handle.runtime.deadline(handle.id, spawner_deadline(handle.deadline))
        handle.oom_kills = max((await handle.runtime.metrics(handle.id)).oom_kills, 0)
        # Looked up now, while nobody can start a command: later ones are not an earlier engine's.
        self._left[handle.id] = await self._open(handle)
        handle.unsettled = True
        if paused:
            handle.paused_at, handle.frozen = await self._paused_since(handle)
        else:
            await self.settle(handle)
        self._watch(handle)

    async def _paused_since(self, handle: Handle) -> tuple[float, bool]:
        """When it was paused, in boot seconds, and whether because nobody used it: from the journal, by the wall clock."""
        now: Moment = self._kit.clock.now()
        last = await self._kit.journal.latest(handle.id, "sandbox.pause", limit=1)
        since = last[0].at if last else now.wall
        frozen = bool(last) and last[0].payload.get("cause") == RESIDENCE
        return now.boot - max(now.wall - since, 0.0), frozen

    async def settle(self, handle: Handle) -> None:
        """Find the true outcome of every command that an earlier engine left open."""
        handle.unsettled = False
        try:
            guest = await self._kit.guests.get(handle)
            known = {info.id: info for info in await guest.execs()}
        except BaseException:
            handle.unsettled = True  # the next pass tries again
            raise
        open_execs = self._left.pop(handle.id, [])
        for exec_id in open_execs:
            if exec_id in known:
                self._execs.recover(handle, known[exec_id])
            else:
                await self._unknown(
                    handle, exec_id, "its init does not know it: it was never started, or its record was lost"
                )
        for exec_id in known.keys() - set(open_execs) - handle.runs.keys():
            await self._close_known(handle, known[exec_id])

    async def _close_known(self, handle: Handle, info: ExecInfo) -> None:
        """Recorded as ended, or not ours: init need not keep it."""
        if info.exit is not None:
            await (await self._kit.guests.get(handle)).forget(info.id)

    async def _open(self, handle: Handle) -> list[ExecId]:
        """Commands without a result. Other acts that were cut off get theirs here: nobody can tell how far they came."""
        found = await self._kit.journal.unanswered(handle.id)
        lost = UnknownOutcome("the engine ended meanwhile")
        others = [
            Draft(chain=handle.id, act=one.act, phase=Phase.RESULT, ref=one.ref, payload=drafts.failure(lost))
            for one in found
            if one.act != drafts.EXEC
        ]
        for start in range(0, len(others), AT_ONCE):
            await self._kit.journal.append(*others[start : start + AT_ONCE])
        return [ExecId(one.ref) for one in found if one.act == drafts.EXEC]

    async def _lose_execs(self, handle: Handle, why: str) -> None:
        for exec_id in await self._open(handle):
            await self._unknown(handle, exec_id, why)

    async def _unknown(self, handle: Handle, exec_id: ExecId, why: str) -> None:
        await self._kit.journal.append(drafts.exec_failure(handle.id, exec_id, UnknownOutcome(why)))
