"""Keys and projects: who may come in, as what, and how much they may have."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dsec.model.ids import parse_key_id
from dsec.model.paging import MOST_IN_PAGE, Page
from dsec.model.tenants import Coinage, KeyInfo, NewKey, ProjectInfo, Quota, Scope
from dsec.model.volumes import DEFAULT_PROJECT
from dsec.server.bodies import body_of
from dsec.server.context import Caller, Engine, answer, need
from dsec.server.documents import call
from dsec.server.pages import Cursor, Key, Limit, page_of

router: Final = APIRouter(prefix="/v1", tags=["keys and projects"])

OfProject = Annotated[str, Query(max_length=64, description="only those of this project")]


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A key to make. ``ttl``: seconds for which it is good, 0 = until it is revoked. ``coinage``: how it is written."""

    scope: Scope = Scope.DEVELOPER
    project: str = DEFAULT_PROJECT
    label: str = ""
    ttl: float = 0.0
    coinage: Coinage = Coinage.DSEC


class KeyPage(msgspec.Struct, kw_only=True):
    """A part of a list; ``next`` is the cursor of the next one, "" = this was the last."""

    items: tuple[KeyInfo, ...]
    next: str


class ProjectPage(msgspec.Struct, kw_only=True):
    """A part of a list; ``next`` is the cursor of the next one, "" = this was the last."""

    items: tuple[ProjectInfo, ...]
    next: str


@router.post(
    "/keys", operation_id="createKey", summary="Make a key, and show it, this once.", status_code=201
)
@call(body=KeyRequest, needed=False, answer=NewKey, status=201)
async def create_key(request: Request, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    body = await body_of(request, KeyRequest)
    made = await services.tenants.create_key(
        body.scope, project=body.project, label=body.label, ttl=body.ttl, coinage=body.coinage
    )
    return answer(made, 201)


@router.get("/keys", operation_id="listKeys", summary="List keys by id; none of them is shown.")
@call(answer=KeyPage)
async def keys(
    services: Engine,
    caller: Caller,
    project: OfProject = "",
    limit: Limit = MOST_IN_PAGE,
    cursor: Cursor = "",
) -> Response:
    need(caller, Scope.ADMIN)
    after = parse_key_id(cursor) if cursor else ""
    found = await services.tenants.keys(project, after=after, limit=limit)
    return answer(Page(items=found, next=found[-1].id if len(found) == limit else ""))


@router.delete("/keys/{key}", operation_id="revokeKey", summary="Revoke a key. Twice is no error.")
@call(answer=KeyInfo)
async def revoke_key(key: str, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    return answer(await services.tenants.revoke_key(parse_key_id(key)))


@router.get("/projects", operation_id="listProjects", summary="List the projects that the key can see.")
@call(answer=ProjectPage)
async def projects(
    services: Engine, caller: Caller, limit: Limit = MOST_IN_PAGE, cursor: Cursor = ""
) -> Response:
    need(caller, Scope.DEVELOPER)
    found = await services.tenants.projects()
    return answer(page_of(found, _name, cursor=cursor, limit=limit))


def _name(info: ProjectInfo) -> Key:
    return (info.name,)


@router.get("/projects/{name}", operation_id="getProject", summary="See what a project may have.")
@call(answer=ProjectInfo)
async def project(name: str, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.DEVELOPER)
    return answer(await services.tenants.project(name))


@router.put(
    "/projects/{name}", operation_id="setQuota", summary="Set what a project may have; it is made if need be."
)
@call(body=Quota, answer=ProjectInfo)
async def set_quota(request: Request, name: str, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    return answer(await services.tenants.set_quota(name, await body_of(request, Quota, needed=True)))
