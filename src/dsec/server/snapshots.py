"""Snapshots: seen, removed, carried away and brought in. They are taken of sandboxes."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dsec.model.ids import SnapshotId, parse_sandbox_id, parse_snapshot_id
from dsec.model.paging import MOST_IN_PAGE
from dsec.model.snapshots import SnapshotInfo
from dsec.server.bodies import pieces_of
from dsec.server.context import Engine, answer
from dsec.server.documents import BYTES, call
from dsec.server.outflow import outflow
from dsec.server.pages import Cursor, Key, Limit, page_of
from dsec.server.presence import while_there

router: Final = APIRouter(prefix="/v1/snapshots", tags=["snapshots"])


class SnapshotPage(msgspec.Struct, kw_only=True):
    """A part of a list; ``next`` is the cursor of the next one, "" = this was the last."""

    items: tuple[SnapshotInfo, ...]
    next: str


@router.get(
    "", operation_id="listSnapshots", summary="List snapshots, of one sandbox or of all, oldest first."
)
@call(answer=SnapshotPage)
async def page(
    services: Engine,
    sandbox: Annotated[str, Query(max_length=64, description="of this sandbox, also when it has ended")] = "",
    limit: Limit = MOST_IN_PAGE,
    cursor: Cursor = "",
) -> Response:
    of = parse_sandbox_id(sandbox) if sandbox else None
    return answer(page_of(await services.snapshots.list(of), _age, cursor=cursor, limit=limit))


def _age(info: SnapshotInfo) -> Key:
    return info.created_at, info.id


@router.post("/import", operation_id="importSnapshot", summary="Take in a snapshot's file.", status_code=201)
@call(body=BYTES, answer=SnapshotInfo, status=201)
async def take_in(request: Request, services: Engine) -> Response:
    return answer(await services.sharing.import_snapshot(pieces_of(request)), 201)


@router.get("/{snapshot}", operation_id="getSnapshot", summary="See one snapshot.")
@call(answer=SnapshotInfo)
async def get(snapshot: str, services: Engine) -> Response:
    return answer(await services.snapshots.get(parse_snapshot_id(snapshot)))


@router.delete(
    "/{snapshot}",
    operation_id="removeSnapshot",
    summary="Remove a snapshot; sandboxes that began with it keep their files. Twice is no error.",
    status_code=204,
)
@call(status=204)
async def remove(snapshot: str, services: Engine) -> Response:
    await services.snapshots.remove(parse_snapshot_id(snapshot))
    return Response(status_code=204)


@router.get(
    "/{snapshot}/export", operation_id="exportSnapshot", summary="A snapshot as a file, as it is made."
)
@call(answer=BYTES)
async def export(request: Request, snapshot: str, services: Engine) -> Response:
    which: SnapshotId = parse_snapshot_id(snapshot)
    name = {"content-disposition": f'attachment; filename="{which}.dsec"'}
    return await while_there(request, outflow(services.sharing.export_snapshot(which), BYTES, name))
