"""What every route needs: who asks, and the engine as they see it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection
from starlette.responses import Response

from dsec.errors import Denied
from dsec.model.tenants import Principal, Scope
from dsec.ports.engine import Services
from dsec.ports.gate import Gate
from dsec.wire.values import encode


def principal_of(request: Request) -> Principal:
    """Who was let in by the middleware."""
    principal = request.scope["dsec.principal"]
    assert isinstance(principal, Principal)
    return principal


def services_of(request: Request) -> Services:
    """The engine as the caller may see it."""
    gate: Gate = request.app.state.gate
    return gate.services(principal_of(request))


def gate_services(connection: HTTPConnection) -> Services:
    """:func:`services_of`, also for a WebSocket."""
    gate: Gate = connection.app.state.gate
    return gate.services(connection.scope["dsec.principal"])


Caller = Annotated[Principal, Depends(principal_of)]
Engine = Annotated[Services, Depends(services_of)]


def need(principal: Principal, scope: Scope) -> None:
    """Raises: Denied: the key is not good for that."""
    order = (Scope.SANDBOX, Scope.DEVELOPER, Scope.ADMIN)
    if order.index(principal.scope) < order.index(scope):
        raise Denied(
            f"this needs a key of scope {scope}",
            hint=f"`dsec key create --scope {scope}`, by whoever owns the server",
            scope=scope.value,
        )


def answer(value: object, status: int = 200) -> Response:
    """A value of the model as the body."""
    return Response(encode(value), status_code=status, media_type="application/json")
