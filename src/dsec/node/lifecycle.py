"""Create, pause, resume, destroy: each step is recorded in the transaction that changes the state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from dsec.core.deadlines import Moment, deadline_boot, expiry_wall
from dsec.core.machine import DORMANT, Command, Event, decide
from dsec.errors import (
    Conflict,
    DsecError,
    IsolationUnavailable,
    RuntimeUnavailable,
    StorageFull,
    UnknownOutcome,
    Unsupported,
)
from dsec.failpoints import reach
from dsec.model.checks import check_count, check_seconds
from dsec.model.ids import SandboxId, SnapshotId, new_sandbox_id, new_session_id
from dsec.model.journal import Draft, Json, Phase
from dsec.model.paging import PAGE, Page
from dsec.model.sandbox import BASE, Flag, Level, SandboxInfo, SandboxSpec, State
from dsec.node import drafts
from dsec.node.claims import Claims
from dsec.node.dormancy import Dormancy
from dsec.node.handles import Handle, absent, refusal
from dsec.node.janitor import Janitor
from dsec.node.kit import Kit
from dsec.node.steps import GRACE, OK, cut_off, move, note, plan_for, spawner_deadline
from dsec.node.work import ignore, settled
from dsec.ports.engine import SandboxService
from dsec.ports.journal import MOST_AT_ONCE
from dsec.ports.runtime import Ended, Plan, Runtime

ROLLBACK: Final = "sandbox.rollback"
PAUSED: Final = "paused"
RESUMED: Final = "resumed"
THAWED: Final = "thawed by an act"
RESIDENCE: Final = "residence"  # what pauses a sandbox that nobody uses, in the journal

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
        self.dormancy = Dormancy(self, kit, claims, janitor)
        kit.table.waker = self.dormancy.wake
        self.residence: Callable[[Handle], str] = lambda _: ""

    # Looking

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        info = await self._kit.table.info(sandbox)
        handle = self._kit.table.find(sandbox)
        told = self.residence(handle) if handle is not None else info.reason if info.state in DORMANT else ""
        return replace(info, residence=told) if told else info

    def watch(self, handle: Handle) -> None:
        """It runs: its deadlines count."""
        self._watch(handle)

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

    async def create_cold(self, spec: SandboxSpec, count: int) -> tuple[SandboxId, ...]:
        check_count("count", count, 1, MOST_AT_ONCE)
        self._check_open()
        runtime = self.runtime(spec.level)
        _check_images(spec, runtime)
        spec = await self._pinned(runtime, spec)
        if spec.volumes:
            await self._claims.meanings(spec)
        await runtime.rehearse(replace(plan_for(SandboxId(""), spec), volumes=()))
        infos, notes = await asyncio.to_thread(self._cold, spec, runtime, count)
        self._check_open()
        await settled(self._kit.work.start(self._kit.sandboxes.add_many(infos, notes)), ignore)
        return tuple([info.id for info in infos])

    def _cold(
        self, spec: SandboxSpec, runtime: Runtime, count: int
    ) -> tuple[Sequence[SandboxInfo], Sequence[Draft]]:
        """So many, and what the journal says of each: on a thread, as a thousand take a while."""
        infos = [self._info(new_sandbox_id(), spec, runtime, State.COLD) for _ in range(count)]
        return infos, drafts.recorded(infos)

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
        sandbox = runtime.reserve(spec) if files_of is None else new_sandbox_id()
        info = self._info(sandbox, spec, runtime, State.PENDING)
        deadline = info.created_boot + spec.ttl if spec.ttl else 0.0
        return Handle(info, runtime, runtime.place(sandbox), deadline=deadline, used=info.created_boot)

    def _info(self, sandbox: SandboxId, spec: SandboxSpec, runtime: Runtime, state: State) -> SandboxInfo:
        now = self._kit.clock.now()
        return SandboxInfo(
            id=sandbox,
            state=state,
            spec=spec,
            flags=runtime.flags,
            created_at=now.wall,
            expires_at=expiry_wall(now, now, spec.ttl),
            session_id=new_session_id(),
            workdir=spec.workdir or runtime.place(sandbox).workdir,
            boot_id=now.boot_id,
            created_boot=now.boot,
        )

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
        reach("create.begin")
        await self._kit.sandboxes.add(handle.info, drafts.created(handle.info, files_of))
        self._kit.table.add(handle)
        reach("create.recorded")
        running = await handle.runtime.create(
            replace(plan_for(handle.id, spec, handle.deadline), files_of=files_of, stored=stored)
        )
        reach("create.made")
        await self._kit.guests.warm(handle)
        handle.place = handle.runtime.place(handle.id)
        await move(
            self._kit,
            handle,
            Event.STARTED,
            "sandbox.create",
            Phase.RESULT,
            {"outcome": "ok", "pid": running.pid},
        )
        reach("create.done")

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
            reach("rollback.begin")
            facts: dict[str, Json] = {"snapshot": snapshot}
            await self._kit.journal.append(
                Draft(chain=handle.id, act=ROLLBACK, phase=Phase.INTENT, ref=snapshot, payload=facts)
            )
            reach("rollback.recorded")
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
        reach("rollback.ended")
        news, handle.ending = handle.ending, asyncio.Event()
        news.set()  # for commands that lost their connection and wait to hear why
        await cut_off(self._kit, handle, UnknownOutcome(f"{handle.id} was rolled back while the command ran"))
        try:
            await handle.runtime.create(plan)
        except RuntimeUnavailable:  # its spawner died, say: what is gone cannot be gone back to, so once more
            await handle.runtime.create(plan)
        reach("rollback.made")
        await self._kit.guests.warm(handle)
        handle.place = handle.runtime.place(handle.id)
        handle.told.clear()
        handle.oom_kills = 0  # they are counted anew
        draft = Draft(chain=handle.id, act=ROLLBACK, phase=Phase.RESULT, ref=snapshot, payload=OK)
        await self._kit.journal.append(draft)
        reach("rollback.done")

    # Pausing

    async def pause(self, sandbox: SandboxId) -> SandboxInfo:
        handle = await self._kit.table.held(sandbox)
        self._need_pause(handle)
        return await settled(self._kit.work.start(self._pause(handle)), ignore)

    async def _pause(self, handle: Handle) -> SandboxInfo:
        async with handle.lock:
            if (
                handle.frozen and handle.info.state is State.PAUSED
            ):  # from now on because somebody wants it so
                draft = Draft(chain=handle.id, act="sandbox.pause", phase=Phase.NOTE, payload=OK)
                await self._kit.journal.append(draft)
                handle.frozen = False
            else:
                await self.freeze(handle, "")
        return handle.info

    async def freeze(self, handle: Handle, idle: str) -> None:
        """Stop its processes; its lock is held. ``idle``: because nobody uses it, in words, so that the next act lets them go on."""
        reach("pause.begin")
        facts: dict[str, Json] = {"cause": RESIDENCE, "reason": idle} if idle else {}
        why = idle or (PAUSED if handle.info.reason else "")  # what was said of an earlier state is over
        handle.frozen = bool(idle)  # first: an act that comes meanwhile waits for the lock
        try:
            if Command.FREEZE in await move(
                self._kit, handle, Event.PAUSE_ASKED, "sandbox.pause", Phase.INTENT, facts, why
            ):
                reach("pause.recorded")
                await handle.runtime.freeze(handle.id, True)
                reach("pause.frozen")
                handle.paused_at = self._kit.clock.boot()
                await note(self._kit, handle, "sandbox.pause", {**OK, **facts})
                reach("pause.done")
        except DsecError as exc:
            if handle.paused_at == 0.0 and handle.info.state is State.PAUSED:
                await self._unfreeze(handle, exc)
            raise

    async def _unfreeze(self, handle: Handle, error: DsecError) -> None:
        handle.frozen = False
        await move(
            self._kit, handle, Event.FREEZE_FAILED, "sandbox.pause", Phase.RESULT, drafts.failure(error)
        )
        if handle.info.state is State.RUNNING:
            await handle.runtime.freeze(handle.id, False)

    async def resume(self, sandbox: SandboxId) -> SandboxInfo:
        info = await self._kit.table.info(sandbox)
        if info.state in DORMANT:
            return (await self.dormancy.wake(sandbox)).info
        handle = await self._kit.table.held(sandbox)
        self._need_pause(handle)
        return await settled(self._kit.work.start(self._resume(handle)), ignore)

    async def _resume(self, handle: Handle) -> SandboxInfo:
        async with handle.lock:
            await self.thaw(handle)
        self._watch(handle)
        return handle.info

    async def thaw(self, handle: Handle) -> None:
        """Let its processes go on; its lock is held."""
        reach("resume.begin")
        why, facts = (THAWED, {"cause": RESIDENCE}) if handle.frozen else ("", {})
        if not why and handle.info.reason:
            why = RESUMED
        if Command.THAW in await move(
            self._kit, handle, Event.RESUME_ASKED, "sandbox.resume", Phase.INTENT, facts, why
        ):
            reach("resume.recorded")
            await self._shift(handle)
            await handle.runtime.freeze(handle.id, False)
            reach("resume.thawed")
            await note(self._kit, handle, "sandbox.resume")
            reach("resume.done")
        elif handle.info.state is State.RUNNING:
            await handle.runtime.freeze(handle.id, False)  # an earlier resume may have failed half-way
        handle.frozen = False

    async def _shift(self, handle: Handle) -> None:
        """Time-outs did not run while it was paused. Said before the thaw, so that none fires first."""
        now = self._kit.clock.boot()
        if handle.guest is not None and not handle.guest.lost and handle.paused_at:
            await handle.guest.shift(now - handle.paused_at)
        handle.paused_at, handle.used = 0.0, now

    def _need_pause(self, handle: Handle) -> None:
        if Flag.PAUSE not in handle.info.flags:
            raise Unsupported(f"pause: level {handle.info.spec.level} cannot freeze processes here")

    # Hibernating

    async def hibernate(self, sandbox: SandboxId) -> SandboxInfo:
        info = await self._kit.table.info(sandbox)
        if info.state in DORMANT and self._kit.table.find(sandbox) is None:
            return info
        handle = await self._kit.table.held(sandbox)
        if Flag.HIBERNATE not in handle.info.flags:
            raise Unsupported(
                f"hibernate: level {handle.info.spec.level} cannot keep files without a sandbox that runs",
                hint="use level='container', or pause it",
                level=handle.info.spec.level.value,
            )
        return await settled(self._kit.work.start(self._hibernate(handle)), ignore)

    async def _hibernate(self, handle: Handle) -> SandboxInfo:
        async with handle.lock:
            await self.dormancy.hibernate(handle, "asked")
        return handle.info

    # Deadlines

    async def extend(self, sandbox: SandboxId, ttl: float) -> SandboxInfo:
        check_seconds("ttl", ttl)
        return await settled(self._kit.work.start(self._extend(sandbox, ttl)), ignore)

    async def _extend(self, sandbox: SandboxId, ttl: float) -> SandboxInfo:
        info = await self._kit.table.info(sandbox)
        handle = self._kit.table.find(sandbox)
        if handle is None and info.state in DORMANT:
            return await self._prolong(info, ttl)
        handle = handle or await self._kit.table.held(sandbox)
        async with handle.lock:
            if handle.info.state not in (State.RUNNING, State.PAUSED, *DORMANT):
                raise refusal(handle.info)
            handle.info = await self._prolong(handle.info, ttl)
            handle.deadline = deadline_boot(handle.info, self._kit.clock.now())
            if handle.info.state not in DORMANT:
                await handle.runtime.deadline(handle.id, spawner_deadline(handle.deadline))
        self._watch(handle)
        return handle.info

    async def _prolong(self, info: SandboxInfo, ttl: float) -> SandboxInfo:
        now = self._kit.clock.now()
        if info.expires_at and deadline_boot(info, now) <= now.boot:
            raise absent(info.id)  # its time is up, and only its end is missing
        at = expiry_wall(Moment(info.created_at, info.created_boot, info.boot_id), now, ttl)
        draft = Draft(chain=info.id, act="sandbox.extend", phase=Phase.NOTE, payload={"ttl": ttl})
        return await self._kit.sandboxes.expire_at(info.id, at, draft)

    # Ending

    async def destroy(self, sandbox: SandboxId, *, reason: str = "asked") -> None:
        handle = self._kit.table.find(sandbox)
        if handle is None:
            info = await self._kit.table.info(sandbox)
            if info.state is State.GONE or (info.state is State.COLD and await self._forgotten(info, reason)):
                return
            handle = self._kit.table.find(sandbox) or self.adopt(info)
        if handle.removal is None or handle.removal.done():
            handle.removal = self._kit.work.start(self._destroy(handle, reason))
        await settled(handle.removal, ignore)

    async def _forgotten(self, info: SandboxInfo, reason: str) -> bool:
        """End one that is nothing but a record. False: it is being woken."""
        if self._kit.table.find(info.id) is not None:
            return False
        facts: dict[str, Json] = {"reason": reason, "outcome": "ok"}
        draft = Draft(chain=info.id, act="sandbox.destroy", phase=Phase.NOTE, payload=facts)
        reach("destroy.begin")
        to, _ = decide(State.COLD, Event.REMOVED)
        try:
            await self._kit.sandboxes.move(info.id, seen=State.COLD, to=to, draft=draft, reason=reason)
        except Conflict:
            return False
        self._kit.table.ended(info.id)
        reach("destroy.done")
        return True

    def adopt(self, info: SandboxInfo) -> Handle:
        """A handle for a recorded sandbox that this engine does not hold yet."""
        now, runtime = self._kit.clock.now(), self.runtime(info.spec.level)
        handle = Handle(
            info, runtime, runtime.place(info.id), deadline=deadline_boot(info, now), used=now.boot
        )
        self._kit.table.add(handle)
        return handle

    async def _destroy(self, handle: Handle, reason: str) -> None:
        reach("destroy.begin")
        try:
            await self._asked(handle, reason)
        except StorageFull:
            handle.unsaid = (
                reason  # ending it is the way to room; that it was asked is recorded when there is some
            )
        reach("destroy.recorded")
        handle.ending.set()
        await self.clean(handle)

    async def _asked(self, handle: Handle, reason: str) -> None:
        facts: dict[str, Json] = {"reason": reason}
        await move(self._kit, handle, Event.DESTROY_ASKED, "sandbox.destroy", Phase.INTENT, facts, reason)

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
            reach("destroy.removed")
            await cut_off(self._kit, handle)
            if handle.info.state is State.PENDING:
                failed: dict[str, Json] = {"outcome": "failed", "message": handle.failure}
                await move(
                    self._kit,
                    handle,
                    Event.CREATE_FAILED,
                    "sandbox.create",
                    Phase.RESULT,
                    failed,
                    handle.failure,
                )
            if handle.unsaid:
                await self._asked(handle, handle.unsaid)
            await move(self._kit, handle, Event.REMOVED, "sandbox.destroy", Phase.RESULT, OK)
            self._kit.table.drop(handle.id)
            self._janitor.solved(handle.id)
            self._claims.give_back(handle.id)
            handle.over.set()
            self._kit.table.ended(handle.id)
            reach("destroy.done")

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
        if handle.info.state in DORMANT:
            handle.failure = reason  # for whoever wakes it, if anybody does
            return
        if handle.info.state in (State.PENDING, State.RUNNING, State.PAUSED):
            handle.failure = handle.failure or reason
            handle.ending.set()
        facts: dict[str, Json] = {"reason": reason, "oom": ended.oom}
        commands = await move(self._kit, handle, event, "sandbox.failed", Phase.NOTE, facts, reason)
        if Command.REMOVE in commands:
            await self.clean(handle)


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
