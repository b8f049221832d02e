"""What takes events: it says so when it has them, and why when it has not."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Line(NamedTuple):
    """One event as a sink gets it. ``at``: seconds since the epoch. ``severity``: of syslog, 0 (worst) to 7. ``data``: no line end in it."""

    uid: str
    at: float
    act: str
    severity: int
    data: bytes


class Refused(Exception):  # the words of a sink to whoever exports; callers of DSec never see it
    """The sink has not taken the lines, or not all of them: they are to be sent again.

    Args:
        reason: for people, without secrets.
        after: seconds for which the sink does not want to be asked again, 0 = it did not say.
        lasting: that will not change by itself.
        too_large: fewer or smaller lines may be taken.
    """

    def __init__(
        self, reason: str, *, after: float = 0.0, lasting: bool = False, too_large: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after
        self.lasting = lasting
        self.too_large = too_large


class Sink(ABC):
    """A destination. Used by one task at a time."""

    @abstractmethod
    async def send(self, lines: Sequence[Line]) -> None:
        """Returns when it has them.  Raises: Refused."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of files and connections. Twice is not an error."""

    def reopen(self) -> None:  # noqa: B027 - only files mind
        """Begin the file anew at the next lines: it was moved away."""


class Apart:
    """Work that may block for ever, on a thread that nobody waits for at the end; one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy: asyncio.Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether what was begun has not ended yet."""
        return self._busy is not None and not self._busy.done()

    async def run(self, work: Callable[[], T], seconds: float) -> T:
        """What ``work`` returns.  Raises: Refused: it takes longer than ``seconds``, or what was begun before has not ended yet."""
        if self._busy is not None:
            await asyncio.wait([self._busy], timeout=seconds)
        if self.busy:
            raise Refused("it still does not answer")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        threading.Thread(target=_work, args=(loop, future, work), name=self._name, daemon=True).start()
        self._busy = future
        done, _ = await asyncio.wait([future], timeout=seconds)
        if not done:
            future.add_done_callback(_heard)
            raise Refused(f"it does not answer within {seconds:g} seconds")
        return future.result()


def _work(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], work: Callable[[], T]) -> None:
    try:
        value = work()
    except BaseException as error:  # noqa: BLE001 - it is raised where it was asked for
        _tell(loop, partial(_fail, future, error))
    else:
        _tell(loop, partial(_succeed, future, value))


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has been closed: nobody waits
        loop.call_soon_threadsafe(what)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _succeed(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _heard(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()
