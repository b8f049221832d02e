"""How often projects may ask: a bucket for each, that fills at its rate and holds two seconds of it.

Of the library `limits` no strategy is such a bucket, with rates below one a second that change while it runs, and its store in memory begins a thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dsec.errors import Busy

BURST: Final = 2.0  # seconds' worth
_MOST: Final = (
    10_000  # buckets; the one that was asked longest ago is forgotten, and is full when it is asked again
)


class Rates:
    """Args: clock: seconds, forward only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = (
            OrderedDict()
        )  # what is in it, and when that was so

    def take(self, project: str, rate: float) -> None:
        """One request, of ``rate`` a second, 0 = as many as it likes.  Raises: Busy: it has to wait; ``facts["retry_after"]`` says how many seconds."""
        if not rate:
            return
        now, most = self._clock(), max(1.0, rate * BURST)
        left, since = self._buckets.get(project, (most, now))
        left = min(most, left + (now - since) * rate)
        if left < 1.0:
            self._put(project, left, now)
            wait = round((1.0 - left) / rate, 3)
            raise Busy(
                f"project {project} may ask {rate:g} times a second, and asks more often",
                hint=f"try again in {wait:g} s",
                retry_after=wait,
                quota="rate",
                limit=rate,
            )
        self._put(project, left - 1.0, now)

    def _put(self, project: str, left: float, now: float) -> None:
        self._buckets[project] = (left, now)
        self._buckets.move_to_end(project)
        if len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
