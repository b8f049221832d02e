"""Connections: uvicorn's protocols, with bounds on what a client may send, how long it may take, and how many there are.

Whoever vanishes without a word, or reads and writes ever so slowly, is let go. One look a second over all connections is enough for that, and
costs a request nothing but two numbers.
"""

from __future__ import annotations

import asyncio
import socket
import struct
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
        """Whether no request is being answered, or comes in with more than its head."""
        cycle: object = self.cycle
        answered = cycle is None or self.cycle.response_complete
        return answered and self._phase is not Phase.BODY

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
        if self.transport.is_closing():
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

    def on_headers_complete(self) -> None:
        self._silent = 0
        self._phase, self._begun = Phase.BODY, self._moved
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._silent = 0
        super().on_body(body)

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
        self._refuse(BadRequest(f"this is no HTTP: {msg}"))

    def _refuse(self, error: DsecError, status: int = 0) -> None:
        """Answer, where no request was understood, and hang up."""
        answer = failure(error, status)
        cycle: object = self.cycle
        if cycle is None or self.cycle.response_complete:
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
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(bounds.idle),
    )
    config.load()
    return config
