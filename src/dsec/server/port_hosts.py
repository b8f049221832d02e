"""A port of a sandbox as a host of its own: ``http://8000-sb-….localhost:7070/``.

Below a path of this server a page can be shown, but a program of the browser can hardly live: its origin is nobody's, and its addresses begin
with a path that it does not know. As a host it has an origin to itself, with cookies, WebSockets and workers, and everything else of this
server is another site. Browsers take every name below ``localhost`` for this machine.

The first visit brings the sandbox's token in the address, gets it back as a cookie that no script reads, and is sent on without it.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

from dsec.server.port_headers import OWN_HOST

COOKIE: Final = "dsec_token"
_HOST: Final = re.compile(rb"([1-9][0-9]{0,4})-(sb-[a-z2-7]{26})\.localhost(?::[0-9]{1,5})?", re.IGNORECASE)


def place(scope: Scope) -> None:
    """Let a request to such a host be one for that port: whatever its path, nothing else is reached by that name."""
    if scope["type"] not in ("http", "websocket"):
        return
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    match = _HOST.fullmatch(host)
    if match is None:
        return
    port, sandbox = (part.decode().lower() for part in match.groups())
    prefix = f"/v1/sandboxes/{sandbox}/ports/{port}"
    scope["raw_path"] = prefix.encode() + scope["raw_path"]
    scope["path"] = prefix + scope["path"]
    scope[OWN_HOST] = True


def greeting(scope: Scope, token: str, target: bytes) -> Response:
    """What a visit with a token in its address is told."""
    answer = Response(status_code=303)
    answer.headers["location"] = "/" + target.decode("latin-1").lstrip("/\\")  # never another host
    answer.headers["cache-control"] = "no-store"
    answer.headers["referrer-policy"] = "no-referrer"
    secure = scope.get("scheme") in ("https", "wss")
    answer.set_cookie(COOKIE, token, path="/", httponly=True, samesite="lax", secure=secure)
    return answer
