"""Commands: run and waited for, started, listed, signalled, fed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsec.client.requests import exec_request, pty_size
from dsec.errors import BadRequest, UnknownOutcome
from dsec.model.execs import ExecInfo, ExecRequest, ExecResult
from dsec.model.ids import ExecId, SandboxId, parse_exec_id, parse_sandbox_id
from dsec.model.tenants import Principal
from dsec.ports.engine import ExecSession, Services
from dsec.ports.idempotency import Begun
from dsec.server.bodies import MAX_JSON, body_of, first_line, pieces_of, read
from dsec.server.context import Caller, Engine, answer
from dsec.server.documents import BYTES, call
from dsec.server.idempotency import mark_of
from dsec.server.presence import patient_with, while_sending, while_there
from dsec.server.recovery import intent_of, is_unknown
from dsec.server.shapes import Empty, ExecAnswer, ExecBody, Items, PtyBody, SignalBody, Started
from dsec.server.waits import Timeout, within

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}/execs", tags=["execs"])

EXACT: Final = b"application/vnd.dsec+json"
"""In ``Accept``: results as the model has them, all bytes as base64."""
STREAMED: Final = "application/vnd.dsec.stdin"
"""A body that is a line of JSON, and behind it standard input."""
STDIN_MOST: Final = 1 << 30  # bytes in one call


async def _found(
    services: Services, caller: Principal, mark: str, begun: Begun, **arguments: Any
) -> Response | None:
    """The command that an interrupted try started: its result, or its id."""
    del caller, begun
    request: Request = arguments["request"]
    which = parse_sandbox_id(arguments["sandbox"])
    body = await body_of(request, ExecBody)
    if body.scratch:
        raise UnknownOutcome("the server was interrupted, and the throw-away copy is gone")
    intent = await intent_of(services, which, mark)
    if intent is None:
        return None
    session = await services.execs.attach(which, ExecId(intent.ref))
    if not body.wait:
        if await is_unknown(services, intent):  # it may never have begun
            raise UnknownOutcome("the server was interrupted when it began the command", exec=session.id)
        return answer(Started(id=session.id, pid=session.pid), 201)
    return answer(told(request, await while_there(request, session.wait())))


@router.post(
    "",
    operation_id="exec",
    summary="Run a command: the answer is its result, or with wait=false its id.",
)
@call(body=ExecBody, answer=ExecAnswer, also={201: Started}, creates=True, recover=_found, findable=True)
async def run(request: Request, sandbox: str, services: Engine, caller: Caller) -> Response:
    del caller
    which = parse_sandbox_id(sandbox)
    if request.headers.get("content-type") == STREAMED:
        return await _streamed(request, which, services)
    body = await body_of(request, ExecBody)
    asked = request_of(body, mark_of(request))
    if not body.wait:
        session = await services.execs.start(which, asked)
        return answer(Started(id=session.id, pid=session.pid), 201)
    if body.stdin_open:
        raise BadRequest(
            "stdin_open: nobody could send to a command that is waited for", hint='{"wait": false}'
        )
    result = await while_there(request, services.execs.run(which, asked))
    return answer(told(request, result))


async def _streamed(request: Request, which: SandboxId, services: Services) -> Response:
    """A line of JSON, and behind it standard input until the body ends; the client that leaves kills the command."""
    patient_with(request)
    head, rest = await first_line(pieces_of(request), MAX_JSON)
    body = read(ExecBody, head)
    if body.stdin is not None or body.stdin_base64 is not None or not body.wait:
        raise BadRequest("stdin: it is what follows, and the command is waited for")
    asked = request_of(body)
    result = await while_sending(request, rest, lambda stdin: services.execs.run(which, asked, stdin))
    return answer(told(request, result))


def request_of(body: ExecBody, mark: str = "") -> ExecRequest:
    """The command that a body means.  Raises: BadRequest, TooLarge."""
    given = [value for value in (body.argv, body.argv_base64, body.command) if value is not None]
    if len(given) != 1:
        raise BadRequest("argv: exactly one of argv, argv_base64 and command is needed")
    if body.stdin is not None and body.stdin_base64 is not None:
        raise BadRequest("stdin: it is given twice", hint="either stdin or stdin_base64")
    stdin = body.stdin_base64 if body.stdin is None else body.stdin.encode("utf-8", "surrogateescape")
    asked = exec_request(
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
    return replace(asked, mark=mark) if mark else asked


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
    "/{exec}", operation_id="getExec", summary="See whether a command can be followed, and its process."
)
@call(answer=Started)
async def get(sandbox: str, exec: str, services: Engine) -> Response:
    session = await followed(services, sandbox, exec)
    return answer(Started(id=session.id, pid=session.pid))


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
@call(body=BYTES, needed=False, status=204)
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
    body = await body_of(request, PtyBody, needed=True)
    await (await followed(services, sandbox, exec)).resize(pty_size(body.rows, body.cols))
    return Response(status_code=204)
