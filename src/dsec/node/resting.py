"""Looks at sandboxes that nobody uses, and freezes or hibernates those that need not run. What decides is :mod:`dsec.core.residence`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from dsec.core.residence import Decision, Facts, Residence, Stay, decide
from dsec.errors import DsecError
from dsec.model.sandbox import Flag, State
from dsec.node.handles import Handle
from dsec.node.kit import Kit
from dsec.node.lifecycle import Lifecycle

log: Final = logging.getLogger("dsec.resting")
LOOKS: Final = 8  # between two thresholds
SHORTEST: Final = 0.25  # seconds between two looks
LONGEST: Final = 15.0
LONGEST_WAIT: Final = 60.0
AFTER_FAILURE: Final = 60.0
AT_ONCE: Final = 64  # sandboxes that one look puts to rest; the others with the next


class Resting:
    """See the module.

    Args:
        memory_left: the share of the machine's memory that is available; it may block.
    """

    def __init__(
        self, residence: Residence, kit: Kit, lifecycle: Lifecycle, memory_left: Callable[[], float]
    ) -> None:
        self._residence = residence
        self._kit = kit
        self._lifecycle = lifecycle
        self._memory_left = memory_left
        self._left = 1.0

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        times = [each for each in (self._residence.freeze, self._residence.hibernate) if each]
        return min(max(min(times, default=LONGEST) / LOOKS, SHORTEST), LONGEST)

    async def run(self) -> None:
        """For ever."""
        while self._residence.on:
            await asyncio.sleep(self.every)
            await self.look()

    async def look(self) -> None:
        """Look at every sandbox once."""
        self._left = await asyncio.to_thread(self._memory_left)
        now, done = self._kit.clock.boot(), 0
        for handle in self._kit.table:
            if done >= AT_ONCE:
                return
            if handle.look_at > now or not _may_rest(handle) or self._assess(handle).stay is _now(handle):
                continue
            try:
                done += await self._rest(handle)
            except (DsecError, OSError) as exc:
                log.warning("%s could not be put to rest: %s", handle.id, exc)
                handle.look_at = now + AFTER_FAILURE

    def told(self, handle: Handle) -> str:
        """Whether it stays running, and why, in words; "" = nothing decides that here."""
        if not self._residence.on:
            return ""
        if handle.info.state is State.PAUSED and not handle.frozen:
            return "paused: somebody wants it so"
        if handle.info.state not in (State.RUNNING, State.PAUSED):
            return ""
        at, words = handle.decided
        return f"{_now(handle)}: {words if at >= handle.used else self._assess(handle).reason}"

    def _assess(self, handle: Handle, processes: int = 0, cpu: float = -1.0) -> Decision:
        return decide(self._facts(handle, processes, cpu), self._residence)

    def _facts(self, handle: Handle, processes: int, cpu: float) -> Facts:
        runs = tuple(handle.runs.values())
        attended = sum(run.attended for run in runs)
        flags, spec = handle.info.flags, handle.info.spec
        return Facts(
            quiet=max(self._kit.clock.boot() - handle.used, 0.0),
            gap=handle.gap,
            acts=handle.busy - len(runs) + attended,
            commands=len(runs),
            processes=processes,
            cpu=cpu,
            memory_left=self._left,
            frozen=handle.frozen,
            can_freeze=Flag.PAUSE in flags,
            can_hibernate=Flag.HIBERNATE in flags,
            hibernate=spec.hibernate,
            ends_idle=spec.idle > 0,
        )

    async def _rest(self, handle: Handle) -> bool:
        """Put it to rest, if that is still right when its figures are known and it stands still for us. Whether anything was done."""
        figures = await handle.runtime.metrics(handle.id)
        processes = figures.pids - 1 if figures.pids > 0 else -1
        first = not handle.seen_cpu[0] and processes != 0 and not handle.frozen
        cpu = self._cpu(handle, figures.cpu_seconds)
        if first:
            return False  # whether its processes are at work is known with the next look
        async with handle.lock:
            if not _may_rest(handle, ours=True):
                return False
            wanted, now = self._assess(handle, processes, cpu), self._kit.clock.boot()
            handle.decided = (now, wanted.reason)
            handle.look_at = now + min(wanted.again, LONGEST_WAIT)
            if wanted.stay is _now(handle):
                return False
            if wanted.stay is Stay.FROZEN:
                await self._lifecycle.freeze(handle, wanted.reason)
            elif wanted.stay is Stay.HIBERNATED:
                await self._lifecycle.dormancy.hibernate(handle, wanted.reason)
            return wanted.stay is not Stay.RUNNING

    def _cpu(self, handle: Handle, seconds: float) -> float:
        """The share of one CPU that it used since the last look; -1 = not known."""
        now = self._kit.clock.boot()
        at, before = handle.seen_cpu
        handle.seen_cpu = (now, seconds)
        if seconds < 0 or not at or now <= at:
            return -1.0
        return max(seconds - before, 0.0) / (now - at)


def _may_rest(handle: Handle, *, ours: bool = False) -> bool:
    """Nothing is being done to it (but by us, who hold its lock), and nobody said where it is to be."""
    state = handle.info.state
    resident = state is State.RUNNING or (state is State.PAUSED and handle.frozen)
    return resident and (ours or not handle.lock.locked()) and not handle.remaking and not handle.unsettled


def _now(handle: Handle) -> Stay:
    return Stay.FROZEN if handle.info.state is State.PAUSED else Stay.RUNNING
