"""Connections: uvicorn's protocols, with bounds on what a client may send, how long it may take, and how many there are.

Whoever vanishes without a word, or reads and writes ever so slowly, is let go. One look a second over all connections is enough for that, and
costs a request nothing but two numbers.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from dsec.errors import BadRequest, Busy, DsecError, TooLarge
from dsec.server.bodies import MAX_JSON
from dsec.server.door import PEER
from dsec.server.failures import failure
from dsec.server.joined import Joined
from dsec.server.presence import PATIENT

_SHORT: Final = len(str(MAX_JSON))  # digits
_CREDENTIALS: Final = struct.Struct("3i")
MAX_MESSAGE: Final = 1 << 20  # bytes of one WebSocket message
MAX_HEADERS: Final = 256  # of one request
MAX_AHEAD: Final = 8  # requests that are sent before those before them are answered
_VERSIONS: Final = ("1.0", "1.1")
_ONCE: Final = (b"host", b"content-length", b"transfer-encoding", b"content-type", b"idempotency-key")
"""Headers that mean nothing, or two things, when they are there twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a client may do.

    Attributes:
        connections: open at once. head: bytes of a request before its body, and of anything else that tells us nothing.
        read: seconds for the head of a request, also of the first one. idle: seconds between two requests.
        write: seconds in which it takes nothing of what is sent to it, or sends nothing of a body that has begun.
        alive: seconds after which a machine that does not answer any more is taken for gone.
    """

    connections: int = 1000
    head: int = 64 << 10
    read: float = 20.0
    write: float = 60.0
    idle: float = 75.0
    alive: float = 60.0


class Phase(Enum):
    """What of a request a connection waits for."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class _Watched:
    """What both kinds of connections tell about themselves. Times are the loop's; 0.0 = it is not so."""

    bounds: ClassVar[Bounds] = Bounds()
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    writing = 0.0  # since when the client takes nothing
    closing = 0.0  # since when it should be closed

    def overdue(self, now: float) -> bool:
        """Whether the client has kept us waiting for too long."""
        if self.transport.is_closing():
            self.closing = self.closing or now
            return now - self.closing > self.bounds.read
        return bool(self.writing) and now - self.writing > self.bounds.write

    def abort(self) -> None:
        """End it at once, whatever was still to be sent."""
        self.transport.abort()


class Connection(_Watched, HttpToolsProtocol):
    """A connection that speaks HTTP."""

    _phase = Phase.HEAD
    _begun = 0.0  # of that phase
    _moved = 0.0  # when something last came
    _silent = 0  # bytes since anything came of them
    _patient = False
    _answered: Any = None  # the request that is being answered
    _deaf = False  # nothing more is heard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Joined(transport, self.loop))
        self._begun = self.loop.time()
        bound = transport.get_extra_info("socket")
        if bound is not None:
            self._known(bound)
        if PEER not in self.app_state and not self._has_room():
            self._refuse(Busy(f"there are {self.bounds.connections} connections", hint="try again later"))

    def _has_room(self) -> bool:
        """Whether it is not one too many, or another one that nobody uses can be closed for it."""
        if len(self.connections) <= self.bounds.connections:
            return True
        open_ = [one for one in _ours(self.connections) if not one.transport.is_closing()]
        if len(open_) <= self.bounds.connections:
            return True
        unused = [one for one in open_ if isinstance(one, Connection) and one is not self and one.unused]
        if not unused:
            return False
        min(unused, key=lambda one: max(one._begun, one._moved)).transport.close()
        return True

    @property
    def unused(self) -> bool:
        """Whether no request is being answered, or waits for its body: one that was answered before its body came waits for nothing."""
        cycle: object = self.cycle
        return cycle is None or bool(self.cycle.response_complete)

    def _known(self, bound: socket.socket) -> None:
        if bound.family == socket.AF_UNIX:
            self.app_state = {**self.app_state, PEER: peer_uid(bound)}
        else:
            keep_alive(bound, self.bounds.alive)

    def overdue(self, now: float) -> bool:
        """See :class:`_Watched`. A head has to be there in time as a whole; so has a body of JSON; a longer one may take as long as it moves."""
        if super().overdue(now):
            return True
        if self._phase is Phase.HEAD:
            return now - self._begun > self.bounds.read
        if self._phase is Phase.NOTHING or self._patient:
            return False
        if self.flow.read_paused:  # it is we who do not read
            self._moved = now
            return False
        return now - (self._begun if self._short() else self._moved) > self.bounds.write

    def _short(self) -> bool:
        return any(name == b"content-length" and len(value) <= _SHORT for name, value in self.headers)

    def _wait(self) -> None:
        """The body may take its time: it is typed by somebody."""
        self._patient = True

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._deaf:
            return
        self._moved = self.loop.time()
        self._silent += len(data)
        super().data_received(data)
        if self._silent > self.bounds.head and not self.transport.is_closing():
            self._refuse(
                TooLarge(f"headers: more than {self.bounds.head} bytes", limit=self.bounds.head), 431
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[PATIENT] = self._wait  # type: ignore[typeddict-unknown-key]
        self._patient = False
        if self._phase is not Phase.HEAD:
            self._phase, self._begun = Phase.HEAD, self._moved

    def on_header(self, name: bytes, value: bytes) -> None:
        if (
            self._phase is Phase.HEAD
        ):  # what comes behind a body is no header: it would speak for a request that was let in
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._silent = 0
        self._check_head()
        self._phase, self._begun = Phase.BODY, self._moved
        super().on_headers_complete()
        if (
            self.pipeline
        ):  # uvicorn would not read on until the others are answered, nor hear that the client has left
            self.flow.resume_reading()

    def _check_head(self) -> None:
        """Raises: DsecError: two programs in a row could read it differently, or it is larger than anything that is meant."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.bounds.head:
            raise TooLarge(f"headers: more than {self.bounds.head} bytes", limit=self.bounds.head)
        if len(self.headers) > MAX_HEADERS:
            raise TooLarge(f"headers: more than {MAX_HEADERS}", limit=MAX_HEADERS)
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            raise BadRequest("this is no HTTP/1.1", hint="ask by HTTP/1.1")
        if len(self.pipeline) >= MAX_AHEAD:
            raise Busy(f"{MAX_AHEAD} requests were sent ahead", hint="wait for answers", retry_after=1)
        given = [name for name, _ in self.headers]
        twice = next((name for name in _ONCE if given.count(name) > 1), None)
        if twice is not None:
            raise BadRequest(f"{twice.decode()}: the header is there twice")
        for name, value in self.headers:
            if name == b"transfer-encoding" and (value.strip().lower() != b"chunked" or version == "1.0"):
                raise BadRequest("transfer-encoding: there is none but chunked, in HTTP/1.1")

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """The request that is being answered hears of it, whatever was sent ahead behind it."""
        self.pipeline.clear()
        self._give_up()
        super().connection_lost(exc)

    def _hear_no_more(self) -> None:
        """What was sent ahead is nothing to answer: what was asked before it is answered, and then the connection ends."""
        if self._phase is Phase.BODY:
            self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else self._answered
        self.cycle.keep_alive = False
        self._deaf, self._phase = True, Phase.NOTHING
        self.flow.resume_reading()  # who leaves is to be noticed

    def _give_up(self) -> None:
        cycle = self._answered
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def handle_websocket_upgrade(self) -> None:
        try:
            self._check_upgrade()
        except DsecError as error:
            self._phase = Phase.HEAD
            self._refuse(error)
            return
        super().handle_websocket_upgrade()

    def _check_upgrade(self) -> None:
        """Raises: BadRequest: there is something that will be answered first, or it asks for no WebSocket that there is."""
        if not self._idle():
            raise BadRequest("a WebSocket was asked for before the answer to something else had come")
        given = dict(self.headers)
        if (
            self.parser.get_method() != b"GET"
            or b"transfer-encoding" in given
            or given.get(b"content-length", b"0") != b"0"
        ):
            raise BadRequest("a WebSocket is asked for by GET, without a body")
        if given.get(b"sec-websocket-version") != b"13" or not _is_key(given.get(b"sec-websocket-key", b"")):
            raise BadRequest(
                "this begins no WebSocket", hint="Sec-WebSocket-Version: 13, and a Sec-WebSocket-Key"
            )

    def _idle(self) -> bool:
        return self._answered is None or self._answered.response_complete

    def _unsupported_upgrade_warning(self) -> None:
        """It is answered as if it had not been asked for, and nothing can follow."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._silent = 0
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > self.bounds.head:
            raise TooLarge("body: it was sent ahead, and is large", hint="wait for the answer before it")

    def on_message_complete(self) -> None:
        self._silent = 0
        self._phase = Phase.NOTHING
        super().on_message_complete()

    def pause_writing(self) -> None:
        self.writing = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.writing = 0.0
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn found no HTTP in it, or one of us refused it."""
        error: BaseException | None = sys.exception()
        told = error.__context__ if error is not None else None
        if isinstance(told, DsecError):
            self._refuse(told, 431 if isinstance(told, TooLarge) else 0)
        else:
            self._refuse(BadRequest("this is no HTTP that can be read"))

    def _refuse(self, error: DsecError, status: int = 0) -> None:
        """Answer, where no request was understood, and hang up; one that was is answered by that, if it has no answer yet."""
        if self.transport.is_closing():
            return
        if not self._idle() and (self._phase is Phase.HEAD or self.cycle is not self._answered):
            self._hear_no_more()
            return
        if self._idle() or not self._answered.response_started:
            self._give_up()
            answer = failure(error, status)
            head = b"HTTP/1.1 %d \r\n" % answer.status_code
            fields = b"".join(b"%b: %b\r\n" % field for field in answer.raw_headers)
            self.transport.write(head + fields + b"connection: close\r\n\r\n" + bytes(answer.body))
        self.transport.close()


class Socket(_Watched, WebSocketsSansIOProtocol):
    """A connection that speaks WebSocket."""

    def pause_writing(self) -> None:
        self.writing = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.writing = 0.0
        super().resume_writing()


def _is_key(key: bytes) -> bool:
    """Whether it is one of a WebSocket: 16 bytes."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def peer_uid(bound: socket.socket) -> int:
    """The uid of whoever is at the other end of a unix socket, -1 when the kernel does not say."""
    try:
        raw = bound.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return -1
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return int(uid)


def keep_alive(bound: socket.socket, seconds: float) -> None:
    """Let the kernel find out that the other machine is gone, also while nothing is sent."""
    probe = max(1, int(seconds / 4))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def sweep(state: ServerState, now: float) -> int:
    """End the connections whose clients keep us waiting; how many that were."""
    late = [one for one in _ours(state.connections) if one.overdue(now)]
    for one in late:
        one.abort()
    return len(late)


def _ours(connections: Iterable[object]) -> list[_Watched]:
    return [one for one in connections if isinstance(one, _Watched)]


def configured(app: Any, bounds: Bounds) -> uvicorn.Config:
    """uvicorn, as its protocols are used here."""
    config = uvicorn.Config(
        app,
        http=type("BoundedConnection", (Connection,), {"bounds": bounds}),
        ws=type("BoundedSocket", (Socket,), {"bounds": bounds}),
        ws_max_size=MAX_MESSAGE,
        ws_ping_interval=bounds.alive / 3,
        ws_ping_timeout=bounds.alive / 3,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level=logging.ERROR,  # what clients do wrong is told to them
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(bounds.idle),
    )
    config.load()
    return config
