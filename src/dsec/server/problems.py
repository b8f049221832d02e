"""What could not be cleaned up yet."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from dsec.model.sandbox import Problem
from dsec.server.context import Engine, answer
from dsec.server.documents import call

router: Final = APIRouter(prefix="/v1/problems", tags=["problems"])


class ProblemList(msgspec.Struct, kw_only=True):
    """Clean-ups that failed and are tried again."""

    items: tuple[Problem, ...]


@router.get("", operation_id="listProblems", summary="What could not be cleaned up yet, and is tried again.")
@call(answer=ProblemList)
async def listed(services: Engine) -> Response:
    return answer(ProblemList(items=await services.observe.problems()))
