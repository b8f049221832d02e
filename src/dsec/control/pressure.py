"""The machine's memory: read now and then, never by whoever waits for it, and promised to what has just been made."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from dsec.core.admission import YOUNG, Expectations, Kind, Memory, check_memory, kind_of, usual_reserve
from dsec.model.sandbox import SandboxSpec

FRESH: Final = 0.2  # seconds for which a reading is as good as new
STALE: Final = 1.0  # ... after which a new one is waited for
LEARN_EVERY: Final = 1.0  # seconds
QUICKLY: Final = 0.1  # ... while some are made of which is not known what they take
SAMPLE: Final = 16  # running sandboxes that are measured each time

Read = Callable[[], Memory | None]
Sample = tuple[SandboxSpec, int]
Measure = Callable[[int], Sequence[Sample]]


@dataclass(slots=True)
class _Fresh:
    """Of one kind, like ``spec``: how many are being made, and until when each that was just made counts; the oldest first."""

    spec: SandboxSpec
    making: int = 0
    young: deque[float] = field(default_factory=deque)


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
        self._fresh: dict[Kind, _Fresh] = {}

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
        """Bytes that are expected of what is being made, or was made so lately that they do not show yet; by what is known now."""
        now, total = self._clock(), 0
        for kind, fresh in tuple(self._fresh.items()):
            while fresh.young and fresh.young[0] <= now:
                fresh.young.popleft()
            count = fresh.making + len(fresh.young)
            if count:
                total += count * self.expectations.of(fresh.spec)
            else:
                del self._fresh[kind]
        return total

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
        fresh = self._fresh.setdefault(kind_of(spec), _Fresh(spec))
        fresh.making += count
        try:
            yield
        finally:
            fresh.making -= count
        fresh.young.extend([self._clock() + YOUNG] * count)
        self._fresh[kind_of(spec)] = fresh

    def ended(self, spec: SandboxSpec) -> None:
        """One of that kind has ended: one of it that is young no longer counts, if there is such a one."""
        fresh = self._fresh.get(kind_of(spec))
        if fresh is not None and fresh.young:
            fresh.young.popleft()

    # Learning

    async def learn(self, measure: Measure, *, every: float = LEARN_EVERY) -> None:
        """For ever: measure some of those that run."""
        while True:
            guessing = any(not self.expectations.knows(fresh.spec) for fresh in self._fresh.values())
            await asyncio.sleep(min(every, QUICKLY) if guessing else every)
            for spec, size in measure(SAMPLE):
                self.expectations.learn(spec, size)

    async def close(self) -> None:
        """Wait until nothing is being read."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
