"""Every request comes in here: who asks, whether the server still takes requests, and what becomes of errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsec.errors import BadRequest, Busy, Denied, Unauthenticated
from dsec.model.tenants import OWNER, Principal
from dsec.model.tenants import Scope as KeyScope
from dsec.ports.gate import Gate
from dsec.server.failures import answer_to, failure, stopping
from dsec.server.hot import Hot
from dsec.server.port_headers import OWN_HOST, token_of
from dsec.server.port_hosts import place
from dsec.server.stays import ServerStop, Stay, Stays

MOST: Final = 1000
_PROJECT: Final = "dsec.asking"
"""In the scope of a request: the project whose request it is counted as."""
PEER: Final = "dsec.peer"
"""In the state of a connection: the uid at the other end of a unix socket, put there by whoever listens."""
_STAY: Final = "dsec.stay"
"""In the scope of a request: who is being answered, where he came in by a key."""
_ROOT: Final = 0
_ENDED: Final = 1008  # a policy was broken: of a WebSocket
_HEALTH: Final = b'{"status":"ok"}'
_MAX_KEY: Final = 512  # characters
_SAFE: Final = ("GET", "HEAD", "OPTIONS")


class Door:
    """ASGI around everything else.

    Attributes:
        running: requests that are being answered. asked: when the last of them ended, seconds of the monotonic clock.
        most: that may be answered at once. stays: of whom. stop: set when the server takes no more, and streams are to end.
    """

    def __init__(self, app: ASGIApp, gate: Gate, hot: Hot) -> None:
        self._app = app
        self._gate = gate
        self._hot = hot
        self._uid = os.geteuid()
        self.running = 0
        self.most = MOST
        self._asking: Counter[str] = Counter()  # of them, those of each project
        self.asked = time.monotonic()
        self.stays = Stays(gate)
        self.stop = ServerStop(self.stays)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        place(scope)
        self.running += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.running -= 1
            self.asked = time.monotonic()
            self._leave(scope)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = _Begun(send)
        try:
            answer = await self._let_in(scope, receive)
            if answer is None:
                await self._app(scope, receive, begun)
                return
        except asyncio.CancelledError:
            answer = await _left(scope, begun)
        except Exception as error:  # all of them end here
            if begun.ended:
                return  # it was told
            answer = answer_to(error)
            if begun.begun:  # half an answer is out: what is left is to end the connection
                raise
        await refuse(scope, receive, send, answer)

    async def _let_in(self, scope: Scope, receive: Receive) -> Response | None:
        """What is answered at once; None: it is for the rest of the application."""
        if scope["path"] == "/health" and scope["type"] == "http":
            return self._health(scope["method"])
        if self.stop.is_set():
            return failure(stopping())
        principal = await self._principal(scope)
        self._enter(scope, principal)
        scope["dsec.principal"] = principal
        scope["dsec.stop"] = self._stay(scope, principal)
        handler = self._hot.find(scope)
        if handler is None:
            return None
        return await handler(Request(scope, receive), self._gate.services(principal), principal)

    def _stay(self, scope: Scope, principal: Principal) -> asyncio.Event:
        """What is set when its streams are to end: with the server, or with its key."""
        if principal is OWNER:
            return self.stop
        stay = scope[_STAY] = self.stays.enter(principal)
        if self.stop.is_set():  # meanwhile
            stay.stop.set()
        return stay.stop

    def _enter(self, scope: Scope, principal: Principal) -> None:
        """Long answers keep their places: a project may have as many as it leaves to others.  Raises: Busy."""
        if principal.scope is KeyScope.ADMIN:
            return
        asking = self._asking[principal.project]
        if asking >= max(self.most - self.running, 1):
            raise Busy(
                f"{asking} requests of project {principal.project} are being answered, and no more of it can be now",
                hint="end streams that nobody reads, or try again",
                reason="requests",
                retry_after=1,
            )
        self._asking[principal.project] += 1
        scope[_PROJECT] = principal.project

    def _leave(self, scope: Scope) -> None:
        stay = scope.get(_STAY)
        if stay is not None:
            self.stays.leave(stay)
        project = scope.get(_PROJECT)
        if project is not None:
            self._asking[project] -= 1
            if not self._asking[project]:
                del self._asking[project]

    def _health(self, method: str) -> Response:
        if method not in ("GET", "HEAD"):
            refused = failure(BadRequest("/health can only be got"), 405)
            refused.headers["allow"] = "GET, HEAD"
            return refused
        if self.stop.is_set():
            return failure(stopping())
        return Response(_HEALTH, media_type="application/json")

    async def _principal(self, scope: Scope) -> Principal:
        """Raises: Unauthenticated, Busy. Denied: a page of somebody else made a browser ask."""
        peer = scope.get("state", {}).get(PEER)
        if peer is not None and peer in (self._uid, _ROOT):
            return OWNER
        token = token_of(scope)
        if token is not None:
            if scope.get(OWN_HOST) and scope.get("method", "WEBSOCKET") not in _SAFE and _foreign(scope):
                raise Denied("another site made the browser ask", hint="ask from a page of this sandbox")
            return await self._by_token(token)
        key, basic = key_of(scope["headers"])
        if basic and scope.get("method", "WEBSOCKET") not in _SAFE and _foreign(scope):
            raise Denied("another site made the browser ask", hint="send the key as a bearer token")
        return await self._gate.principal(key)

    async def _by_token(self, token: str) -> Principal:
        """Whom a token in an address or beside other keys lets in: addresses are written down in many places, and are no place for more than one sandbox.

        Raises: Unauthenticated, Busy.
        """
        principal = await self._gate.principal(_sound(token.encode("latin-1")))
        if principal.scope is not KeyScope.SANDBOX:
            raise Unauthenticated(
                "dsec_token: only a sandbox's own token may stand there",
                hint="POST /v1/sandboxes/{id}/token makes one",
            )
        return principal


def _foreign(scope: Scope) -> bool:
    """Whether a browser asks for a page that is not from here; pages out of sandboxes are not. Browsers add keys by themselves, also to WebSockets."""
    headers = HTTPConnection(scope).headers
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


class _Begun:
    """``send`` that knows whether anything was sent, and everything."""

    __slots__ = ("_send", "begun", "ended")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = self.ended = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)
        kind = message["type"]
        if kind == "websocket.close" or (
            kind == "http.response.body" and not message.get("more_body", False)
        ):
            self.ended = True


async def _left(scope: Scope, begun: _Begun) -> Response:
    """Its key has ended, and what it asked for did not end by itself: the answer, where none has begun.

    Raises:
        CancelledError: it was cancelled by somebody else. Unauthenticated: half an answer is out.
    """
    stay: Stay | None = scope.get(_STAY)
    task = asyncio.current_task()
    assert task is not None
    if stay is None or stay.stop.why is None or task.uncancel():
        raise asyncio.CancelledError
    if not begun.begun:
        return answer_to(stay.stop.why)
    if scope["type"] == "websocket" and not begun.ended:
        await begun({"type": "websocket.close", "code": _ENDED, "reason": stay.stop.why.message})
    raise stay.stop.why


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, bool]:
    """The key of a request, and whether it came as a password.  Raises: Unauthenticated: there is none, or more than one."""
    found = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
    if not found:
        raise Unauthenticated(
            "no key was given", hint="Authorization: Bearer KEY; `dsec key create` makes one"
        )
    if len(found) > 1:
        raise Unauthenticated("more than one key was given", hint="one Authorization header")
    name, value = found[0]
    if name == b"x-api-key":
        return _sound(value), False
    scheme, _, rest = value.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return _sound(rest.strip()), False
    if scheme.lower() == b"basic":
        return _sound(_password(rest.strip())), True
    raise Unauthenticated(
        "the Authorization header is neither Bearer nor Basic", hint="Authorization: Bearer KEY"
    )


def _password(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        raise Unauthenticated("the Authorization header cannot be read") from None


def _sound(key: bytes) -> str:
    if not key or len(key) > _MAX_KEY or not key.isascii():
        raise Unauthenticated("that is no key", hint="`dsec key create` makes one")
    return key.decode("ascii")


async def refuse(scope: Scope, receive: Receive, send: Send, answer: Response) -> None:
    """Send an answer, also to who wants a WebSocket."""
    if scope["type"] == "http":
        await answer(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await send(
            {
                "type": "websocket.http.response.start",
                "status": answer.status_code,
                "headers": answer.raw_headers,
            }
        )
        await send({"type": "websocket.http.response.body", "body": bytes(answer.body)})
    else:
        await send({"type": "websocket.close", "code": 1008})
