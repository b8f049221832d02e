"""What listens on a port of a sandbox, reached from outside: HTTP and WebSockets."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request, WebSocket
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from dsec.errors import DsecError
from dsec.model.ids import SandboxId, parse_sandbox_id
from dsec.ports.engine import Services
from dsec.ports.gate import Gate
from dsec.server.context import Engine
from dsec.server.documents import call
from dsec.server.door import refuse
from dsec.server.failures import failure
from dsec.server.port_headers import OWN_HOST, inward, outward, target_of, token_in_query, token_of
from dsec.server.port_hosts import greeting
from dsec.server.port_http import Proxied, request_head
from dsec.server.port_sockets import bridge

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}/ports/{port}", tags=["ports"])

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
Port = Annotated[
    int, Path(ge=1, le=65535, description="on which a program inside listens, on 127.0.0.1 or on all")
]


@call(answer="*/*")
async def proxy(request: Request, sandbox: str, port: Port, path: str, services: Engine) -> Response:
    """The answer is the program's, whatever its status; ours have a body with `error` and its code.

    A browser sees what comes back as a page of an origin of its own. `Authorization`, `X-API-Key` and cookies of ours are not passed on.
    As the host `PORT-ID.localhost` (and the server's own port) it has an origin for itself, with all that browsers can do.
    With `?dsec_token=` or the header `X-Dsec-Token` (the sandbox's own token) keys of the program's own may stand in them.
    """
    del path  # decoded already: what it was is in the scope
    which = parse_sandbox_id(sandbox)
    target, prefix = target_of(request.scope), _prefix(request.scope, which, port)
    given, token = request.scope["headers"], token_of(request.scope)
    if not prefix and token is not None and token_in_query(request.scope) and request.method == "GET":
        await services.sandboxes.get(which)  # it may be the token of another one
        return greeting(request.scope, token, target)
    by_token = token is not None
    head = request_head(request.method, target, inward(given, port, prefix, by_token=by_token), given)
    sock = await services.ports.connect(which, port)
    return Proxied(sock, head, port, partial(outward, prefix=prefix, target=target))


async def proxy_root(request: Request, sandbox: str, port: Port, services: Engine) -> Response:
    """As :func:`proxy`, with nothing behind the port."""
    return await proxy(request, sandbox, port, "", services)


def _prefix(scope: Scope, sandbox: SandboxId, port: int) -> str:
    """The path of the port as it is seen from outside."""
    return "" if scope.get(OWN_HOST) else f"/v1/sandboxes/{sandbox}/ports/{port}"


def _add_routes(router: APIRouter) -> None:
    """Each method is an operation of its own, with and without a path behind the port."""
    for method in METHODS:
        summary = f"{method} from what listens on a port of the sandbox."
        router.add_api_route(
            "/{path:path}", proxy, methods=[method], operation_id=f"port{method.title()}", summary=summary
        )
        router.add_api_route("", proxy_root, methods=[method], include_in_schema=False)


_add_routes(router)


@router.websocket("/{path:path}")
async def proxy_socket(client: WebSocket, sandbox: str, port: Port) -> None:
    """As :func:`proxy`, for WebSockets. What goes wrong before it is accepted is told as an answer of HTTP."""
    try:
        which = parse_sandbox_id(sandbox)
        target, prefix = target_of(client.scope), _prefix(client.scope, which, port)
        by_token = token_of(client.scope) is not None
        headers = inward(client.scope["headers"], port, prefix, by_token=by_token)
        sock = await _services(client).ports.connect(which, port)
        await bridge(client, sock, port, target, headers[1:])  # its own library says `Host`
    except DsecError as error:
        await refuse(client.scope, client.receive, client.send, failure(error))


def _services(client: HTTPConnection) -> Services:
    gate: Gate = client.app.state.gate
    return gate.services(client.scope["dsec.principal"])
