"""Counts and durations of acts, read from the journal: what was recorded is what happened, whoever asked for it and through which door."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from dsec.model.journal import Phase, Record
from dsec.ports.journal import Journal

PIECE: Final = 1000  # records at once
MOST: Final = 100_000  # records that one reading takes; what is left comes with the next
_OPEN: Final = 20_000  # intents whose result is awaited
_KINDS: Final = 400  # of act and outcome
_OTHER: Final = "other"
_LAST: Final = 2**63 - 1
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Acts:
    """The counters. They begin with what is recorded after the first reading."""

    def __init__(self, journal: Journal, registry: CollectorRegistry) -> None:
        self._journal = journal
        self._position = -1
        self._begun: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._seen: set[tuple[str, str]] = set()
        self._records = Counter("dsec_journal_records", "Records that were appended.", registry=registry)
        self._acts = Counter(
            "dsec_acts",
            "Acts that ended, by how they did: ok or a code.",
            ("act", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "dsec_act_seconds",
            "From an act's intent to its result, as recorded.",
            ("act",),
            buckets=_BUCKETS,
            registry=registry,
        )

    async def read(self) -> bool:
        """Count what was recorded since; whether that was all of it.  Raises: as :meth:`Journal.tail`."""
        if self._position < 0:
            self._position = await self._end()
        for _ in range(MOST // PIECE):
            found = await self._journal.tail(self._position, PIECE)
            for position, record in found:
                self._count(record)
                self._position = position
            if len(found) < PIECE:
                return True
        return False

    async def _end(self) -> int:
        """The position of the last record: nothing of what is older is counted."""
        low, high = 0, _LAST
        while low < high:
            middle = (low + high) // 2
            if await self._journal.tail(middle, 1):
                low = middle + 1
            else:
                high = middle
        return low

    def _count(self, record: Record) -> None:
        self._records.inc()
        name = (record.chain, record.act, record.ref)
        if record.phase is Phase.INTENT:
            self._begun[name] = record.at
            if len(self._begun) > _OPEN:
                self._begun.popitem(last=False)
            return
        outcome = record.payload.get("outcome", "ok")
        act, outcome = self._kind(record.act, outcome if isinstance(outcome, str) else _OTHER)
        self._acts.labels(act, outcome).inc()
        began = self._begun.pop(name, None)
        if began is not None:
            self._seconds.labels(act).observe(max(0.0, record.at - began))

    def _kind(self, act: str, outcome: str) -> tuple[str, str]:
        """Labels, of which there are only so many."""
        kind = (act, outcome)
        if kind not in self._seen:
            if len(self._seen) >= _KINDS:
                return _OTHER, _OTHER
            self._seen.add(kind)
        return kind
