"""Time, as the engine reads it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from dsec.core.deadlines import Moment


class Clock(Protocol):
    """Two clocks that a test can move by hand."""

    def now(self) -> Moment:
        """This moment."""

    def boot(self) -> float:
        """CLOCK_BOOTTIME, in seconds."""


class SystemClock:
    """This machine's clocks. The first :meth:`now` reads a file; later ones do not block."""

    def __init__(self) -> None:
        self._boot_id = ""

    def now(self) -> Moment:
        if not self._boot_id:
            self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return Moment(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), self._boot_id)

    def boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
