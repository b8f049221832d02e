"""How many sandboxes of each kind shall be ready: decided from arrivals, without a clock or a sandbox of its own.

The rule is the base stock of inventory theory: have as many as are expected to be asked for while one is made (arrivals a second
times seconds to make one), and twice its standard deviation on top, arrivals being taken for Poisson's. What others do, and what
was taken of it:

- Knative's autoscaler looks at two windows, 60 s and a tenth of it, and obeys the shorter one when that asks for more; its last
  replica goes when nobody came for the whole window (knative.dev/docs/serving/autoscaling/kpa-specific). Hence ``STEADY``, ``SUDDEN``
  and ``IDLE``, which is longer: a ready sandbox costs a megabyte, not a pod.
- AWS Lambda sizes provisioned concurrency as requests a second times seconds each, and some on top
  (docs.aws.amazon.com/lambda/latest/dg/provisioned-concurrency.html): the same product.
- Kubernetes' agent-sandbox keeps a fixed number (``SandboxWarmPool.spec.replicas``) that an autoscaler may write; Sandbox0
  (``minIdle``, ``maxIdle``) and PandaStack (a target for each template, so many refilled at once) fix it for each template. A number for
  each kind that somebody must think of is what we do without; the bounds are of the whole pool.

None of them shares one budget among kinds. Here it is shared by highest averages, as seats are among parties: the next place goes to
the kind for which a ready sandbox saves most (arrivals a second × seconds to make one, for each byte that it takes) divided by the places it would have then.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

STEADY: Final = 60.0  # seconds over which arrivals are averaged
SUDDEN: Final = 6.0  # ... to see that they have become more
IDLE: Final = (
    300.0  # seconds without any after which a kind has none ready; a burst is half forgotten by then
)
TOGETHER: Final = 0.1  # seconds: arrivals within come faster than more can be made
SPARE: Final = 2.0  # standard deviations above what is expected
# Seconds after the last claim before one is made: whoever claimed is about to use it, and making one takes the processor from that.
# It is made sooner where more than half of what shall be ready is missing.
QUIET: Final = 0.025
PRESSED: Final = 0.002
SCARCE: Final = 1 / 16  # of the machine's memory available: it is short of it, ...
AMPLE: Final = 1 / 8  # ... until this much is


@dataclass(slots=True)
class Demand:
    """Arrivals of one kind. Times are seconds of any clock that only goes forward.

    Attributes:
        asked: how often. last: when.
    """

    asked: int = 0
    last: float = 0.0
    _steady: float = 0.0
    _sudden: float = 0.0
    _run: int = 0  # arrivals since ``_begun``
    _begun: float = -math.inf
    _peak: float = 0.0  # of earlier runs, as of ``_begun``

    def ask(self, now: float) -> None:
        """One arrival."""
        gap = now - self.last if self.asked else math.inf
        self._steady = self._steady * math.exp(-gap / STEADY) + 1 / STEADY
        self._sudden = self._sudden * math.exp(-gap / SUDDEN) + 1 / SUDDEN
        self.asked += 1
        self.last = now
        if now - self._begun <= TOGETHER:
            self._run += 1
        else:
            self._peak = self.burst(now)
            self._begun, self._run = now, 1

    def rate(self, now: float) -> float:
        """Arrivals a second: the greater of the two averages."""
        gap = now - self.last
        return max(self._steady * math.exp(-gap / STEADY), self._sudden * math.exp(-gap / SUDDEN))

    def burst(self, now: float) -> float:
        """The most that came together, fading."""
        return max(self._run, self._peak) * math.exp(-max(now - self._begun, 0.0) * math.log(2) / IDLE)


def wanted(demand: Demand, now: float, make: float, *, latest: bool) -> int:
    """How many of a kind are worth having ready, were there room for all.

    Args:
        make: seconds that making one takes. latest: it was asked for last; one that was asked for only once is worth it only then.
    """
    if now - demand.last > IDLE or not (latest or demand.asked > 1):
        return 0
    expected = demand.rate(now) * (QUIET + make)
    return max(1, math.ceil(expected + SPARE * math.sqrt(expected)), round(demand.burst(now)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one kind would have.

    Attributes:
        wanted: places at most. first: so many of them go before everybody else's.
        saves: seconds saved for every second that one is ready. cost: bytes that one takes.
    """

    wanted: int
    saves: float
    cost: int
    first: int = 0


def shares(wishes: Sequence[Wish], places: int, memory: int) -> list[int]:
    """Places for each kind: together at most ``places`` and ``memory`` bytes."""
    given = [0] * len(wishes)
    heap = [_turn(wish, index, 0) for index, wish in enumerate(wishes) if wish.wanted]
    heapq.heapify(heap)
    while heap and places:
        index = heapq.heappop(heap)[2]
        wish = wishes[index]
        if wish.cost > memory:
            continue  # a cheaper one may still fit
        memory -= wish.cost
        places -= 1
        given[index] += 1
        if given[index] < wish.wanted:
            heapq.heappush(heap, _turn(wish, index, given[index]))
    return given


def _turn(wish: Wish, index: int, has: int) -> tuple[bool, float, int]:
    """Smallest first."""
    return has >= wish.first, -wish.saves / max(wish.cost, 1) / (has + 1), index


def pause(ready: int, target: int) -> float:
    """Seconds after the last claim before the next one is made."""
    return PRESSED if target > 1 and ready * 2 < target else QUIET


def short_of_memory(available: float, *, before: bool) -> bool:
    """Whether a machine is, of whose memory the share ``available`` is: from ``SCARCE`` on, until it is ``AMPLE`` again."""
    return available < (AMPLE if before else SCARCE)
