"""Commands whose end is recorded, and which their guest may forget: few messages for many of them."""

from __future__ import annotations

import asyncio
from typing import Final

from dsec.errors import DsecError
from dsec.model.execs import Exit
from dsec.node.handles import Handle
from dsec.node.run import Run
from dsec.node.work import Work
from dsec.ports.guest import Guest

TOLD_MOST: Final = 64  # ended commands that a guest is let to forget together
TOLD_BYTES: Final = 4096  # of output, beyond which it is told at once: it keeps the last of it
TOLD_AFTER: Final = 0.2  # seconds
TOLD_KEPT: Final = 256


class Told:
    """See the module."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def ended(self, run: Run, exit_: Exit) -> None:
        """Its end is recorded: the guest may forget it: soon and together with others, unless it holds much of it."""
        handle = run.handle
        handle.told.append(run.id)
        if len(handle.told) >= TOLD_MOST or exit_.stdout_bytes + exit_.stderr_bytes > TOLD_BYTES:
            self._work.spawn(self._forget(handle))
        elif len(handle.told) == 1:
            self._work.spawn(self._forget_soon(handle))

    async def _forget_soon(self, handle: Handle) -> None:
        await asyncio.sleep(TOLD_AFTER)
        await self._forget(handle)

    async def _forget(self, handle: Handle) -> None:
        guest: Guest | None = handle.guest
        if guest is None or guest.lost:
            del handle.told[:-TOLD_KEPT]  # the rest with the next ones, over a new connection
            return
        told, handle.told = handle.told, []
        if not told:
            return
        try:
            await guest.forget(*told)
        except DsecError:
            if not guest.lost:  # with the next ones; else whoever connects next finds them ended, recorded, and forgets them then
                handle.told[:0] = told[-TOLD_KEPT:]
