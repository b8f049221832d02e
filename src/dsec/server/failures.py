"""What went wrong, as an answer: one shape, whoever noticed it."""

from __future__ import annotations

import logging
from typing import Any, Final

from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.routing import Match
from starlette.websockets import WebSocket, WebSocketState

from dsec.errors import BadRequest, DsecError, NotFound, RuntimeUnavailable
from dsec.wire.problems import STATUS, to_body
from dsec.wire.values import encode

log: Final = logging.getLogger("dsec.server")
RETRY_AFTER: Final = 1  # seconds
GONE: Final = 499  # nobody reads it
_CHALLENGE: Final = 'Basic realm="dsec", charset="UTF-8"'
_PLACES: Final = ("body", "query", "path", "header", "cookie")


def failure(error: DsecError, status: int = 0) -> Response:
    """The answer that tells of an error."""
    status = status or STATUS.get(error.code, 500)
    answer = Response(encode(to_body(error)), status_code=status, media_type="application/json")
    if status in (429, 503):
        given = error.facts.get("retry_after")
        seconds = given if isinstance(given, int | float) and not isinstance(given, bool) else RETRY_AFTER
        answer.headers["retry-after"] = str(max(1, round(seconds)))
    if status == 401:
        answer.headers["www-authenticate"] = _CHALLENGE
    return answer


def answer_to(error: Exception) -> Response:
    """The answer for whatever was raised. What nobody expected is logged, and told without what it says."""
    if isinstance(error, DsecError):
        return failure(error)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    if isinstance(error, RequestValidationError | WebSocketRequestValidationError):
        return failure(BadRequest(_first(error)))
    if isinstance(error, HTTPException):
        return _by_status(error)
    log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    return failure(DsecError("the server failed; its log tells more", hint="report it"))


def stopping() -> RuntimeUnavailable:
    """What a server that is being stopped says."""
    return RuntimeUnavailable("the server is stopping; sandboxes live on", hint="try again when it is back")


async def handled(connection: HTTPConnection, error: Exception) -> Response:
    """:func:`answer_to` as FastAPI asks for it; a WebSocket that was not accepted yet is answered, too."""
    answer = answer_to(error)
    if answer.status_code == 405:
        answer.headers["allow"] = ", ".join(sorted(_methods_at(connection)))
    if isinstance(connection, WebSocket):
        if connection.application_state is WebSocketState.CONNECTING:
            await connection.send_denial_response(answer)
        elif connection.application_state is WebSocketState.CONNECTED:
            await connection.close(1011)
    return answer


def _methods_at(connection: HTTPConnection) -> set[str]:
    """All that its path can be asked by: each route knows but its own."""
    found: set[str] = set()
    for route in connection.app.state.routes:
        if route.matches(connection.scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return found


def _first(error: RequestValidationError | WebSocketRequestValidationError) -> str:
    """The first thing that is wrong with the parameters, without what was given."""
    found: dict[str, Any] = next(iter(error.errors()), {"loc": (), "msg": "it cannot be read"})
    place = ".".join(str(part) for part in found["loc"] if part not in _PLACES)
    return f"{place or 'request'}: {found['msg']}"


def _by_status(error: HTTPException) -> Response:
    if error.status_code == 404:
        return failure(
            NotFound("there is nothing at this path", hint="GET /openapi.json lists what there is")
        )
    if error.status_code == 405:
        return failure(
            BadRequest("this path cannot be asked in that way", hint="the header Allow says in which ones"),
            405,
        )
    if error.status_code >= 500:
        return failure(DsecError("the server failed"), error.status_code)
    return failure(BadRequest(str(error.detail)[:200]), error.status_code)
