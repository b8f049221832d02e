"""Create, pause, resume, destroy: each step is recorded in the transaction that changes the state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from dsec.core.deadlines import Moment, deadline_boot, expiry_wall
from dsec.core.machine import Command, Event, decide
from dsec.errors import (
    Conflict,
    DsecError,
    IsolationUnavailable,
    RuntimeUnavailable,
    StorageFull,
    UnknownOutcome,
    Unsupported,
)
from dsec.model.checks import check_seconds
from dsec.model.ids import SandboxId, SnapshotId, new_sandbox_id, new_session_id
from dsec.model.journal import Draft, Json, Phase
from dsec.model.paging import PAGE, Page
from dsec.model.sandbox import BASE, Flag, Level, SandboxInfo, SandboxSpec, State
from dsec.node import drafts
from dsec.node.claims import Claims
from dsec.node.handles import Handle
from dsec.node.janitor import Janitor
from dsec.node.kit import Kit
from dsec.node.work import ignore, settled
from dsec.ports.engine import SandboxService
from dsec.ports.runtime import Ended, Plan, Runtime

OK: Final[Mapping[str, Json]] = MappingProxyType({"outcome": "ok"})
NOTHING: Final[Mapping[str, Json]] = MappingProxyType({})
ROLLBACK: Final = "sandbox.rollback"
TRIES: Final = 8
GRACE: Final = (
    1.0  # seconds after its deadline at which the spawner ends a sandbox that the engine did not end
)
RECORD_PATIENCE: Final = 5.0  # seconds for commands in flight to record how they were cut off

Watch = Callable[[Handle], None]
Source = SandboxId | SnapshotId


class Lifecycle(SandboxService):
    """The lives of all sandboxes."""

    def __init__(
        self,
        runtimes: Mapping[Level, Runtime],
        kit: Kit,
        janitor: Janitor,
        watch: Watch,
        claims: Claims,
    ) -> None:
        self._runtimes = runtimes
        self._kit = kit
        self._janitor = janitor
        self._watch = watch
        self._claims = claims
        self.closing = False

    # Looking

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._kit.table.info(sandbox)

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        return await self._kit.sandboxes.list(
            states or tuple(state for state in State if state is not State.GONE)
        )

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        return await self._kit.sandboxes.page(states=states, project=project, after=after, limit=limit)

    # Creating

    def runtime(self, level: Level) -> Runtime:
        """Raises: IsolationUnavailable: this engine has no such level."""
        runtime = self._runtimes.get(level)
        if runtime is None:
            have = ", ".join(self._runtimes) or "none"
            raise IsolationUnavailable(
                f"level {level} is not available here",
                hint=f"available: {have}; `dsec doctor` tells why",
                level=level.value,
            )
        return runtime

    async def create(self, spec: SandboxSpec, *, files_of: Source | None = None) -> SandboxInfo:
        """See :class:`SandboxService`; with ``files_of`` its files begin as a copy of that sandbox's or snapshot's."""
        self._check_open()
        runtime = self.runtime(spec.level)
        _check_images(spec, runtime)
        spec = await self._pinned(runtime, spec)
        self._check_open()
        handle = self._new(spec, runtime, files_of)
        return await settled(
            self._kit.work.start(self._create(handle, files_of)),
            lambda: self._kit.work.spawn(self._give_up(handle)),
        )

    def _check_open(self) -> None:
        if self.closing:
            raise Conflict("the engine is closing")

    async def _pinned(self, runtime: Runtime, spec: SandboxSpec) -> SandboxSpec:
        """What it will be made of, by digest: recorded, so that what is made of its files later is made over the same."""
        try:
            return await runtime.pin(spec)
        except OSError as exc:
            raise RuntimeUnavailable(f"create failed: {exc!r}") from exc

    def _new(self, spec: SandboxSpec, runtime: Runtime, files_of: Source | None) -> Handle:
        now = self._kit.clock.now()
        sandbox = runtime.reserve(spec) if files_of is None else new_sandbox_id()
        place = runtime.place(sandbox)
        info = SandboxInfo(
            id=sandbox,
            state=State.PENDING,
            spec=spec,
            flags=runtime.flags,
            created_at=now.wall,
            expires_at=expiry_wall(now, now, spec.ttl),
            session_id=new_session_id(),
            workdir=spec.workdir or place.workdir,
            boot_id=now.boot_id,
            created_boot=now.boot,
        )
        deadline = now.boot + spec.ttl if spec.ttl else 0.0
        return Handle(info, runtime, place, deadline=deadline, used=now.boot)

    async def _create(self, handle: Handle, files_of: Source | None) -> SandboxInfo:
        try:
            async with handle.lock:
                await self._make(handle, files_of)
        except Exception as exc:
            error = exc if isinstance(exc, DsecError) else RuntimeUnavailable(f"create failed: {exc!r}")
            await self._undo(handle, error)
            if error is exc:
                raise
            raise error from exc
        if handle.info.state is not State.RUNNING:
            raise Conflict(f"{handle.id} was destroyed while it was being made", sandbox=handle.id)
        self._watch(handle)
        return handle.info

    async def _make(self, handle: Handle, files_of: Source | None) -> None:
        spec = handle.info.spec
        stored = await self._claims.take(handle.id, spec) if spec.volumes else {}
        await self._kit.sandboxes.add(handle.info, drafts.created(handle.info, files_of))
        self._kit.table.add(handle)
        running = await handle.runtime.create(
            replace(plan_for(handle.id, spec, handle.deadline), files_of=files_of, stored=stored)
        )
        await self._kit.guests.warm(handle)
        handle.place = handle.runtime.place(handle.id)
        await self._move(
            handle, Event.STARTED, "sandbox.create", Phase.RESULT, {"outcome": "ok", "pid": running.pid}
        )

    async def _undo(self, handle: Handle, error: DsecError) -> None:
        """No partial sandbox remains, whatever failed: the runtime, or the record of its success."""
        if handle.id not in self._kit.table:
            self._claims.give_back(handle.id)
            return  # not even the intent was recorded
        handle.failure = error.message
        with suppress(DsecError, OSError):  # handed to the janitor; the caller hears of what failed first
            await self.clean(handle)

    async def _give_up(self, handle: Handle) -> None:
        """Whoever asked for it vanished before it was made: nobody knows its id."""
        async with handle.lock:
            pass
        if handle.info.state is State.RUNNING:
            await self.destroy(handle.id, reason="its creator vanished")

    # Going back

    async def remake(self, handle: Handle, snapshot: SnapshotId) -> SandboxInfo:
        """End its processes and let it begin again with the files of a snapshot. What fails on the way fails the sandbox.

        Raises:
            Conflict: it does not run any more.
        """
        async with handle.lock:
            if handle.info.state is not State.RUNNING:
                raise Conflict(f"{handle.id} is {handle.info.state}", state=handle.info.state.value)
            stored = await self._claims.meanings(handle.info.spec)
            plan = replace(
                plan_for(handle.id, handle.info.spec, handle.deadline), files_of=snapshot, stored=stored
            )
            await handle.runtime.rehearse(plan)  # after this its processes and files are gone
            facts: dict[str, Json] = {"snapshot": snapshot}
            await self._kit.journal.append(
                Draft(chain=handle.id, act=ROLLBACK, phase=Phase.INTENT, ref=snapshot, payload=facts)
            )
            handle.remaking = True
            try:
                await self._begin_again(handle, snapshot, plan)
            except Exception as exc:
                ended = Ended(id=handle.id, reason=f"its rollback failed: {exc}")
                self._kit.work.spawn(self.died(handle, ended))  # needs the lock, which goes first
                if isinstance(exc, DsecError):
                    raise
                raise RuntimeUnavailable(f"rollback failed: {exc!r}") from exc
            finally:
                handle.remaking = False
        return handle.info

    async def _begin_again(self, handle: Handle, snapshot: SnapshotId, plan: Plan) -> None:
        await handle.runtime.destroy(handle.id)
        news, handle.ending = handle.ending, asyncio.Event()
        news.set()  # for commands that lost their connection and wait to hear why
        await self._cut_off(handle, UnknownOutcome(f"{handle.id} was rolled back while the command ran"))
        try:
            await handle.runtime.create(plan)
        except RuntimeUnavailable:  # its spawner died, say: what is gone cannot be gone back to, so once more
            await handle.runtime.create(plan)
        await self._kit.guests.warm(handle)
        handle.place = handle.runtime.place(handle.id)
        handle.told.clear()
        handle.oom_kills = 0  # they are counted anew
        draft = Draft(chain=handle.id, act=ROLLBACK, phase=Phase.RESULT, ref=snapshot, payload=OK)
        await self._kit.journal.append(draft)

    # Pausing

    async def pause(self, sandbox: SandboxId) -> SandboxInfo:
        handle = await self._kit.table.present(sandbox)
        self._need_pause(handle)
        return await settled(self._kit.work.start(self._pause(handle)), ignore)

    async def _pause(self, handle: Handle) -> SandboxInfo:
        async with handle.lock:
            if Command.FREEZE in await self._move(handle, Event.PAUSE_ASKED, "sandbox.pause", Phase.INTENT):
                try:
                    await handle.runtime.freeze(handle.id, True)
                except DsecError as exc:
                    await self._unfreeze(handle, exc)
                    raise
                handle.paused_at = self._kit.clock.boot()
                await self._note(handle, "sandbox.pause")
        return handle.info

    async def _unfreeze(self, handle: Handle, error: DsecError) -> None:
        await self._move(handle, Event.FREEZE_FAILED, "sandbox.pause", Phase.RESULT, drafts.failure(error))
        if handle.info.state is State.RUNNING:
            await handle.runtime.freeze(handle.id, False)

    async def resume(self, sandbox: SandboxId) -> SandboxInfo:
        handle = await self._kit.table.present(sandbox)
        self._need_pause(handle)
        return await settled(self._kit.work.start(self._resume(handle)), ignore)

    async def _resume(self, handle: Handle) -> SandboxInfo:
        async with handle.lock:
            if Command.THAW in await self._move(handle, Event.RESUME_ASKED, "sandbox.resume", Phase.INTENT):
                await self._shift(handle)
                await handle.runtime.freeze(handle.id, False)
                await self._note(handle, "sandbox.resume")
            elif handle.info.state is State.RUNNING:
                await handle.runtime.freeze(handle.id, False)  # an earlier resume may have failed half-way
        self._watch(handle)
        return handle.info

    async def _shift(self, handle: Handle) -> None:
        """Time-outs did not run while it was paused. Said before the thaw, so that none fires first."""
        now = self._kit.clock.boot()
        if handle.guest is not None and not handle.guest.lost and handle.paused_at:
            await handle.guest.shift(now - handle.paused_at)
        handle.paused_at, handle.used = 0.0, now

    def _need_pause(self, handle: Handle) -> None:
        if Flag.PAUSE not in handle.info.flags:
            raise Unsupported(f"pause: level {handle.info.spec.level} cannot freeze processes here")

    # Deadlines

    async def extend(self, sandbox: SandboxId, ttl: float) -> SandboxInfo:
        check_seconds("ttl", ttl)
        handle = await self._kit.table.present(sandbox)
        return await settled(self._kit.work.start(self._extend(handle, ttl)), ignore)

    async def _extend(self, handle: Handle, ttl: float) -> SandboxInfo:
        async with handle.lock:
            now, info = self._kit.clock.now(), handle.info
            at = expiry_wall(Moment(info.created_at, info.created_boot, info.boot_id), now, ttl)
            draft = Draft(chain=handle.id, act="sandbox.extend", phase=Phase.NOTE, payload={"ttl": ttl})
            handle.info = await self._kit.sandboxes.expire_at(handle.id, at, draft)
            handle.deadline = deadline_boot(handle.info, now)
            await handle.runtime.deadline(handle.id, spawner_deadline(handle.deadline))
        self._watch(handle)
        return handle.info

    # Ending

    async def destroy(self, sandbox: SandboxId, *, reason: str = "asked") -> None:
        handle = self._kit.table.find(sandbox)
        if handle is None:
            info = await self._kit.table.info(sandbox)
            if info.state is State.GONE:
                return
            handle = self._kit.table.find(sandbox) or self.adopt(info)
        if handle.removal is None or handle.removal.done():
            handle.removal = self._kit.work.start(self._destroy(handle, reason))
        await settled(handle.removal, ignore)

    def adopt(self, info: SandboxInfo) -> Handle:
        """A handle for a recorded sandbox that this engine does not hold yet."""
        now, runtime = self._kit.clock.now(), self.runtime(info.spec.level)
        handle = Handle(
            info, runtime, runtime.place(info.id), deadline=deadline_boot(info, now), used=now.boot
        )
        self._kit.table.add(handle)
        return handle

    async def _destroy(self, handle: Handle, reason: str) -> None:
        try:
            await self._asked(handle, reason)
        except StorageFull:
            handle.unsaid = (
                reason  # ending it is the way to room; that it was asked is recorded when there is some
            )
        handle.ending.set()
        await self.clean(handle)

    async def _asked(self, handle: Handle, reason: str) -> None:
        facts: dict[str, Json] = {"reason": reason}
        await self._move(handle, Event.DESTROY_ASKED, "sandbox.destroy", Phase.INTENT, facts, reason)

    async def clean(self, handle: Handle) -> None:
        """Remove everything; what fails goes to the janitor.  Raises: CleanupFailed."""
        try:
            await self._remove(handle)
        except Exception as exc:  # whatever failed, something is left: it must be seen and tried again
            await self._janitor.take(handle.id, lambda: self._remove(handle), exc)
            raise

    async def _remove(self, handle: Handle) -> None:
        async with handle.lock:
            if handle.over.is_set():
                return
            await handle.runtime.destroy(handle.id)
            await self._cut_off(handle)
            if handle.info.state is State.PENDING:
                failed: dict[str, Json] = {"outcome": "failed", "message": handle.failure}
                await self._move(
                    handle, Event.CREATE_FAILED, "sandbox.create", Phase.RESULT, failed, handle.failure
                )
            if handle.unsaid:
                await self._asked(handle, handle.unsaid)
            await self._move(handle, Event.REMOVED, "sandbox.destroy", Phase.RESULT, OK)
            self._kit.table.drop(handle.id)
            self._janitor.solved(handle.id)
            self._claims.give_back(handle.id)
            handle.over.set()

    async def _cut_off(self, handle: Handle, error: DsecError | None = None) -> None:
        """Commands in flight record their fate before the sandbox's own end is recorded."""
        runs = tuple(handle.runs.values())
        for run in runs:
            loss = error or handle.loss("while the command ran")
            if loss is not None:
                run.abandon(loss)
        await self._kit.guests.drop(handle)
        if runs:
            await asyncio.wait([run.settled for run in runs], timeout=RECORD_PATIENCE)

    def ended(self, ended: Ended) -> None:
        """A runtime's news: a sandbox ended without being asked to."""
        handle = self._kit.table.find(ended.id)
        if handle is not None and handle.remaking:
            return  # its init was ended for that; another that dies meanwhile is missed by what follows, or found by the reconciler
        if handle is not None and not self.closing:
            self._kit.work.spawn(self.died(handle, ended))

    async def died(self, handle: Handle, ended: Ended, event: Event = Event.INIT_DIED) -> None:
        """Fail it, cut off its commands, remove what is left. Its deadline passing is no failure."""
        due = handle.deadline
        if due and not ended.oom and self._kit.clock.boot() >= due - GRACE / 2:
            await self.destroy(handle.id, reason="ttl")
            return
        reason = f"out of memory: {ended.reason}" if ended.oom else ended.reason
        if handle.info.state in (State.PENDING, State.RUNNING, State.PAUSED):
            handle.failure = handle.failure or reason
            handle.ending.set()
        facts: dict[str, Json] = {"reason": reason, "oom": ended.oom}
        commands = await self._move(handle, event, "sandbox.failed", Phase.NOTE, facts, reason)
        if Command.REMOVE in commands:
            await self.clean(handle)

    # Recording

    async def _move(
        self,
        handle: Handle,
        event: Event,
        act: str,
        phase: Phase,
        facts: Mapping[str, Json] = NOTHING,
        reason: str = "",
    ) -> tuple[Command, ...]:
        """Decide, and record the decision; when somebody else was faster, decide again.

        A step that changes no state leaves no record.
        """
        for _ in range(TRIES):
            seen = handle.info.state
            to, commands = decide(seen, event)
            if to is seen:
                return commands
            draft = Draft(chain=handle.id, act=act, phase=phase, payload=facts)
            try:
                handle.info = await self._kit.sandboxes.move(
                    handle.id, seen=seen, to=to, draft=draft, reason=reason
                )
                return commands
            except Conflict:
                handle.info = await self._kit.sandboxes.get(handle.id)
        raise Conflict(f"{handle.id} kept changing state", hint="try again", tries=TRIES)

    async def _note(self, handle: Handle, act: str) -> None:
        await self._kit.journal.append(Draft(chain=handle.id, act=act, phase=Phase.RESULT, payload=OK))


def _check_images(spec: SandboxSpec, runtime: Runtime) -> None:
    """Raises: Unsupported: it would run with other files than were asked for."""
    if not runtime.flags or Flag.ROOT_FS in runtime.flags:
        return  # without any, the level cannot be had: creating tells why
    if spec.layers or spec.base != BASE:
        what = "dependencies or other layers" if spec.layers else f"base {spec.base!r}"
        raise Unsupported(
            f"level {spec.level.value!r} shows the files of this machine, and cannot have {what}",
            hint="use level='container'",
            level=spec.level.value,
        )


def plan_for(sandbox: SandboxId, spec: SandboxSpec, deadline: float = 0.0) -> Plan:
    """What the runtime is asked to make. ``deadline``: CLOCK_BOOTTIME seconds, 0 = none."""
    return Plan(
        id=sandbox,
        level=spec.level,
        limits=spec.limits,
        image=spec.base_digest or spec.base,
        layers=spec.layers,
        read_only=spec.read_only,
        volumes=spec.volumes,
        lent=spec.lent,
        deadline=spawner_deadline(deadline),
        hostname=spec.hostname or "sandbox",
    )


def spawner_deadline(deadline: float) -> float:
    """When the runtime ends it by itself, should no engine have done so: boot seconds, 0 = never."""
    return deadline + GRACE if deadline else 0.0
