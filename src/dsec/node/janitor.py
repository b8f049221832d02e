"""Clean-ups that did not succeed at once: recorded, tried again, never forgotten."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from dsec.errors import DsecError
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Phase
from dsec.model.sandbox import Problem
from dsec.node.clock import Clock
from dsec.node.work import Cleanup, Work
from dsec.ports.journal import Journal

FIRST_WAIT: Final = 0.5  # seconds; doubles up to LONGEST_WAIT
LONGEST_WAIT: Final = 60.0
HINT: Final = "`dsec events ID` tells what came before; it is tried again until it succeeds"


class Janitor:
    """Retries until a clean-up has succeeded."""

    def __init__(self, journal: Journal, work: Work, clock: Clock, *, first_wait: float = FIRST_WAIT) -> None:
        self._journal = journal
        self._work = work
        self._clock = clock
        self._first_wait = first_wait
        self._problems: dict[SandboxId, Problem] = {}

    def problems(self) -> tuple[Problem, ...]:
        """What is not cleaned up yet, oldest first."""
        return tuple(self._problems.values())

    def solved(self, sandbox: SandboxId) -> None:
        """Somebody else's attempt succeeded."""
        self._problems.pop(sandbox, None)

    async def take(
        self, sandbox: SandboxId, cleanup: Cleanup, error: Exception, what: str = "destroy"
    ) -> None:
        """Take over a clean-up that failed with ``error``. Twice the same is one."""
        if sandbox in self._problems:
            return
        self._note(sandbox, what, error, self._first_wait)
        self._work.spawn(self._until_done(sandbox, cleanup, what))
        fact: dict[str, str | int] = {"what": what, "message": str(error)}
        draft = Draft(
            chain=sandbox,
            act="sandbox.cleanup",
            phase=Phase.NOTE,
            payload={**fact, "outcome": "cleanup_failed"},
        )
        with suppress(DsecError):  # a full disk must not hide the problem itself
            await self._journal.append(draft)

    def _note(self, sandbox: SandboxId, what: str, error: Exception, wait: float) -> None:
        seen = self._problems.get(sandbox)
        self._problems[sandbox] = Problem(
            sandbox=sandbox,
            what=what,
            since=seen.since if seen else self._clock.now().wall,
            attempts=seen.attempts + 1 if seen else 1,
            error=str(error),
            next_try=self._clock.now().wall + wait,
            hint=error.hint if isinstance(error, DsecError) and error.hint else HINT,
        )

    async def _until_done(self, sandbox: SandboxId, cleanup: Cleanup, what: str) -> None:
        wait = self._first_wait
        while sandbox in self._problems:
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)
            try:
                await cleanup()
            except Exception as exc:  # noqa: BLE001 - whatever it is: the thing is still there
                self._note(sandbox, what, exc, wait)
            else:
                self.solved(sandbox)
