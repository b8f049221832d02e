"""Images: seen by whoever may use them, changed by administrators, since all projects share them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from dsec.errors import NotFound
from dsec.model.checks import shown
from dsec.model.images import MOST_BYTES, Freed, ImageInfo
from dsec.model.paging import MOST_IN_PAGE
from dsec.model.tenants import Principal, Scope
from dsec.server.bodies import body_of
from dsec.server.context import Caller, Engine, answer, need
from dsec.server.documents import call
from dsec.server.pages import Cursor, Key, Limit, page_of
from dsec.server.presence import while_there

router: Final = APIRouter(prefix="/v1/images", tags=["images"])


class ImageRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The name of an image, or its digest as ``sha256:…``."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]


class CollectRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``budget``: bytes that images which nobody holds may keep, absent = only what nothing needs goes."""

    budget: Annotated[int, Meta(ge=0, le=MOST_BYTES)] | None = None


class ImagePage(msgspec.Struct, kw_only=True):
    """A part of a list; ``next`` is the cursor of the next one, "" = this was the last."""

    items: tuple[ImageInfo, ...]
    next: str


def _seen(info: ImageInfo, caller: Principal) -> ImageInfo:
    """Who holds an image names templates and directories of others."""
    return info if caller.scope is Scope.ADMIN else replace(info, held_by=())


@router.get("", operation_id="listImages", summary="List what is stored.")
@call(answer=ImagePage)
async def page(
    services: Engine, caller: Caller, limit: Limit = MOST_IN_PAGE, cursor: Cursor = ""
) -> Response:
    need(caller, Scope.DEVELOPER)
    found = [_seen(info, caller) for info in await services.images.list()]
    return answer(page_of(found, _name, cursor=cursor, limit=limit))


def _name(info: ImageInfo) -> Key:
    """By name; what no name stands for comes last."""
    return (float(not info.names), info.names[0] if info.names else "", info.digest)


@router.post(
    "/get", operation_id="getImage", summary="Have an image, built or fetched first when it is not stored."
)
@call(body=ImageRequest, answer=ImageInfo)
async def have(request: Request, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    body = await body_of(request, ImageRequest)
    return answer(await while_there(request, services.images.get(body.name)))


@router.post("/refresh", operation_id="refreshImage", summary="Build or fetch an image anew.")
@call(body=ImageRequest, answer=ImageInfo)
async def refresh(request: Request, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    body = await body_of(request, ImageRequest)
    return answer(await while_there(request, services.images.refresh(body.name)))


@router.post("/verify", operation_id="verifyImage", summary="Read all of an image, and compare.")
@call(body=ImageRequest, answer=ImageInfo)
async def verify(request: Request, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    body = await body_of(request, ImageRequest)
    return answer(await while_there(request, services.images.verify(body.name)))


@router.post("/collect", operation_id="collectImages", summary="Remove what nothing needs.")
@call(body=CollectRequest, needed=False, answer=Freed)
async def collect(request: Request, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    body = await body_of(request, CollectRequest)
    return answer(await services.images.collect(body.budget))


@router.get("/{name:path}", operation_id="seeImage", summary="See a stored image, by name or digest.")
@call(answer=ImageInfo)
async def see(name: str, services: Engine, caller: Caller) -> Response:
    """Looking fetches nothing."""
    need(caller, Scope.DEVELOPER)
    for info in await services.images.list():
        if name in (info.digest, *info.names, *info.sources):
            return answer(_seen(info, caller))
    raise NotFound(f"no image {shown(name)} is stored", hint="POST /v1/images/get fetches or builds it")


@router.delete(
    "/{name:path}", operation_id="removeImage", summary="Take a name away, and an image that has no other."
)
@call(answer=ImageInfo)
async def remove(name: str, services: Engine, caller: Caller) -> Response:
    need(caller, Scope.ADMIN)
    return answer(await services.images.remove(name))
