"""Commands: run and waited for, started, listed, signalled, fed."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsec.client.requests import exec_request, pty_size
from dsec.errors import BadRequest
from dsec.model.execs import ExecInfo, ExecRequest, ExecResult
from dsec.model.ids import parse_exec_id, parse_sandbox_id
from dsec.ports.engine import ExecSession, Services
from dsec.server.bodies import body_of, pieces_of
from dsec.server.context import Caller, Engine, answer
from dsec.server.documents import BYTES, call
from dsec.server.presence import while_there
from dsec.server.shapes import Empty, ExecAnswer, ExecBody, Items, PtyBody, SignalBody, Started
from dsec.server.waits import Timeout, within

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}/execs", tags=["execs"])

EXACT: Final = b"application/vnd.dsec+json"
"""In ``Accept``: results as the model has them, all bytes as base64."""
STDIN_MOST: Final = 1 << 30  # bytes in one call


@router.post(
    "",
    operation_id="exec",
    summary="Run a command: the answer is its result, or with wait=false its id.",
)
@call(body=ExecBody, answer=ExecAnswer, also={201: Started}, creates=True)
async def run(request: Request, sandbox: str, services: Engine, caller: Caller) -> Response:
    del caller
    which = parse_sandbox_id(sandbox)
    body = await body_of(request, ExecBody)
    asked = request_of(body)
    if not body.wait:
        session = await services.execs.start(which, asked)
        return answer(Started(id=session.id, pid=session.pid), 201)
    if body.stdin_open:
        raise BadRequest("stdin_open: nobody could send to a command that is waited for", hint="wait=false")
    result = await while_there(request, services.execs.run(which, asked))
    return answer(told(request, result))


def request_of(body: ExecBody) -> ExecRequest:
    """The command that a body means.  Raises: BadRequest, TooLarge."""
    given = [value for value in (body.argv, body.argv_base64, body.command) if value is not None]
    if len(given) != 1:
        raise BadRequest("argv: exactly one of argv, argv_base64 and command is needed")
    if body.stdin is not None and body.stdin_base64 is not None:
        raise BadRequest("stdin: it is given twice", hint="either stdin or stdin_base64")
    stdin = body.stdin_base64 if body.stdin is None else body.stdin.encode("utf-8", "surrogateescape")
    return exec_request(
        given[0],
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        timeout=body.timeout,
        stdin=stdin,
        stdin_open=body.stdin_open,
        pty=None if body.pty is None else pty_size(body.pty.rows, body.pty.cols),
        scratch=body.scratch,
    )


def told(request: Request, result: ExecResult) -> object:
    """A result as its reader wants it: exact, or as people read it."""
    return result if exact(request) else readable(result)


def exact(request: Request) -> bool:
    """Whether the caller is a program that wants values of the model."""
    return any(name == b"accept" and value == EXACT for name, value in request.scope["headers"])


def readable(result: ExecResult) -> ExecAnswer:
    """Output as text where it is text."""
    shown = ExecAnswer(
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
    for name in ("stdout", "stderr"):
        data: bytes = getattr(result, name)
        try:
            setattr(shown, name, data.decode())
        except UnicodeDecodeError:
            setattr(shown, f"{name}_base64", data)
    return shown


@router.get("", operation_id="listExecs", summary="List the latest thousand commands, oldest first.")
@call(answer=Items[ExecInfo])
async def listed(sandbox: str, services: Engine) -> Response:
    return answer(Items(items=await services.execs.list(parse_sandbox_id(sandbox))))


async def followed(services: Services, sandbox: str, exec_id: str) -> ExecSession:
    """A command that was started before.  Raises: NotFound, BadRequest."""
    return await services.execs.attach(parse_sandbox_id(sandbox), parse_exec_id(exec_id))


@router.get(
    "/{exec}/result",
    operation_id="getExecResult",
    summary="Wait for the end of a command: its result, or 202 while it still runs.",
)
@call(answer=ExecAnswer, also={202: Empty})
async def result(
    request: Request,
    sandbox: str,
    exec: str,
    services: Engine,
    timeout: Timeout = 30.0,
) -> Response:
    session = await followed(services, sandbox, exec)
    found = await within(request, session.wait(), timeout)
    return answer(Empty(), 202) if found is None else answer(told(request, found))


@router.post(
    "/{exec}/signal",
    operation_id="signalExec",
    summary="Signal a command, or kill its whole tree; one that has ended is no error.",
    status_code=204,
)
@call(body=SignalBody, status=204)
async def signal(request: Request, sandbox: str, exec: str, services: Engine) -> Response:
    body = await body_of(request, SignalBody)
    session = await followed(services, sandbox, exec)
    await session.signal(body.signal, tree=body.tree)
    return Response(status_code=204)


@router.post(
    "/{exec}/stdin",
    operation_id="sendStdin",
    summary="Send raw bytes to a command's standard input; waits while it does not read.",
    status_code=204,
)
@call(body=BYTES, status=204)
async def send(request: Request, sandbox: str, exec: str, services: Engine) -> Response:
    session = await followed(services, sandbox, exec)
    async for piece in pieces_of(request, STDIN_MOST):
        await session.send(piece)
    return Response(status_code=204)


@router.delete(
    "/{exec}/stdin",
    operation_id="closeStdin",
    summary="End a command's standard input.",
    status_code=204,
)
@call(status=204)
async def close_stdin(sandbox: str, exec: str, services: Engine) -> Response:
    await (await followed(services, sandbox, exec)).close_stdin()
    return Response(status_code=204)


@router.post(
    "/{exec}/resize",
    operation_id="resizeExec",
    summary="Tell a command's terminal a new size.",
    status_code=204,
)
@call(body=PtyBody, status=204)
async def resize(request: Request, sandbox: str, exec: str, services: Engine) -> Response:
    body = await body_of(request, PtyBody)
    await (await followed(services, sandbox, exec)).resize(pty_size(body.rows, body.cols))
    return Response(status_code=204)
