"""Whole trees of sandboxes, as tar archives."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsec.model.files import Transfer
from dsec.model.ids import parse_sandbox_id
from dsec.server.bodies import pieces_of
from dsec.server.context import Engine, answer
from dsec.server.documents import TAR, call
from dsec.server.outflow import outflow
from dsec.server.paths import ExactPath, User

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}/tree", tags=["files"])


@router.get("", operation_id="packTree", summary="A file or directory as a tar archive.")
@call(answer=TAR)
async def pack(sandbox: str, path: ExactPath, services: Engine, user: User = "") -> Response:
    return await outflow(services.trees.pack(parse_sandbox_id(sandbox), path, user=user), TAR)


@router.put("", operation_id="unpackTree", summary="Unpack a tar archive below a directory.")
@call(body=TAR, answer=Transfer)
async def unpack(
    request: Request, sandbox: str, path: ExactPath, services: Engine, user: User = ""
) -> Response:
    moved = await services.trees.unpack(parse_sandbox_id(sandbox), pieces_of(request), path, user=user)
    return answer(moved)
