"""Places at which a test may end this process as if by `kill -9`: before and after every step that others may rely on.

``$DSEC_FAILPOINT=NAME`` ends it when the place is reached, ``NAME:3`` when it is reached for the third time. ``NAME:3:stop`` halts it there (SIGSTOP), so
that something else can be ended meanwhile. Unset, a place costs a look at a value.
"""

from __future__ import annotations

import os
import signal
from functools import cache
from itertools import count
from typing import Final

VARIABLE: Final = "DSEC_FAILPOINT"
STOP: Final = "stop"

NAMES: Final = (
    "create.begin",  # nothing is recorded
    "create.recorded",  # the intent is recorded, and nothing is made
    "create.made",  # it runs, and that is not recorded
    "create.done",  # recorded, and not acknowledged
    "destroy.begin",
    "destroy.recorded",
    "destroy.removed",
    "destroy.done",
    "pause.begin",
    "pause.recorded",
    "pause.frozen",
    "pause.done",
    "resume.begin",
    "resume.recorded",
    "resume.thawed",
    "resume.done",
    "snapshot.begin",
    "snapshot.recorded",
    "snapshot.taken",
    "snapshot.secured",
    "snapshot.done",
    "fork.begin",
    "fork.recorded",
    "fork.copied",
    "fork.made",
    "fork.done",
    "rollback.begin",
    "rollback.recorded",
    "rollback.ended",  # its processes and files are gone
    "rollback.made",
    "rollback.done",
    "exec.begin",
    "exec.recorded",  # the intent is recorded, and init does not know it
    "exec.started",  # init has it
    "exec.ended",  # its outcome is known, and not recorded
    "exec.done",
    "upload.begin",
    "upload.recorded",
    "upload.written",  # the files are there, and that is not recorded
    "upload.done",
    "journal.begin",  # of an append: the transaction has not begun
    "journal.written",  # and not committed
    "journal.committed",
    "wake.begin",
    "wake.recorded",
    "wake.made",
    "wake.done",
    "hibernate.begin",
    "hibernate.recorded",
    "hibernate.parked",
    "hibernate.done",
)
"""All of them."""


class _Armed:
    """The place that is to be the last one, how often it must be reached, and what happens there.

    Args:
        text: ``NAME``, ``NAME:n`` or ``NAME:n:stop``.

    Raises:
        ValueError: there is none of that name, or it is no such text.
    """

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition(":")
        times, _, act = rest.partition(":")
        if self.name not in NAMES or act not in ("", STOP):
            raise ValueError(f"${VARIABLE}: there is no failpoint {text!r}")
        self._times = int(times or 1)
        self._signal = signal.SIGSTOP if act else signal.SIGKILL
        self._reached = count(1)

    def hit(self) -> None:
        if next(self._reached) == self._times:
            os.kill(os.getpid(), self._signal)


class _Switch:
    """What is armed in this process: at first what the environment says.  Raises: ValueError."""

    def __init__(self) -> None:
        text = os.environ.get(VARIABLE, "")
        self.armed = _Armed(text) if text else None


@cache
def _switch() -> _Switch:
    """The only one."""
    return _Switch()


def arm(failpoint: str) -> None:
    """From now on this is the last place; "" = none is.  Raises: ValueError: there is none of that name."""
    _switch().armed = _Armed(failpoint) if failpoint else None


def reach(name: str) -> None:
    """This place is reached: nothing happens, unless a test wants the process to end here."""
    armed = _switch().armed
    if armed is not None and armed.name == name:
        armed.hit()
