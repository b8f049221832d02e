"""Figures for Prometheus, in a registry of their own. No label can take more values than this source names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

from dsec.errors import DsecError, Unsupported
from dsec.model.admission import AdmissionInfo
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import State
from dsec.model.tenants import Scope
from dsec.ports.engine import Services
from dsec.ports.journal import Journal
from dsec.server.act_figures import Acts
from dsec.server.context import Caller, need
from dsec.server.documents import call
from dsec.server.traffic import Traffic

router: Final = APIRouter(tags=["server"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where figures come from: the engine as its owner sees it, and what stands behind it.

    Attributes:
        counts: sandboxes in each state. journal_bytes: that the journal takes on disk. queue: of what waits to be made.
        refusals: of keys, by reason.
    """

    engine: Services
    journal: Journal
    counts: Callable[[], Awaitable[Mapping[State, int]]]
    journal_bytes: Callable[[], Awaitable[int]]
    queue: Callable[[], AdmissionInfo] = AdmissionInfo
    refusals: Callable[[], Mapping[str, int]] = dict


class Meters:
    """All figures of one server.

    Attributes:
        traffic: told of requests by whoever serves them.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._registry = CollectorRegistry()
        self.traffic = Traffic(self._registry)
        self._acts = Acts(sources.journal, self._registry)
        self._failed = Counter(
            "dsec_scrape_failures",
            "Figures that could not be had when they were asked for.",
            registry=self._registry,
        )
        self._now = _Now()
        self._registry.register(self._now)
        ProcessCollector(registry=self._registry)
        self._lock = asyncio.Lock()

    async def begin(self) -> None:
        """Count acts from now on; otherwise the first who asks for figures begins that.  Raises: as :meth:`~dsec.ports.journal.Journal.tail`."""
        await self._acts.read()

    async def text(self) -> bytes:
        """All figures now, as Prometheus reads them. One that cannot be had is left out, and counted."""
        async with self._lock:
            self._now.metrics = [
                metric
                for source in (
                    *(self._sandboxes, self._pool, self._problems, self._journal, self._queue),
                    self._refusals,
                )
                for metric in await self._of(source)
            ]
            return await asyncio.to_thread(generate_latest, self._registry)

    async def _of(self, source: Callable[[], Awaitable[list[Metric]]]) -> list[Metric]:
        try:
            return await source()
        except DsecError:
            self._failed.inc()
            return []

    async def _sandboxes(self) -> list[Metric]:
        counts = await self._sources.counts()
        found = GaugeMetricFamily("dsec_sandboxes", "Sandboxes, by state.", labels=["state"])
        for state in State:
            found.add_metric([state.value], counts.get(state, 0))
        return [found]

    async def _pool(self) -> list[Metric]:
        return pool_figures(await self._sources.engine.pool.info())

    async def _problems(self) -> list[Metric]:
        number = len(await self._sources.engine.observe.problems())
        return [_gauge("dsec_problems", "Clean-ups that failed and are tried again.", number)]

    async def _journal(self) -> list[Metric]:
        whole = await self._acts.read()
        return [
            _gauge(
                "dsec_journal_bytes", "What the journal takes on disk.", await self._sources.journal_bytes()
            ),
            _gauge("dsec_journal_figures_late", "1 = counters of acts have not caught up yet.", not whole),
        ]

    async def _queue(self) -> list[Metric]:
        return queue_figures(self._sources.queue())

    async def _refusals(self) -> list[Metric]:
        found = CounterMetricFamily(
            "dsec_keys_refused", "Requests whose key was not good.", labels=["reason"]
        )
        for reason, count in sorted(self._sources.refusals().items()):
            found.add_metric([reason], count)
        return [found]


def pool_figures(info: PoolInfo) -> list[Metric]:
    """Of ready sandboxes."""
    return [
        _gauge("dsec_pool_ready", "Ready sandboxes.", info.ready),
        _gauge("dsec_pool_target", "How many shall be ready.", info.target),
        _gauge("dsec_pool_memory_bytes", "That ready sandboxes take.", info.memory_bytes),
        _counter("dsec_pool_hits", "Creations that took a ready one.", info.hits),
        _counter("dsec_pool_misses", "Creations that found none ready.", info.misses),
        _counter("dsec_pool_wasted", "Ready ones that were ended unused.", info.wasted),
    ]


def queue_figures(info: AdmissionInfo) -> list[Metric]:
    """Of what waits to be made. By project they would be as many as there are projects: those are told by its quota."""
    refused = CounterMetricFamily("dsec_queue_refused", "Creations that were refused.", labels=["reason"])
    for reason, count in sorted(info.refused.items()):
        refused.add_metric([reason], count)
    return [
        _gauge("dsec_queue_waiting", "Sandboxes that wait to be made or woken.", info.waiting),
        _gauge("dsec_queue_waiting_projects", "Projects whose sandboxes wait.", len(info.projects)),
        _gauge("dsec_queue_most", "That may wait.", info.most_waiting),
        _gauge("dsec_queue_in_progress", "Sandboxes that are being made or woken.", info.in_progress),
        _gauge(
            "dsec_memory_available_bytes",
            "That sandboxes may still take, -1 = unknown.",
            info.available_bytes,
        ),
        _gauge("dsec_memory_promised_bytes", "Expected of what was made lately.", info.promised_bytes),
        _counter("dsec_queue_admitted", "Turns that were had.", info.admitted),
        _counter("dsec_queue_abandoned", "That left the queue.", info.abandoned),
        refused,
    ]


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=value)


class _Now(Collector):
    """What was asked for just before it is written."""

    def __init__(self) -> None:
        self.metrics: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        return tuple(self.metrics)


@router.get("/metrics", operation_id="metrics", summary="Figures for Prometheus; for administrators.")
@call(answer="text/plain")
async def metrics(request: Request, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    meters = getattr(request.app.state, "meters", None)
    if not isinstance(meters, Meters):
        raise Unsupported("this server keeps no figures")
    return Response(await meters.text(), headers={"content-type": CONTENT_TYPE_LATEST})
