"""Sandboxes that take nothing while nobody uses them: put to rest, and woken by the first act.

The state of a dormant one changes when it runs again, not before: what was half woken when an engine died is recorded as dormant, and is put to
rest by the next. The other way round the state changes first: what was half put to rest is recorded as dormant, too. So one rule finishes both: what
is recorded as dormant must not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

from dsec.core.machine import DORMANT, ENDED, Command, Event
from dsec.errors import Conflict, DsecError, NotFound, RuntimeUnavailable, SandboxFailed, UnknownOutcome
from dsec.failpoints import reach
from dsec.model.ids import ExecId, SandboxId, VolumeId
from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import SandboxInfo, State
from dsec.node import drafts
from dsec.node.claims import Claims
from dsec.node.handles import Handle, absent, refusal
from dsec.node.janitor import Janitor
from dsec.node.kit import Kit
from dsec.node.steps import TRIES, cut_off, move, note, plan_for
from dsec.node.work import ignore, settled
from dsec.ports.runtime import Ended

WAKES: Final = 8  # at most at once
WAKE: Final = "sandbox.wake"
HIBERNATE: Final = "sandbox.hibernate"
WOKEN: Final = "woken"


class Lives(Protocol):
    """What of the lives of sandboxes is done elsewhere."""

    closing: bool

    def adopt(self, info: SandboxInfo) -> Handle:
        """A handle for a recorded sandbox, in the table."""

    async def thaw(self, handle: Handle) -> None:
        """Let the processes of a paused one go on; its lock is held."""

    async def clean(self, handle: Handle) -> None:
        """Remove everything of it."""

    async def died(self, handle: Handle, ended: Ended) -> None:
        """It ended without being asked to."""

    async def destroy(self, sandbox: SandboxId, *, reason: str) -> None:
        """End it."""

    def watch(self, handle: Handle) -> None:
        """It runs: its deadlines count."""


class Dormancy:
    """See the module."""

    def __init__(self, lives: Lives, kit: Kit, claims: Claims, janitor: Janitor) -> None:
        self._lives = lives
        self._kit = kit
        self._claims = claims
        self._janitor = janitor
        self._turns = asyncio.Semaphore(WAKES)
        self._waking: dict[SandboxId, asyncio.Task[Handle]] = {}

    # Waking

    async def wake(self, sandbox: SandboxId) -> Handle:
        """The handle of one that runs again, once for all who ask.

        Raises:
            NotFound, SandboxFailed, Conflict: it ended meanwhile, or is being ended.
            As :meth:`~dsec.ports.runtime.Runtime.create`: it is dormant still.
        """
        task = self._waking.get(sandbox)
        if task is None:
            if self._lives.closing:
                raise Conflict("the engine is closing")
            self._waking[sandbox] = task = self._kit.work.start(self._wake(sandbox))
            task.add_done_callback(lambda _: self._waking.pop(sandbox, None))
        handle = await settled(task, ignore)
        handle.used = self._kit.clock.boot()
        return handle

    async def _wake(self, sandbox: SandboxId) -> Handle:
        for _ in range(TRIES):
            handle = self._kit.table.find(sandbox)
            if handle is None:
                info = await self._kit.table.info(sandbox)
                handle = self._kit.table.find(sandbox) or self._adopted(info)
            async with handle.lock:
                if self._kit.table.find(sandbox) is handle:
                    await self._up(handle)
                    return handle
        raise Conflict(f"{sandbox} kept changing state", hint="try again", tries=TRIES)

    def _adopted(self, info: SandboxInfo) -> Handle:
        if info.state not in DORMANT:
            raise refusal(info)
        return self._lives.adopt(info)

    async def _up(self, handle: Handle) -> None:
        """Let it run, whatever kept it from that."""
        state = handle.info.state
        if state is State.RUNNING:
            return
        if state is State.PAUSED and handle.frozen:
            await self._lives.thaw(handle)
        elif state not in DORMANT:
            raise refusal(handle.info)
        else:
            try:
                self._check_due(handle)
                async with self._kit.admission.turn(handle.info.spec, seen=state), self._turns:
                    await self._restore(handle)
            finally:
                if handle.info.state in DORMANT and not handle.unparked:
                    self._kit.table.drop(handle.id)
        self._lives.watch(handle)

    def _check_due(self, handle: Handle) -> None:
        """Raises: NotFound: its time is up."""
        if handle.deadline and handle.deadline <= self._kit.clock.boot():
            self._kit.work.spawn(self._lives.destroy(handle.id, reason="ttl"))
            raise absent(handle.id)

    async def _restore(self, handle: Handle) -> None:
        was, spec = handle.info.state, handle.info.spec
        reach("wake.begin")
        if handle.unparked:
            await self._park(handle)
            self._kit.table.add(handle)
        if was is State.HIBERNATED and not handle.runtime.keeps(handle.id):
            await self.lose(handle)
        stored = await self._volumes(handle, was) if spec.volumes else {}
        try:
            facts: dict[str, Json] = {"from": was.value}
            await self._kit.journal.append(
                Draft(chain=handle.id, act=WAKE, phase=Phase.INTENT, payload=facts)
            )
            reach("wake.recorded")
            plan = replace(
                plan_for(handle.id, spec, handle.deadline), stored=stored, parked=was is State.HIBERNATED
            )
            running = await handle.runtime.create(plan)
            reach("wake.made")
            await self._kit.guests.warm(handle)
            handle.place = handle.runtime.place(handle.id)
            self._check_lives(handle)
            done: dict[str, Json] = {"outcome": "ok", "pid": running.pid}
            await move(self._kit, handle, Event.WOKEN, WAKE, Phase.RESULT, done, WOKEN)
            reach("wake.done")
        except Exception as exc:
            error = exc if isinstance(exc, DsecError) else RuntimeUnavailable(f"waking failed: {exc!r}")
            await self._undo(handle, was, error)
            if error is exc:
                raise
            raise error from exc
        self._end(handle)

    async def _volumes(self, handle: Handle, was: State) -> Mapping[str, VolumeId]:
        """A hibernated one has kept its place at its volumes; a cold one had none yet.  Raises: Conflict, NotFound."""
        if was is State.COLD:
            return await self._claims.take(handle.id, handle.info.spec)
        self._claims.hold(handle.id, handle.info.spec)
        return await self._claims.meanings(handle.info.spec)

    def _check_lives(self, handle: Handle) -> None:
        if handle.failure:
            raise RuntimeUnavailable(f"{handle.id} died while it was woken: {handle.failure}")

    def _end(self, handle: Handle) -> None:
        """Raises: Conflict: it is being destroyed."""
        if handle.info.state is not State.RUNNING:
            raise Conflict(f"{handle.id} was destroyed while it was woken", sandbox=handle.id)
        if handle.failure:  # between the last look and the record
            why, handle.failure = handle.failure, ""
            self._kit.work.spawn(self._lives.died(handle, Ended(id=handle.id, reason=why)))

    async def _undo(self, handle: Handle, was: State, error: DsecError) -> None:
        """It is as dormant as before, whatever failed."""
        with suppress(DsecError):  # whoever asked hears of what failed first
            await note(self._kit, handle, WAKE, drafts.failure(error))
        await self._kit.guests.drop(handle)
        if handle.info.state is State.STOPPING:
            return  # whoever destroys it waits for the lock
        handle.failure = ""
        handle.place = handle.runtime.place(handle.id)
        try:
            if was is State.HIBERNATED and handle.info.state not in ENDED:
                await handle.runtime.park(handle.id)
            else:
                await handle.runtime.destroy(handle.id)
        except Exception as exc:  # noqa: BLE001 - whatever failed, something is left
            await self._leave(handle, exc)
            return
        if handle.info.state is not State.HIBERNATED:
            self._claims.give_back(handle.id)
        if handle.info.state in ENDED:
            self._kit.table.drop(handle.id)

    async def lose(self, handle: Handle) -> None:
        """Its files are not there any more.  Raises: SandboxFailed."""
        why = "its files were not there any more when it was to be woken"
        facts: dict[str, Json] = {"reason": why}
        await move(self._kit, handle, Event.MISSING, "sandbox.failed", Phase.NOTE, facts, why)
        handle.failure = why
        self._kit.work.spawn(self._lives.clean(handle))
        raise SandboxFailed(f"{handle.id} is lost: {why}", sandbox=handle.id, reason=why)

    # Putting to rest

    async def hibernate(self, handle: Handle, reason: str, *, event: Event = Event.HIBERNATE_ASKED) -> None:
        """Keep its files only; its lock is held.  Raises: Conflict. CleanupFailed: it is hibernated, and what is left is tried again."""
        reach("hibernate.begin")
        facts: dict[str, Json] = {"reason": reason}
        commands = await move(self._kit, handle, event, HIBERNATE, Phase.INTENT, facts, reason)
        if Command.PARK in commands:
            reach("hibernate.recorded")
            await self._park(handle)

    async def _park(self, handle: Handle) -> None:
        handle.ending.set()  # commands that lose their connection now hear why
        try:
            await (
                handle.runtime.destroy(handle.id)
                if handle.info.state is State.COLD
                else handle.runtime.park(handle.id)
            )
        except Exception as exc:
            await self._leave(handle, exc)
            raise
        reach("hibernate.parked")
        handle.unparked = False
        try:
            await cut_off(self._kit, handle)
            await self.lose_execs(handle.id, "its sandbox was hibernated while no engine followed it")
            await note(self._kit, handle, HIBERNATE)
            reach("hibernate.done")
        finally:
            if handle.info.state is not State.HIBERNATED:  # that one goes on with its volumes when it wakes
                self._claims.give_back(handle.id)
            self._janitor.solved(handle.id)
            handle.ending = asyncio.Event()
            if handle.info.state in DORMANT:
                self._kit.table.drop(handle.id)

    async def lose_execs(self, sandbox: SandboxId, why: str) -> None:
        """Commands that have no outcome, and will have none, get a record that says so."""
        for one in await self._kit.journal.unanswered(sandbox):
            if one.act == drafts.EXEC:
                lost = drafts.exec_failure(sandbox, ExecId(one.ref), UnknownOutcome(why))
                await self._kit.journal.append(lost)

    async def _leave(self, handle: Handle, error: Exception) -> None:
        """Something of it runs on; it stays in the table until that has ended."""
        handle.unparked = True
        await self._janitor.take(handle.id, lambda: self._rest(handle), error, "hibernate")

    async def _rest(self, handle: Handle) -> None:
        async with handle.lock:
            if handle.unparked and handle.info.state in DORMANT:
                await self._park(handle)

    async def finish(self, info: SandboxInfo) -> None:
        """One that is recorded as hibernated and runs: an engine died on the way, in either direction."""
        with suppress(NotFound):
            handle = self._kit.table.find(info.id) or self._lives.adopt(info)
            handle.unparked = True
            await self._rest(handle)
