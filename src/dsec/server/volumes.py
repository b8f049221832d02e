"""Volumes: files that outlive sandboxes, by name within a project."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dsec.errors import Denied, NotFound
from dsec.model.checks import shown
from dsec.model.paging import MOST_IN_PAGE
from dsec.model.tenants import Principal, Scope
from dsec.model.volumes import (
    DEFAULT_PROJECT,
    DEFAULT_SIZE_MIB,
    VolumeInfo,
    check_project,
    check_size_mib,
    check_volume_name,
)
from dsec.ports.engine import Services
from dsec.ports.idempotency import Begun
from dsec.server.bodies import body_of
from dsec.server.context import Caller, Engine, answer
from dsec.server.documents import call
from dsec.server.pages import Cursor, Key, Limit, page_of
from dsec.server.recovery import SLACK

router: Final = APIRouter(prefix="/v1/volumes", tags=["volumes"])

Project = Annotated[str, Query(max_length=64, description="for administrators: of another project")]


class VolumeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A volume to make. ``project``: for administrators."""

    name: str
    size_mib: int = DEFAULT_SIZE_MIB
    project: str = ""


class VolumePage(msgspec.Struct, kw_only=True):
    """A part of a list; ``next`` is the cursor of the next one, "" = this was the last."""

    items: tuple[VolumeInfo, ...]
    next: str


def of_project(named: str, caller: Principal) -> str:
    """The project that is meant.  Raises: BadRequest. Denied: it is not the caller's."""
    if not named:
        return caller.project
    check_project("project", named)
    if named == DEFAULT_PROJECT and caller.scope is not Scope.ADMIN:
        return caller.project  # what clients say when nobody named one
    if caller.scope is not Scope.ADMIN and named != caller.project:
        raise Denied(f"project: this key is of another project than {shown(named)}", hint="leave project out")
    return named


async def _made(
    services: Services, caller: Principal, mark: str, begun: Begun, **arguments: Any
) -> Response | None:
    """The volume that an interrupted try made."""
    del mark
    body = await body_of(arguments["request"], VolumeRequest)
    with suppress(NotFound):
        found = await services.volumes.get(of_project(body.project, caller), body.name)
        if found.created_at >= begun.at - SLACK:
            return answer(found, 201)
    return None


@router.post("", operation_id="createVolume", summary="Make an empty volume.", status_code=201)
@call(body=VolumeRequest, answer=VolumeInfo, status=201, creates=True, recover=_made)
async def create(request: Request, services: Engine, caller: Caller) -> Response:
    body = await body_of(request, VolumeRequest)
    check_volume_name("name", body.name)
    check_size_mib("size_mib", body.size_mib)
    project = of_project(body.project, caller)
    return answer(await services.volumes.create(project, body.name, body.size_mib), 201)


@router.get("", operation_id="listVolumes", summary="List the volumes of a project, by name.")
@call(answer=VolumePage)
async def page(
    services: Engine, caller: Caller, project: Project = "", limit: Limit = MOST_IN_PAGE, cursor: Cursor = ""
) -> Response:
    found = await services.volumes.list(of_project(project, caller))
    return answer(page_of(found, _name, cursor=cursor, limit=limit))


def _name(info: VolumeInfo) -> Key:
    return (info.name,)


@router.get(
    "/{name}", operation_id="getVolume", summary="See one volume, with its figures and those who use it."
)
@call(answer=VolumeInfo)
async def get(name: str, services: Engine, caller: Caller, project: Project = "") -> Response:
    check_volume_name("name", name)
    return answer(await services.volumes.get(of_project(project, caller), name))


@router.delete(
    "/{name}",
    operation_id="removeVolume",
    summary="Remove a volume with all its files. Twice is no error.",
    status_code=204,
)
@call(status=204)
async def remove(name: str, services: Engine, caller: Caller, project: Project = "") -> Response:
    check_volume_name("name", name)
    await services.volumes.remove(of_project(project, caller), name)
    return Response(status_code=204)
