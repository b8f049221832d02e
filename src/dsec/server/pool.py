"""The pool of ready sandboxes."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from dsec.errors import Unsupported
from dsec.model.pool import PoolInfo
from dsec.model.tenants import Scope
from dsec.server.bodies import body_of
from dsec.server.context import Caller, Engine, answer, need
from dsec.server.documents import call
from dsec.server.shapes import CreateBody
from dsec.server.specs import meant

router: Final = APIRouter(prefix="/v1/pool", tags=["pool"])


class WarmRequest(CreateBody, forbid_unknown_fields=True, kw_only=True):
    """Which sandboxes are to be ready, and how many."""

    count: Annotated[int, Meta(ge=0, le=100_000)]


class Ready(msgspec.Struct, kw_only=True):
    """How many sandboxes of that kind are ready."""

    ready: int


@router.get("", operation_id="getPool", summary="What the pool holds, and what became of creations.")
@call(answer=PoolInfo)
async def info(services: Engine, caller: Caller) -> Response:
    need(caller, Scope.DEVELOPER)
    return answer(await services.pool.info())


@router.post(
    "/warm",
    operation_id="warmPool",
    summary="Have sandboxes of a kind ready; for administrators: all share the places.",
)
@call(body=WarmRequest, answer=Ready)
async def warm(request: Request, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    body = await body_of(request, WarmRequest)
    spec, snapshot = await meant(body, services, caller)
    if snapshot is not None:
        raise Unsupported(
            "template: sandboxes that begin as a snapshot are not made ahead", hint="name a template"
        )
    return answer(Ready(ready=await services.pool.warm(spec, body.count)))
