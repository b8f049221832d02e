"""Problems are told to somebody who can act: by a command, or by a webhook.

What is told waits in a bounded buffer and is sent by one task, a batch at a time and one batch a second at most, until it was taken: at
least once, as long as this process lives. What sending fails at is a problem itself, seen where the others are; it holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from dsec.core.alarms import Alarms
from dsec.model.alerts import Alarm
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Problem
from dsec.wire.values import encode

log: Final = logging.getLogger("dsec.alerts")
LOOK: Final = 1.0  # seconds between two looks, and between two batches
BUFFER: Final = 1000  # alarms that wait to be sent; beyond it the oldest go, and are counted
BATCH: Final = 100
FIRST_WAIT: Final = 1.0  # seconds after a failure, doubling
LONGEST_WAIT: Final = 60.0
NOBODY: Final = SandboxId("")
WHAT: Final = "alert"
HINT: Final = "see that the alert's command or URL of the settings works; alarms are kept and sent again"

Look = Callable[[], Awaitable[Sequence[Problem]]]


class Sender(ABC):
    """Where batches go."""

    @abstractmethod
    async def send(self, body: bytes) -> None:
        """Deliver JSON.  Raises: OSError, TimeoutError, RuntimeError: it was not taken."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what it holds."""


class Alerts:
    """Args: look: all problems. persists: seconds after which one is told again. wait: seconds between looks and batches, and before the first repetition."""

    def __init__(
        self,
        look: Look,
        sender: Sender,
        *,
        persists: float,
        clock: Callable[[], float] = time.time,
        wait: float = LOOK,
    ) -> None:
        self._look = look
        self._sender = sender
        self._alarms = Alarms(persists)
        self._clock = clock
        self._wait = wait
        self._buffer: deque[Alarm] = deque()
        self._waiting = asyncio.Event()
        self.dropped = 0
        self.sent = 0
        self._problem: Problem | None = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def problems(self) -> tuple[Problem, ...]:
        """That alarms cannot be sent, if so."""
        return () if self._problem is None else (self._problem,)

    def start(self) -> None:
        """Begin to look and to send."""
        loop = asyncio.get_running_loop()
        self._tasks = (loop.create_task(self._watch()), loop.create_task(self._deliver()))

    async def close(self) -> None:
        """End. What was not sent is lost with this process, and told anew by the next one if it is still so."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._sender.close()

    async def _watch(self) -> None:
        while True:
            try:
                found = self._alarms.look(await self._look(), self._clock())
            except Exception as error:  # noqa: BLE001 - whatever it was, the next look is another try
                log.warning("problems could not be looked at: %s", error)
                found = []
            for alarm in found:
                if len(self._buffer) >= BUFFER:
                    self._buffer.popleft()
                    self.dropped += 1
                self._buffer.append(alarm)
                self._waiting.set()
            await asyncio.sleep(self._wait)

    async def _deliver(self) -> None:
        wait = self._wait
        while True:
            await self._waiting.wait()
            batch = [self._buffer[n] for n in range(min(BATCH, len(self._buffer)))]
            dropped = self.dropped
            try:
                await self._sender.send(encode({"alarms": batch, "dropped": dropped}))
            except Exception as error:  # noqa: BLE001 - alarms are kept, whatever failed
                self._failed(error, wait)
                await asyncio.sleep(wait)
                wait = min(wait * 2, LONGEST_WAIT)
                continue
            wait = self._wait
            self._problem = None
            self._forget(batch, dropped)
            await asyncio.sleep(self._wait)

    def _forget(self, batch: list[Alarm], dropped: int) -> None:
        for alarm in batch:
            if self._buffer and self._buffer[0] is alarm:  # else it was dropped meanwhile, and sent even so
                self._buffer.popleft()
        self.sent += len(batch)
        self.dropped -= dropped
        if not self._buffer:
            self._waiting.clear()

    def _failed(self, error: Exception, wait: float) -> None:
        now = self._clock()
        text = str(error) or type(error).__name__
        if self._problem is None:
            log.warning("alarms could not be sent: %s", text)
        self._problem = Problem(
            sandbox=NOBODY,
            what=WHAT,
            since=now if self._problem is None else self._problem.since,
            attempts=1 if self._problem is None else self._problem.attempts + 1,
            error=text,
            kind=WHAT,
            next_try=now + wait,
            hint=HINT,
        )


class CommandSender(Sender):
    """A program that reads a batch from its standard input; run without a shell, in a clean environment and a session of its own."""

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command = tuple(command)
        self._timeout = timeout

    async def send(self, body: bytes) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._timeout):
                await process.communicate(body)
        except TimeoutError:
            raise TimeoutError(f"{self._command[0]} did not end within {self._timeout:g} s") from None
        finally:
            with suppress(ProcessLookupError):  # whatever it started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise RuntimeError(f"{self._command[0]} ended with exit code {process.returncode}")

    async def close(self) -> None:
        """Nothing is held between batches."""
