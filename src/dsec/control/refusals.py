"""Keys that were refused: counted always, recorded at a bounded rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from dsec.model.actors import LOCAL
from dsec.model.journal import Draft, Json, Phase
from dsec.ports.journal import Journal

ACT: Final = "key.refused"
SECONDS: Final = 60.0  # between two records


class Refusals:
    """Args: clock: seconds, forward only."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock
        self._all: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()
        self._told: float | None = None

    def count(self, reason: str) -> None:
        """``reason``: one of few words."""
        self._all[reason] += 1
        self._untold[reason] += 1

    @property
    def counts(self) -> Mapping[str, int]:
        """By reason, since the engine was opened."""
        return dict(self._all)

    async def tell(self, *, last: bool = False) -> None:
        """One record of all that were refused since the last one, if that is a minute ago, or this is the ``last``.  Raises: as the journal."""
        now = self._clock()
        if not self._untold or (self._told is not None and now - self._told < SECONDS and not last):
            return
        untold, self._untold = self._untold, Counter()
        reasons: dict[str, Json] = dict(sorted(untold.items()))
        payload: dict[str, Json] = {"count": untold.total(), "reasons": reasons}
        try:
            await self._journal.append(
                Draft(chain="engine", act=ACT, phase=Phase.NOTE, actor=LOCAL, payload=payload)
            )
        except BaseException:
            self._untold.update(untold)
            raise
        self._told = now
