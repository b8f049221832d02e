"""Whether there is memory for one more sandbox: by what is free and what such sandboxes really take, not by what they may take.

Limits may be over-committed: a sandbox that may take 512 MiB and takes 20 counts as 20. What is free now already lacks what running
ones have; only what was made within the last :data:`YOUNG` seconds has not yet taken what it will, and counts as expected until then.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from dsec.errors import Busy
from dsec.model.sandbox import MIB, SandboxSpec

MOST_KINDS: Final = 256
YOUNG: Final = 2.0  # seconds until what one takes shows in what is free
LEAST: Final = 4 * MIB  # of one: its first process, and what the kernel has of it
GUESSED_LEAST: Final = 16 * MIB
GUESSED_SHARE: Final = 8  # of the limit, until one was measured
PRIOR: Final = 4  # measurements that weigh as much as the guess
ENOUGH: Final = 8 * PRIOR
LATEST: Final = 0.02  # weight of a measurement in the average of very many
RESERVE_SHARE: Final = 16  # of the machine's memory
RESERVE_LEAST: Final = 256 * MIB
RETRY: Final = 1.0  # seconds

Kind = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: that may be used here at all, and that could still be had now."""

    total: int
    available: int


def usual_reserve(total: int) -> int:
    """Bytes that sandboxes are not given: the engine, the kernel and everybody else live on them."""
    return min(max(total // RESERVE_SHARE, RESERVE_LEAST), total // 4)


def kind_of(spec: SandboxSpec) -> Kind:
    """Sandboxes that are expected to take alike."""
    return spec.level.value, spec.template or spec.base_digest or spec.base, spec.limits.memory_mib


@dataclass(slots=True)
class _Average:
    mean: float
    square: float = 0.0  # of deviations, on average
    count: int = PRIOR

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(1 / self.count, LATEST)
        off = value - self.mean
        self.mean += weight * off
        self.square = (1 - weight) * (self.square + weight * off * off)


class Expectations:
    """What one sandbox of each kind takes, learnt from running ones."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, _Average] = OrderedDict()

    def learn(self, spec: SandboxSpec, measured: int) -> None:
        """One that runs takes so many bytes."""
        kind = kind_of(spec)
        average = self._kinds.get(kind)
        if average is None:
            average = self._kinds[kind] = _Average(float(_guess(spec)))
        self._kinds.move_to_end(kind)
        average.add(float(measured))
        while len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)

    def knows(self, spec: SandboxSpec) -> bool:
        """Whether enough were measured that the guess no longer matters much."""
        average = self._kinds.get(kind_of(spec))
        return average is not None and average.count >= ENOUGH

    def of(self, spec: SandboxSpec) -> int:
        """Bytes: the average and half a standard deviation, never more than its limit."""
        average = self._kinds.get(kind_of(spec))
        expected = _guess(spec) if average is None else average.mean + math.sqrt(average.square) / 2
        limit = spec.limits.memory_mib * MIB
        return min(max(round(expected), LEAST), limit)


def _guess(spec: SandboxSpec) -> int:
    limit = spec.limits.memory_mib * MIB
    return min(max(limit // GUESSED_SHARE, GUESSED_LEAST), limit)


def check_memory(memory: Memory, *, reserve: int, promised: int, needed: int) -> None:
    """Whether ``needed`` bytes can be given beside those that are ``promised`` already.

    Raises:
        Busy: ``facts`` holds all these numbers, in MiB, and ``retry_after`` in seconds.
    """
    left = memory.available - reserve - promised
    if needed <= left:
        return
    facts = {
        "available_mib": memory.available // MIB,
        "reserve_mib": reserve // MIB,
        "promised_mib": promised // MIB,
        "needed_mib": -(-needed // MIB),
    }
    raise Busy(
        f"memory is short: {facts['available_mib']} MiB are available, of which {facts['reserve_mib']} are kept back and "
        f"{facts['promised_mib']} promised; {facts['needed_mib']} are expected to be needed",
        hint="try again later; or destroy or hibernate sandboxes that nobody uses",
        reason="memory",
        retry_after=RETRY,
        **facts,
    )
