"""What a long build is doing, for whoever waits: bars on a terminal, else lines, with ``--verbose`` more of them.

All of it goes to standard error. With ``--json`` nothing is shown: programs read that.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from dsec.cli.output import STDERR, is_tty, printable
from dsec.model.images import Progress, Step

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_LOG: Final = logging.getLogger("dsec.progress")
_UNASKED: Final = 5.0
_UNITS: Final = {"bytes": (1e6, "MB")}


def shown(quiet: bool = False) -> Progress | None:
    """Where steps go; None: nowhere."""
    if quiet:
        return None
    return Display() if is_tty(STDERR) else Lines()


class Lines:
    """One line for each step that begins, when ``--verbose`` asks for them; else for each that takes longer than a moment.

    Args:
        after: seconds of a step until it is told unasked.
    """

    def __init__(self, after: float = _UNASKED) -> None:
        self._after = after
        self._lock = threading.Lock()
        self._last = ""
        self._timer: threading.Timer | None = None

    def __call__(self, step: Step) -> None:
        with self._lock:
            what = "" if step.over else step.what
            if what == self._last:
                return
            self._last = what
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if what and _LOG.isEnabledFor(logging.INFO):
                _LOG.info("%s", printable(what))
            elif what:
                self._timer = threading.Timer(self._after, _LOG.warning, ("%s", printable(what)))
                self._timer.daemon = True
                self._timer.start()


class Display:
    """One line on a terminal that changes, and is gone when the build is over. Nothing is loaded before the first step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._what = ""

    def __call__(self, step: Step) -> None:
        with self._lock:
            if step.over:
                self._end()
                return
            if self._bars is None:
                self._bars = _bars()
                self._bars.start()
                atexit.register(self._end)  # the cursor comes back, whatever ends us
            if self._task is None or step.what != self._what:
                self._begin(self._bars, step)
            if self._task is not None:
                self._bars.update(self._task, completed=step.done, amount=amount(step))

    def _begin(self, bars: Bars, step: Step) -> None:
        if self._task is not None:
            bars.remove_task(self._task)
        self._what = step.what
        self._task = bars.add_task(printable(step.what), total=step.total or None, amount="")

    def _end(self) -> None:
        if self._bars is not None:
            atexit.unregister(self._end)
            self._bars.stop()
        self._bars = self._task = None


def amount(step: Step) -> str:
    """How far it is, as people read it: ``12.0 of 30.5 MB``, ``34 of 81 packages``, ``34 packages``, or ""."""
    if not step.unit:
        return ""
    size, unit = _UNITS.get(step.unit, (1, step.unit))
    form = ".1f" if size != 1 else ".0f"
    done = format(step.done / size, form)
    return f"{done} of {format(step.total / size, form)} {unit}" if step.total else f"{done} {unit}"


def _bars() -> Bars:
    from rich.console import Console  # noqa: PLC0415 - only who waits for a build pays for loading it
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Made  # noqa: PLC0415

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )
    return Made(
        *columns,
        console=Console(stderr=True),
        transient=True,
        get_time=time.monotonic,
        redirect_stdout=False,  # what is printed meanwhile goes where it always goes
        redirect_stderr=False,
    )
