"""The machine's memory: read now and then, never by whoever waits for it, and promised to what has just been made."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from dsec.core.admission import YOUNG, Expectations, Kind, Memory, check_memory, kind_of, usual_reserve
from dsec.model.sandbox import SandboxSpec

FRESH: Final = 0.2  # seconds for which a reading is as good as new
STALE: Final = 1.0  # ... after which a new one is waited for
LEARN_EVERY: Final = 1.0  # seconds
SAMPLE: Final = 16  # running sandboxes that are measured each time

Read = Callable[[], Memory | None]
Sample = tuple[SandboxSpec, int]
Measure = Callable[[int], Awaitable[Sequence[Sample]]]


class Pressure:
    """Whether there is memory for more.

    Args:
        read: the memory of this machine; called in a thread. None: nobody tells, and nothing is refused.
        reserve: bytes that are never given away; None: as usual for a machine of that size.
        clock: seconds, forward only.
    """

    def __init__(
        self, read: Read, *, reserve: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.expectations = Expectations()
        self._read = read
        self._reserve = reserve
        self._clock = clock
        self._memory: Memory | None = None
        self._at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._making = 0  # bytes expected of what is being made
        self._young: dict[
            Kind, deque[tuple[float, int]]
        ] = {}  # until when they count, and bytes of each; oldest first
        self._young_bytes = 0

    # Figures

    @property
    def memory(self) -> Memory | None:
        """As last read."""
        return self._memory

    @property
    def reserve(self) -> int:
        """Bytes that are never given away."""
        if self._reserve is not None or self._memory is None:
            return self._reserve or 0
        return usual_reserve(self._memory.total)

    def promised(self) -> int:
        """Bytes that are expected of what is being made, or was made so lately that they do not show yet."""
        now = self._clock()
        for kind in tuple(self._young):
            young = self._young[kind]
            while young and young[0][0] <= now:
                self._young_bytes -= young.popleft()[1]
            if not young:
                del self._young[kind]
        return self._making + self._young_bytes

    # Promising

    async def look(self) -> None:
        """Have a reading that is not stale; one that is a little older is renewed meanwhile."""
        age = self._clock() - self._at
        if age <= FRESH:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._renew())
        if age > STALE:
            await asyncio.shield(self._reading)

    async def _renew(self) -> None:
        self._memory = await asyncio.to_thread(self._read)
        self._at = self._clock()

    @contextmanager
    def room(self, spec: SandboxSpec, count: int) -> Iterator[None]:
        """Memory for so many, by the last reading. It stays promised for a while after they were made; not when they could not be.

        Raises:
            Busy: memory is short.
        """
        size = self.expectations.of(spec)
        if self._memory is not None:
            check_memory(self._memory, reserve=self.reserve, promised=self.promised(), needed=size * count)
        self._making += size * count
        try:
            yield
        finally:
            self._making -= size * count
        young = self._young.setdefault(kind_of(spec), deque())
        young.extend([(self._clock() + YOUNG, size)] * count)
        self._young_bytes += size * count

    def ended(self, spec: SandboxSpec) -> None:
        """One of that kind has ended: one of it that is young no longer counts, if there is such a one."""
        young = self._young.get(kind_of(spec))
        if young:
            self._young_bytes -= young.popleft()[1]

    # Learning

    async def learn(self, measure: Measure, *, every: float = LEARN_EVERY) -> None:
        """For ever: measure some of those that run."""
        while True:
            await asyncio.sleep(every)
            for spec, size in await measure(SAMPLE):
                self.expectations.learn(spec, size)

    async def close(self) -> None:
        """Wait until nothing is being read."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
