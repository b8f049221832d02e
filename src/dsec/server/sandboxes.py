"""Sandboxes: made, seen, listed, ended."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dsec.errors import Unsupported
from dsec.model.ids import SnapshotId, parse_sandbox_id
from dsec.model.paging import MOST_IN_PAGE, PAGE, Page
from dsec.model.sandbox import SandboxInfo, SandboxSpec, State
from dsec.model.tenants import Principal, Scope
from dsec.ports.engine import Services
from dsec.server import recovery
from dsec.server.bodies import body_of
from dsec.server.context import Caller, Engine, answer
from dsec.server.documents import call
from dsec.server.idempotency import mark_of
from dsec.server.pages import listed
from dsec.server.shapes import BatchBody, CreateBody, Ids, SandboxPage
from dsec.server.specs import meant

router: Final = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])

Limit = Annotated[int, Query(ge=1, le=MOST_IN_PAGE)]
Cursor = Annotated[str, Query(max_length=512)]
Reason = Annotated[str, Query(min_length=1, max_length=200)]


@router.post(
    "", operation_id="createSandbox", summary="Make a sandbox, completely or not at all.", status_code=201
)
@call(
    body=CreateBody,
    needed=False,
    answer=SandboxInfo,
    status=201,
    creates=True,
    recover=recovery.created,
    findable=True,
)
async def create(request: Request, services: Engine, caller: Caller) -> Response:
    body = await body_of(request, CreateBody)
    spec, snapshot = await meant(body, services, caller, mark_of(request))
    if body.cold:
        return answer(await _cold(services, spec, snapshot), 201)
    if snapshot is not None:
        return answer(await services.snapshots.create(snapshot, spec), 201)
    return answer(await services.sandboxes.create(spec), 201)


async def _cold(services: Services, spec: SandboxSpec, snapshot: SnapshotId | None) -> SandboxInfo:
    (made,) = await services.sandboxes.create_cold(without_snapshot(spec, snapshot), 1)
    return await services.sandboxes.get(made)


def without_snapshot(spec: SandboxSpec, snapshot: SnapshotId | None) -> SandboxSpec:
    """Raises: Unsupported: it begins as a snapshot, which might be gone when it is woken."""
    if snapshot is not None:
        raise Unsupported(
            "cold: what begins as a snapshot cannot be cold", hint="promote the snapshot to a template first"
        )
    return spec


@router.post(
    "/batch",
    operation_id="createColdSandboxes",
    summary="Write down many sandboxes that are alike; the first act in each makes it.",
    status_code=201,
)
@call(body=BatchBody, answer=Ids, status=201, creates=True, recover=recovery.batch, findable=True)
async def batch(request: Request, services: Engine, caller: Caller) -> Response:
    body = await body_of(request, BatchBody)
    spec, snapshot = await meant(body, services, caller, mark_of(request))
    made = await services.sandboxes.create_cold(without_snapshot(spec, snapshot), body.count)
    return answer(Ids(ids=made), 201)


@router.get("", operation_id="listSandboxes", summary="List sandboxes, oldest first, a page at a time.")
@call(answer=SandboxPage)
async def page(
    services: Engine,
    caller: Caller,
    state: Annotated[list[State], Query()] = [],  # noqa: B006 - FastAPI's way to say none
    project: Annotated[str, Query(max_length=64)] = "",
    limit: Limit = PAGE,
    cursor: Cursor = "",
) -> Response:
    states, of = tuple(state), _project(project, caller)

    async def fetch(after: str, most: int) -> Page[SandboxInfo]:
        return await services.sandboxes.page(states=states, project=of, after=after, limit=most)

    return await listed(fetch, cursor, limit)


def _project(named: str, caller: Principal) -> str:
    """ "" = of all that the caller may see."""
    return named if named or caller.scope is Scope.ADMIN else caller.project


@router.get("/{sandbox}", operation_id="getSandbox", summary="See one sandbox, ended ones included.")
@call(answer=SandboxInfo)
async def get(request: Request, sandbox: str, services: Engine, caller: Caller) -> Response:
    del request, caller
    return answer(await services.sandboxes.get(parse_sandbox_id(sandbox)))


@router.delete(
    "/{sandbox}",
    operation_id="destroySandbox",
    summary="End a sandbox and remove everything of it; twice is no error.",
    status_code=204,
)
@call(status=204)
async def destroy(
    request: Request, sandbox: str, services: Engine, caller: Caller, reason: Reason = "asked"
) -> Response:
    del request, caller
    await services.sandboxes.destroy(parse_sandbox_id(sandbox), reason=reason)
    return Response(status_code=204)
