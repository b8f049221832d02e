"""Output of a command as server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dsec.model.execs import ExecResult, Stream
from dsec.model.ids import parse_exec_id, parse_sandbox_id
from dsec.ports.engine import ExecSession
from dsec.server.context import Engine
from dsec.server.documents import EVENTS, call
from dsec.server.outflow import ending
from dsec.server.shapes import ExecEnd
from dsec.server.streams import event, event_stream

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}/execs", tags=["execs"])

Offset = Annotated[int, Query(ge=0, le=2**63 - 1)]
_AT: Final = re.compile(r"(\d{1,18}):(\d{1,18})")


@router.get(
    "/{exec}/output",
    operation_id="followExec",
    summary="Follow a command's output from these offsets on, as events `chunk` and, at its end, `exit`.",
)
@call(answer=EVENTS)
async def output(
    request: Request, sandbox: str, exec: str, services: Engine, stdout: Offset = 0, stderr: Offset = 0
) -> Response:
    before = _AT.fullmatch(request.headers.get("last-event-id", ""))
    if before is not None:
        stdout, stderr = int(before[1]), int(before[2])
    session = await services.execs.attach(
        parse_sandbox_id(sandbox), parse_exec_id(exec), stdout=stdout, stderr=stderr
    )
    return await event_stream(request, _events(session, {Stream.STDOUT: stdout, Stream.STDERR: stderr}))


async def _events(session: ExecSession, at: dict[Stream, int]) -> AsyncIterator[bytes]:
    async with ending(session.output()) as chunks:
        async for chunk in chunks:
            at[chunk.stream] = chunk.offset + len(chunk.data)
            yield event("chunk", chunk, f"{at[Stream.STDOUT]}:{at[Stream.STDERR]}")
    yield event("exit", ended(await session.wait()))


def ended(result: ExecResult) -> ExecEnd:
    """How a command ended, without what it wrote."""
    return ExecEnd(
        id=result.id,
        exit_code=result.exit_code,
        start_errno=result.start_errno,
        signal=result.signal,
        timed_out=result.timed_out,
        truncated=result.truncated,
        dropped=result.dropped,
        oom=result.oom,
        duration=result.duration,
    )
