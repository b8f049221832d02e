"""What can be done with a sandbox, and seen of it."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dsec.client.requests import kind_of
from dsec.errors import UnknownOutcome
from dsec.model.checks import check_seconds
from dsec.model.ids import parse_sandbox_id, parse_snapshot_id
from dsec.model.journal import Record
from dsec.model.paging import Page
from dsec.model.sandbox import Metrics, SandboxInfo
from dsec.model.snapshots import Fork, SnapshotInfo, SnapshotKind
from dsec.model.tenants import NewKey, Principal
from dsec.ports.engine import Services
from dsec.ports.idempotency import Begun
from dsec.server.bodies import body_of
from dsec.server.context import Engine, answer
from dsec.server.documents import call
from dsec.server.pages import listed
from dsec.server.recovery import nothing_since
from dsec.server.shapes import (
    ExtendBody,
    ForkBody,
    Items,
    KindBody,
    RecordPage,
    RollbackBody,
    TokenBody,
)
from dsec.server.waits import Timeout, within

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}", tags=["sandboxes"])

MOST_RECORDS: Final = 1000


@router.post("/pause", operation_id="pauseSandbox", summary="Stop all processes of a sandbox.")
@call(answer=SandboxInfo)
async def pause(sandbox: str, services: Engine) -> Response:
    return answer(await services.sandboxes.pause(parse_sandbox_id(sandbox)))


@router.post(
    "/resume", operation_id="resumeSandbox", summary="Let a paused sandbox go on, or wake a dormant one."
)
@call(answer=SandboxInfo)
async def resume(sandbox: str, services: Engine) -> Response:
    return answer(await services.sandboxes.resume(parse_sandbox_id(sandbox)))


@router.post(
    "/hibernate", operation_id="hibernateSandbox", summary="Keep the files of a sandbox and nothing else."
)
@call(answer=SandboxInfo)
async def hibernate(sandbox: str, services: Engine) -> Response:
    return answer(await services.sandboxes.hibernate(parse_sandbox_id(sandbox)))


@router.post(
    "/extend", operation_id="extendSandbox", summary="Let a sandbox live that many seconds from now."
)
@call(body=ExtendBody, answer=SandboxInfo)
async def extend(request: Request, sandbox: str, services: Engine) -> Response:
    which = parse_sandbox_id(sandbox)
    body = await body_of(request, ExtendBody)
    return answer(await services.sandboxes.extend(which, body.ttl))


async def _unmarked(
    services: Services, caller: Principal, mark: str, begun: Begun, **arguments: Any
) -> Response | None:
    """Snapshots and forks carry no mark: whether one began since the request was first asked is all that is known."""
    del caller, mark
    which = parse_sandbox_id(arguments["sandbox"])
    if await nothing_since(
        services, which, begun, frozenset({"sandbox.snapshot", "sandbox.fork", "sandbox.rollback"})
    ):
        return None
    raise UnknownOutcome(
        "the server was interrupted while it did this, and cannot know how far it came",
        hint="look at what is there, then ask again with another key",
        begun=begun.at,
    )


@router.post(
    "/fork", operation_id="forkSandbox", summary="Make sandboxes that begin with the files of this one."
)
@call(body=ForkBody, needed=False, answer=Fork, creates=True, recover=_unmarked)
async def fork(request: Request, sandbox: str, services: Engine) -> Response:
    which = parse_sandbox_id(sandbox)
    body = await body_of(request, ForkBody)
    kind_of(body.kind)
    return answer(await services.snapshots.fork(which, body.count))


@router.post(
    "/rollback", operation_id="rollbackSandbox", summary="Make a sandbox's files those of a snapshot again."
)
@call(body=RollbackBody, answer=SandboxInfo, creates=True, recover=_unmarked)
async def rollback(request: Request, sandbox: str, services: Engine) -> Response:
    which = parse_sandbox_id(sandbox)
    snapshot = parse_snapshot_id((await body_of(request, RollbackBody)).snapshot)
    return answer(await services.snapshots.rollback(which, snapshot))


@router.post(
    "/snapshots",
    operation_id="takeSnapshot",
    summary="Keep a sandbox's files as they are now.",
    status_code=201,
)
@call(body=KindBody, needed=False, answer=SnapshotInfo, status=201, creates=True, recover=_unmarked)
async def snapshot(request: Request, sandbox: str, services: Engine) -> Response:
    which = parse_sandbox_id(sandbox)
    kind: SnapshotKind = kind_of((await body_of(request, KindBody)).kind)
    return answer(await services.snapshots.take(which, kind), 201)


@router.get(
    "/snapshots", operation_id="listSnapshotsOfSandbox", summary="List a sandbox's snapshots, oldest first."
)
@call(answer=Items[SnapshotInfo])
async def snapshots(sandbox: str, services: Engine) -> Response:
    return answer(Items(items=await services.snapshots.list(parse_sandbox_id(sandbox))))


@router.get("/metrics", operation_id="getSandboxMetrics", summary="Figures of a sandbox now.")
@call(answer=Metrics)
async def metrics(sandbox: str, services: Engine) -> Response:
    return answer(await services.observe.metrics(parse_sandbox_id(sandbox)))


@router.get(
    "/events", operation_id="listEvents", summary="Records of a sandbox in the journal, ended ones included."
)
@call(answer=RecordPage)
async def events(
    sandbox: str,
    services: Engine,
    after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_RECORDS)] = MOST_RECORDS,
) -> Response:
    which = parse_sandbox_id(sandbox)

    async def fetch(last: str, most: int) -> Page[Record]:
        found = await services.observe.events(which, after=int(last), limit=most)
        return Page(items=found, next=str(found[-1].seq) if len(found) == most else "")

    return await listed(fetch, str(after), limit)


@router.get(
    "/wait",
    operation_id="waitForSandbox",
    summary="Wait until a sandbox has ended, or the time is up: what it is then.",
)
@call(answer=SandboxInfo)
async def wait(request: Request, sandbox: str, services: Engine, timeout: Timeout = 30.0) -> Response:
    which = parse_sandbox_id(sandbox)
    ended = await within(request, services.observe.wait(which), timeout)
    return answer(await services.sandboxes.get(which) if ended is None else ended)


@router.post(
    "/token",
    operation_id="createSandboxToken",
    summary="Make a key that is good for this sandbox alone, and ends with it.",
    status_code=201,
)
@call(body=TokenBody, needed=False, answer=NewKey, status=201)  # a recorded answer would be the key, kept
async def token(request: Request, sandbox: str, services: Engine) -> Response:
    which = parse_sandbox_id(sandbox)
    body = await body_of(request, TokenBody)
    check_seconds("ttl", body.ttl)
    return answer(await services.tenants.token(which, ttl=body.ttl), 201)
