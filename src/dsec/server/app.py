"""The application: routes behind the door."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

import dsec
from dsec.errors import DsecError
from dsec.ports.gate import Gate
from dsec.server import (
    acts,
    attach,
    decisions,
    execs,
    files,
    images,
    metrics,
    output,
    pool,
    ports,
    problems,
    reading,
    sandboxes,
    snapshots,
    templates,
    tenants,
    trees,
    volumes,
)
from dsec.server.documents import openapi
from dsec.server.door import Door
from dsec.server.failures import handled
from dsec.server.hot import Hot
from dsec.server.idempotency import Flights
from dsec.server.traffic import Metered

ROUTERS: Final[tuple[APIRouter, ...]] = (
    sandboxes.router,
    execs.router,
    acts.router,
    output.router,
    attach.router,
    files.router,
    trees.router,
    decisions.router,
    templates.router,
    snapshots.router,
    volumes.router,
    images.router,
    pool.router,
    problems.router,
    metrics.router,
    tenants.router,
    ports.router,
)
"""Every room of routes. A path that is fixed comes before one that takes anything."""

_ABOUT: Final = (
    "Sandboxes for agents. Every call but `/health` needs a key. Errors are "
    '`{"error": {"code", "message", "hint", "retryable", "facts"}}`; lists are read a page at a time; '
    "calls that make something take an `Idempotency-Key`."
)


_HANDLED: Final = (
    DsecError,
    RequestValidationError,
    WebSocketRequestValidationError,
    HTTPException,
    ClientDisconnect,
    Exception,
)


class Application(FastAPI):
    """FastAPI behind a :class:`~dsec.server.door.Door`, which also answers what is asked most.

    Attributes:
        door: outermost of all. flights: creating calls that are under way.
    """

    def __init__(self, gate: Gate, routers: tuple[APIRouter, ...], **parts: object) -> None:
        handlers: dict[Any, Any] = dict.fromkeys(_HANDLED, handled)
        super().__init__(
            title="DSec",
            version=dsec.__version__,
            description=_ABOUT,
            exception_handlers=handlers,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        self.state.gate = gate
        self.state.flights = self.flights = Flights()
        self.state.aside = asyncio.Semaphore(1)  # see `bodies.aside`
        for name, part in parts.items():
            setattr(self.state, name, part)
        self.router.routes.append(reading.route())
        for router in routers:
            self.include_router(router)
        self.state.routes = (*self.router.routes, *(route for router in routers for route in router.routes))
        self._routers = routers
        self.door = Door(super().build_middleware_stack(), gate, Hot(_HOT))
        meters = parts.get("meters")
        self._outermost = (
            Metered(self.door, meters.traffic) if isinstance(meters, metrics.Meters) else self.door
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What FastAPI looks for before each request, a tracer, is not looked for: it would come before the door."""
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await self._outermost(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """The door, and all of FastAPI behind it; figures are taken before it."""
        return self._outermost

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made when first asked for."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi(self, self._routers)
        return self.openapi_schema


_HOT: Final[Mapping[str, Any]] = {
    "create": sandboxes.create,
    "get": sandboxes.get,
    "destroy": sandboxes.destroy,
    "run": execs.run,
}


def make_app(gate: Gate, **parts: object) -> Application:
    """The whole server behind that gate.

    Args:
        parts: what routes find as ``request.app.state.NAME``, beside ``gate``: ``idempotency``, an
            :class:`~dsec.ports.idempotency.IdempotencyStore`; ``meters``, :class:`~dsec.server.metrics.Meters`; and what rooms of routes say that they need.
    """
    return Application(gate, ROUTERS, **parts)
