"""Sides that are compared take turns in blocks.

One and one, each measurement would begin with the caches and the processor as the other side left them, and with the
engine emptying what it had just answered for: nobody's steady state. In blocks of :data:`BLOCK` each side is measured
as it runs when it runs, and a machine that becomes faster or slower meanwhile does so for all. No measurement of a block is left
out: the first ones, which feel the change, are too few to move a median, and they count in p99.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

BLOCK: Final = 25
Side = Callable[[int], object]
"""Does its operation that many times."""


def in_turn(n: int, sides: Sequence[Side], *, block: int = BLOCK) -> None:
    """Every side ``n`` times, in blocks, one after the other."""
    for done in range(0, n, block):
        count = min(block, n - done)
        for side in sides:
            side(count)


def repeated(operation: Callable[[], object]) -> Side:
    """A side that does one thing after the other."""

    def side(count: int) -> None:
        for _ in range(count):
            operation()

    return side


def timed_into(times: list[int], operation: Callable[[], int]) -> Side:
    """A side whose operation tells how long it took."""
    return repeated(lambda: times.append(operation()))


def on_loop(runner: asyncio.Runner, operation: Callable[[], Coroutine[None, None, object]]) -> Side:
    """A side that awaits one thing after the other, on a loop that stands still while others have their turn."""

    async def some(count: int) -> None:
        for _ in range(count):
            await operation()

    def side(count: int) -> None:
        runner.run(some(count))

    return side
