"""Decisions: what an agent was about to do, and why, kept beside what it did."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsec.errors import BadRequest
from dsec.model.ids import parse_sandbox_id
from dsec.model.journal import Record
from dsec.model.tenants import Principal
from dsec.ports.engine import Services
from dsec.ports.idempotency import Begun
from dsec.server.bodies import aside, json_of, parsed
from dsec.server.context import Engine, answer
from dsec.server.documents import call
from dsec.server.recovery import PIECE, SLACK

ACT: Final = "decision"

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}/decisions", tags=["decisions"])


async def _kept(
    services: Services, caller: Principal, mark: str, begun: Begun, **arguments: Any
) -> Response | None:
    """The record that an interrupted try kept."""
    del caller, mark
    decision, after = parsed(await json_of(arguments["request"])), 0
    which = parse_sandbox_id(arguments["sandbox"])
    while records := await services.observe.events(which, after=after, limit=PIECE):
        for record in records:
            if record.act == ACT and record.at >= begun.at - SLACK and record.payload == decision:
                return answer(record, 201)
        after = records[-1].seq
    return None


@router.post("", operation_id="decide", summary="Keep a decision in the sandbox's journal.", status_code=201)
@call(body=dict[str, Any], answer=Record, status=201, creates=True, recover=_kept)
async def decide(request: Request, sandbox: str, services: Engine) -> Response:
    """An object of JSON of the caller's own, up to 32 KiB: the plan, the tool that was chosen, the alternatives, ids of a trace."""
    which = parse_sandbox_id(sandbox)
    raw = await json_of(request)
    decision = await aside(request, raw, partial(parsed, raw)) if raw else None
    if not isinstance(decision, dict):
        raise BadRequest("body: a decision is an object of JSON", hint='{"plan": "..."}')
    return answer(await services.observe.decide(which, decision), 201)
