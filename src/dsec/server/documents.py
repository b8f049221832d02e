"""The OpenAPI document: FastAPI tells paths and parameters, the types of our values tell the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from dsec.server.idempotency import Endpoint, Recover, once
from dsec.wire.problems import STATUS

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream"
TAR: Final = "application/x-tar"
_MARK: Final = "__dsec_call__"
_REF: Final = "#/components/schemas/{name}"
_ALWAYS: Final = (400, 401, 403, 404, 405, 409, 410, 413, 422, 429, 431, 500, 502, 503, 504, 507)
_WORDS: Final[Mapping[int, str]] = {
    200: "Done",
    201: "Made",
    202: "Not yet",
    204: "Done",
    400: "Something in the request is wrong",
    401: "No key, or one that is not good",
    403: "It is not allowed",
    404: "There is no such thing, or it is somebody else's",
    405: "The path cannot be asked in that way",
    409: "It exists, or is in a state in which this cannot be done; or its outcome is unknown",
    410: "The sandbox died",
    413: "Larger than the stated bound",
    422: "It cannot be had here, or it was done and did not succeed",
    429: "A bound is reached now; `Retry-After` says when to ask again",
    431: "The headers are larger than the stated bound",
    500: "The server failed",
    502: "A sandbox's init broke the protocol",
    503: "The machinery failed, or the server is stopping",
    504: "A limit of time passed",
    507: "A disk or a quota is full",
}


Scalar = str | int | float | bool | None


class Problem(msgspec.Struct, kw_only=True):
    """What went wrong: a code for programs, words for people, and the next step."""

    code: str
    message: str
    hint: str
    retryable: bool
    facts: dict[str, Scalar | list[Scalar]]


class Failure(msgspec.Struct, kw_only=True):
    """The body of every answer that is no success."""

    error: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the document says of one call beyond its parameters.

    Attributes:
        body: type of what is sent as JSON, or the media type of raw bytes; None = nothing. needed: whether there must be a body.
        answers: by status, the type of the JSON, the media type of something else, or None for an empty answer.
        creates: it takes ``Idempotency-Key``.
    """

    body: Any = None
    needed: bool = True
    answers: Mapping[int, Any]
    creates: bool = False


def call(
    *,
    body: Any = None,
    needed: bool = True,
    answer: Any = None,
    status: int = 200,
    also: Mapping[int, Any] | None = None,
    creates: bool = False,
    recover: Recover | None = None,
    findable: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Say what an endpoint takes and answers; goes below the router's decorator.

    Args:
        creates: the endpoint makes something: with an ``Idempotency-Key`` it does so once. recover: finds what an interrupted try made.
        findable: it does for certain, so that the answer need not wait until it is recorded.
    """
    told = Call(body=body, needed=needed, answers={status: answer, **(also or {})}, creates=creates)

    def mark(endpoint: Endpoint) -> Endpoint:
        marked = once(endpoint, recover, findable=findable) if creates else endpoint
        setattr(marked, _MARK, told)
        return marked

    return mark


def call_of(endpoint: object) -> Call | None:
    """What :func:`call` said of it."""
    told = getattr(endpoint, _MARK, None)
    return told if isinstance(told, Call) else None


def openapi(app: FastAPI, routers: Iterable[APIRouter]) -> dict[str, Any]:
    """The whole document."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    told = [
        (route, call_of(route.endpoint))
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    ]
    kinds = _kinds(one for _, one in told if one is not None)
    references, components = msgspec.json.schema_components(kinds, schema_hook=_custom, ref_template=_REF)
    known = dict(zip(map(repr, kinds), references, strict=True))
    for route, one in told:
        for method in route.methods or ():
            _complete(document["paths"][route.path_format][method.lower()], one, known)
    document.setdefault("components", {})["schemas"] = components
    document["components"]["securitySchemes"] = _SCHEMES
    document["security"] = [{name: []} for name in _SCHEMES]
    document["paths"]["/health"] = _HEALTH
    return document


def _kinds(calls: Iterable[Call]) -> list[Any]:
    """Every type that a call speaks of, once."""
    found: dict[str, Any] = {repr(Failure): Failure}
    for one in calls:
        for kind in (one.body, *one.answers.values()):
            if kind is not None and not isinstance(kind, str):
                found.setdefault(repr(kind), kind)
    return list(found.values())


def _custom(kind: type[Any]) -> dict[str, Any]:
    if issubclass(kind, Path):
        return {"type": "string"}
    raise NotImplementedError(f"no schema for {kind.__name__}")


def _complete(operation: dict[str, Any], one: Call | None, known: Mapping[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    if one is not None:
        answers.clear()
        for status, kind in one.answers.items():
            answers[str(status)] = {"description": _WORDS.get(status, "Done"), **_content(kind, known)}
        if one.body is not None:
            operation["requestBody"] = {"required": one.needed, **_content(one.body, known)}
        if one.creates:
            operation.setdefault("parameters", []).append(_KEY)
    for status in sorted({*_ALWAYS, *(number for number in STATUS.values())}):
        answers.setdefault(
            str(status),
            {"description": _WORDS[status], "content": {JSON: {"schema": known[repr(Failure)]}}},
        )


def _content(kind: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    if kind is None:
        return {}
    if isinstance(kind, str):
        return {"content": {kind: {"schema": {}}}}
    return {"content": {JSON: {"schema": known[repr(kind)]}}}


_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same request gives the recorded answer; another request with it is a conflict.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
_SCHEMES: Final[dict[str, Any]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "basic": {"type": "http", "scheme": "basic", "description": "The key as the password, for browsers."},
}
_HEALTH: Final[dict[str, Any]] = {
    "get": {
        "tags": ["server"],
        "summary": "Whether the server takes requests.",
        "operationId": "health",
        "security": [],
        "responses": {
            "200": {
                "description": "It does",
                "content": {
                    JSON: {
                        "schema": {
                            "type": "object",
                            "properties": {"status": {"type": "string"}},
                            "required": ["status"],
                        }
                    }
                },
            },
            "503": {
                "description": "It is stopping",
                "content": {JSON: {"schema": {"$ref": "#/components/schemas/Failure"}}},
            },
        },
    }
}
