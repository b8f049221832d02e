"""Who is being answered, and for how long he may be: whoever's key ends is told so, and leaves.

A key is looked at when a request comes in. Answers that last (events, WebSockets, ports, long waits) outlive that look, so that the keys
behind them are looked at again each second. Streams end by themselves, with the reason; what has not ended a moment later is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from dsec.errors import DsecError, Unauthenticated
from dsec.model.tenants import Principal
from dsec.ports.gate import Gate

log: Final = logging.getLogger("dsec.server")
LOOK_SECONDS: Final = 1.0
GRACE_SECONDS: Final = 0.5  # for streams to say why they end


class Stop(asyncio.Event):
    """Set when an answer is to end. ``why``: its key has ended; None: the server stops."""

    why: DsecError | None = None


class Stay:
    """All requests of one principal that are being answered."""

    __slots__ = ("principal", "stop", "tasks")

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self.stop = Stop()
        self.tasks: set[asyncio.Task[object]] = set()


class ServerStop(asyncio.Event):
    """Set when the server takes no more; so are the stops of all who are here."""

    def __init__(self, stays: Stays) -> None:
        super().__init__()
        self._stays = stays

    def set(self) -> None:
        super().set()
        self._stays.stop()


class Stays:
    """Everybody who is being answered, by principal. The owner, who needs no key, stays as long as he likes."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._here: dict[Principal, Stay] = {}

    def __len__(self) -> int:
        return len(self._here)

    def enter(self, principal: Principal) -> Stay:
        """This task answers a request of that principal; :meth:`leave` when it is done."""
        stay = self._here.get(principal)
        if stay is None:
            stay = self._here[principal] = Stay(principal)
        task = asyncio.current_task()
        assert task is not None
        stay.tasks.add(task)
        return stay

    def leave(self, stay: Stay) -> None:
        """It was answered, or is not going to be."""
        task = asyncio.current_task()
        assert task is not None
        stay.tasks.discard(task)
        if not stay.tasks and self._here.get(stay.principal) is stay:
            del self._here[stay.principal]

    def stop(self) -> None:
        """All streams are to end: the server stops."""
        for stay in self._here.values():
            stay.stop.set()

    async def watch(self) -> None:
        """Look at the keys of all who are here, each second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Let those leave whose keys have ended."""
        gone = [stay for stay in tuple(self._here.values()) if await self._has_ended(stay)]
        if not gone:
            return
        for stay in gone:
            if self._here.get(stay.principal) is stay:  # who comes in from now on is looked at by himself
                del self._here[stay.principal]
            stay.stop.set()
        await asyncio.sleep(GRACE_SECONDS)
        for task in [task for stay in gone for task in stay.tasks]:
            task.cancel()

    async def _has_ended(self, stay: Stay) -> bool:
        try:
            await self._gate.check(stay.principal)
        except Unauthenticated as error:
            stay.stop.why = error
            return True
        except Exception as error:  # noqa: BLE001 - it cannot be told now: it is looked at again in a second
            log.warning("keys: %s", error)
        return False
