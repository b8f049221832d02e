"""Templates: built, tagged, rolled back, carried away and brought in."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query, Request
from msgspec import Meta
from starlette.responses import Response

from dsec.model.built import Built, Tagged
from dsec.model.ids import parse_snapshot_id
from dsec.model.paging import MOST_IN_PAGE
from dsec.model.tenants import Principal
from dsec.ports.engine import Services
from dsec.ports.idempotency import Begun
from dsec.server.bodies import MAX_JSON, body_of, collected, pieces_of
from dsec.server.context import Engine, answer
from dsec.server.documents import BYTES, call
from dsec.server.outflow import outflow
from dsec.server.pages import Cursor, Key, Limit, page_of
from dsec.server.presence import while_there

router: Final = APIRouter(prefix="/v1/templates", tags=["templates"])

YAML: Final = "application/yaml"
Tag = Annotated[str, Query(max_length=128, description="that means it afterwards; empty: `latest`")]
Reference = Annotated[str, Meta(min_length=1, max_length=512)]


class TagRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Let ``tag`` mean what ``reference`` means now."""

    reference: Reference
    tag: str


class ReferenceRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``name`` or ``name:tag``."""

    reference: Reference


class PromoteRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A snapshot that becomes a template of that name."""

    snapshot: str
    name: str
    tag: str = "latest"


class TagPage(msgspec.Struct, kw_only=True):
    """A part of a list; ``next`` is the cursor of the next one, "" = this was the last."""

    items: tuple[Tagged, ...]
    next: str


async def _again(
    services: Services, caller: Principal, mark: str, begun: Begun, **arguments: Any
) -> Response | None:
    """The same document, or snapshot, over the same base gives the same: what was cut off is simply done again."""
    del services, caller, mark, begun, arguments
    return None


@router.post("", operation_id="buildTemplate", summary="Build a template.", status_code=201)
@call(body=YAML, answer=Built, status=201, creates=True, recover=_again)
async def build(
    request: Request,
    services: Engine,
    tag: Tag = "latest",
    strict: bool = False,
    update: bool = False,
    source: Annotated[str, Query(max_length=512, description="of the document, for errors")] = "template",
) -> Response:
    """The body is the document itself. Building may take minutes; whoever leaves meanwhile stops it."""
    text = await collected(request, MAX_JSON)
    work = services.templates.build(
        text, source=source or "template", tag=tag or "latest", strict=strict, update=update
    )
    return answer(await while_there(request, work), 201)


@router.get("", operation_id="listTemplates", summary="What every tag means, by name.")
@call(answer=TagPage)
async def page(services: Engine, limit: Limit = MOST_IN_PAGE, cursor: Cursor = "") -> Response:
    return answer(page_of(await services.templates.list(), _name, cursor=cursor, limit=limit))


def _name(tagged: Tagged) -> Key:
    return tagged.name, tagged.tag


@router.post("/tag", operation_id="tagTemplate", summary="Let a tag mean what a reference means now.")
@call(body=TagRequest, answer=Built)
async def tag_it(request: Request, services: Engine) -> Response:
    body = await body_of(request, TagRequest)
    return answer(await services.templates.tag(body.reference, body.tag))


@router.post("/rollback", operation_id="rollbackTemplate", summary="Let a tag mean what it meant before.")
@call(body=ReferenceRequest, answer=Built, creates=True)
async def rollback(request: Request, services: Engine) -> Response:
    body = await body_of(request, ReferenceRequest)
    return answer(await services.templates.rollback(body.reference))


@router.post(
    "/promote", operation_id="promoteSnapshot", summary="Make a template of a snapshot.", status_code=201
)
@call(body=PromoteRequest, answer=Built, status=201, creates=True, recover=_again)
async def promote(request: Request, services: Engine) -> Response:
    body = await body_of(request, PromoteRequest)
    snapshot = parse_snapshot_id(body.snapshot)
    work = services.templates.promote(snapshot, name=body.name, tag=body.tag)
    return answer(await while_there(request, work), 201)


@router.get("/export", operation_id="exportTemplate", summary="A built template as a file, as it is made.")
@call(answer=BYTES)
async def export(
    request: Request, services: Engine, reference: Annotated[str, Query(min_length=1, max_length=512)]
) -> Response:
    return await while_there(request, outflow(services.sharing.export_template(reference), BYTES))


@router.post("/import", operation_id="importTemplate", summary="Take in a template's file.", status_code=201)
@call(body=BYTES, answer=Built, status=201)
async def take_in(request: Request, services: Engine, tag: Tag = "") -> Response:
    return answer(await services.sharing.import_template(pieces_of(request), tag=tag), 201)


@router.get(
    "/{name}/history", operation_id="templateHistory", summary="Each time that a tag was set, oldest first."
)
@call(answer=TagPage)
async def history(name: str, services: Engine, limit: Limit = MOST_IN_PAGE, cursor: Cursor = "") -> Response:
    found = list(enumerate(await services.templates.history(name)))
    page = page_of(found, lambda numbered: (float(numbered[0]),), cursor=cursor, limit=limit)
    return answer(TagPage(items=tuple(tagged for _, tagged in page.items), next=page.next))


@router.get("/{reference:path}", operation_id="getTemplate", summary="What a reference means now.")
@call(answer=Built)
async def get(reference: str, services: Engine) -> Response:
    return answer(await services.templates.find(reference))


@router.delete(
    "/{reference:path}",
    operation_id="removeTemplate",
    summary="Take a tag away; with the last one of a name goes what was built. Twice is no error.",
    status_code=204,
)
@call(status=204)
async def remove(reference: str, services: Engine) -> Response:
    await services.templates.remove(reference)
    return Response(status_code=204)
