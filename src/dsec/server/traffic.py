"""What comes in: requests by route and status, how long they take, and what is open now."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ROUTE: Final = "dsec.route"
"""In the scope of a request: the template of its path, where it was found without asking the routes."""
_NOWHERE: Final = "none"
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET"))
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_CUT: Final = 0  # the status of what never had an answer


class Traffic:
    """The counters.

    Attributes:
        running, streams, sockets: open now.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "dsec_http_requests",
            "Requests, by route and status.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "dsec_http_answer_seconds",
            "Until an answer begins.",
            ("route", "method"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.running = Gauge(
            "dsec_http_requests_running", "Requests that are being answered.", registry=registry
        )
        self.streams = Gauge("dsec_http_streams", "Answers of which a part is out.", registry=registry)
        self.sockets = Gauge("dsec_websockets", "WebSockets that are open.", registry=registry)
        self._known: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """One answer has begun, or will never."""
        name = (route, method, status)
        known = self._known.get(name)
        if known is None:
            counter = self._requests.labels(route, method, str(status))
            self._known[name] = known = (counter, self._seconds.labels(route, method))
        known[0].inc()
        known[1].observe(seconds)


class Metered:
    """ASGI around everything: counts, and changes nothing."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, scope["type"] == "websocket", self._traffic)
        self._traffic.running.inc()
        try:
            await self._app(scope, receive, answer)
        finally:
            self._traffic.running.dec()
            answer.over()
            self._traffic.answered(_route(scope), _method(scope), answer.status, answer.seconds)


class _Answer:
    """``send`` that knows what was answered, and when."""

    __slots__ = ("_began", "_open", "_send", "_socket", "_traffic", "seconds", "status")

    def __init__(self, send: Send, socket: bool, traffic: Traffic) -> None:
        self._send = send
        self._socket = socket
        self._traffic = traffic
        self._began = time.perf_counter()
        self._open = False
        self.status = _CUT
        self.seconds = 0.0

    async def __call__(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start" | "websocket.http.response.start":
                self._answered(message["status"])
            case "websocket.accept":
                self._answered(101)
                self._opened()
            case "http.response.body" if message.get("more_body", False):
                self._opened()
        await self._send(message)

    def _answered(self, status: int) -> None:
        self.status = status
        self.seconds = time.perf_counter() - self._began

    def _opened(self) -> None:
        if not self._open:
            self._open = True
            self._gauge().inc()

    def over(self) -> None:
        """Nothing more is sent."""
        if self._open:
            self._gauge().dec()
        if self.status == _CUT:
            self.seconds = time.perf_counter() - self._began

    def _gauge(self) -> Gauge:
        return self._traffic.sockets if self._socket else self._traffic.streams


def _route(scope: Scope) -> str:
    """The template of the path, of which there are as many as routes."""
    found = scope.get(ROUTE) or getattr(scope.get("route"), "path_format", None)
    return found if isinstance(found, str) else _NOWHERE


def _method(scope: Scope) -> str:
    method = scope.get("method", "WEBSOCKET")
    return method if method in _METHODS else "OTHER"
