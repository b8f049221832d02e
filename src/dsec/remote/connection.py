"""Requests to one server: sent, answered or lost, sent again where that cannot double anything, and bounded.

A request whose answer was lost is sent again when it changes nothing, when doing it twice is doing it once, or when the server knows it again
by its ``Idempotency-Key``. Any other one may have been done: :class:`~dsec.errors.UnknownOutcome`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
from yarl import URL

from dsec.errors import Conflict, DsecError, ProtocolError, RuntimeUnavailable, UnknownOutcome
from dsec.remote.answers import bounded, elsewhere, problem
from dsec.remote.endpoint import Endpoint
from dsec.wire.problems import from_body

T = TypeVar("T")

MIB: Final = 1 << 20
SMALL: Final = 16 * MIB  # bytes of an ordinary answer
LARGE: Final = 6 << 30  # ... of a command's output, whose limit is the sandbox's
QUICK: Final = 30.0  # seconds for an answer that needs no work
POLL: Final = 25.0  # seconds for which one question waits for an end
BACK_OFF: Final = (
    0.05,
    0.1,
    0.2,
    0.4,
    0.8,
    1.6,
    3.2,
    3.2,
)  # seconds between tries: a server that is started anew is back
VALUES: Final = "application/vnd.dsec+json"
JSON: Final = "application/json"
_CONNECTIONS: Final = 512
_IDLE: Final = 20.0  # seconds until an unused connection is closed; servers keep it longer
_CONNECT: Final = 10.0  # seconds
_CLOSING: Final = aiohttp.ClientWSTimeout(ws_close=1.0)  # seconds for the other side to close, too
_SETTLE: Final = 10.0  # seconds for what is being undone when the client closes
_STOPPING: Final = 503
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
_KEEP_ALIVE: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request.

    Attributes:
        path: below the server's own, quoted. query: None and "" are left out.
        body: all of it, or what makes it, once. kind: its media type. accept: of the answer.
        key: its ``Idempotency-Key``. again: it may be sent twice without that.
        patience: seconds for the answer, None = as long as it takes. most: bytes of the answer.
    """

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    body: bytes | AsyncIterator[bytes] | None = None
    kind: str = JSON
    accept: str = VALUES
    key: str = ""
    again: bool = False
    patience: float | None = QUICK
    most: int = SMALL
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE)

    @property
    def repeatable(self) -> bool:
        """Sending it once more doubles nothing."""
        return (self.again or bool(self.key)) and not isinstance(self.body, AsyncIterator)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said that is no error."""

    status: int
    body: bytes


class Lost(Exception):
    """A request without an answer. ``sent``: the server may have read it."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


def fresh_key() -> str:
    """A key by which a server knows a request again."""
    return secrets.token_urlsafe(18)


def segment(text: str) -> str:
    """One part of a path, whatever is in it."""
    return quote(text, safe="", errors="surrogateescape")


class Connection:
    """All requests to one server, over connections that are kept. It belongs to the event loop that it was made in."""

    def __init__(self, endpoint: Endpoint, key: str = "", *, patience: float = QUICK) -> None:
        self.endpoint = endpoint
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._undoing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._session = aiohttp.ClientSession(
            connector=_connector(endpoint),
            headers={"Authorization": f"Bearer {key}"} if key else None,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "Accept", "User-Agent"),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            read_bufsize=256 * 1024,
        )
        self._sockets = aiohttp.ClientSession(
            connector=self._session.connector,
            connector_owner=False,
            headers=self._session.headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            trace_configs=[_no_redirects()],
        )

    async def send(self, call: Call, *, tries: tuple[float, ...] = BACK_OFF) -> Answer:
        """The answer.

        Raises:
            RuntimeUnavailable: the server cannot be reached; the request was never read.
            UnknownOutcome: the answer was lost, and the request cannot be sent twice.
            ProtocolError: the answer is none. Every error that the server told, as its own class.
        """
        self._check()
        delays = iter(tries)
        while True:
            try:
                return await self._once(call)
            except Lost as lost:
                delay = next(delays, None)
                if delay is None or self._closed or not (call.repeatable or self._unsent(call, lost)):
                    raise self._told(call, lost) from None
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    @staticmethod
    def _unsent(call: Call, lost: Lost) -> bool:
        return not lost.sent and not isinstance(call.body, AsyncIterator)

    async def _once(self, call: Call) -> Answer:
        try:
            async with asyncio.timeout(self._limit(call)), self._request(call) as response:
                if response.status >= 300:
                    raise _lost_or(await problem(response))
                return Answer(response.status, await bounded(response, call.most))
        except aiohttp.ClientConnectorError as error:
            raise Lost(_reason(error), sent=False) from None
        except aiohttp.ConnectionTimeoutError:
            raise Lost(f"no connection in {_CONNECT:g} s", sent=False) from None
        except TimeoutError:
            raise Lost(f"no answer in {self._limit(call)} s", sent=True) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _broken(error) from None

    def _limit(self, call: Call) -> float | None:
        return call.patience if call.patience != QUICK else self._patience

    def _request(self, call: Call) -> Any:
        headers = {"Accept": call.accept, **call.headers}
        if call.body is not None:
            headers["Content-Type"] = call.kind
        if call.key:
            headers["Idempotency-Key"] = call.key
        return self._session.request(
            call.method, self.url(call), data=call.body, headers=headers, allow_redirects=False
        )

    def url(self, call: Call) -> URL:
        """Where the request goes."""
        given = {name: _word(value) for name, value in call.query.items() if value not in (None, "")}
        query = f"?{urlencode(given, doseq=True, errors='surrogateescape')}" if given else ""
        return URL(f"{self.endpoint.base}{call.path}{query}", encoded=True)

    def _told(self, call: Call, lost: Lost) -> DsecError:
        """What the caller is told of a request without an answer."""
        where = self.endpoint.shown
        if lost.sent and not call.repeatable:
            return UnknownOutcome(
                f"the connection to {where} was lost before it answered: {lost}",
                hint="look whether it was done before you do it again",
                server=where,
            )
        hint = _next_step(self.endpoint, lost)
        return RuntimeUnavailable(f"the server at {where} cannot be reached: {lost}", hint=hint, server=where)

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is read piece by piece; leaving early ends it. Opened again as :meth:`send` does.

        Raises: as :meth:`send`; RuntimeUnavailable also when it breaks in the middle.
        """
        self._check()
        response = await self._opened(call)
        try:
            yield response
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._told(call, Lost(_reason(error), sent=False)) from None
        finally:
            response.close()

    async def _opened(self, call: Call) -> aiohttp.ClientResponse:
        delays = iter(BACK_OFF)
        while True:
            try:
                return await self._answered(call)
            except Lost as lost:
                delay = next(delays, None)
                if delay is None or self._closed:
                    raise self._told(call, lost) from None
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    async def _answered(self, call: Call) -> aiohttp.ClientResponse:
        """The head of an answer."""
        try:
            async with asyncio.timeout(self._limit(call)):
                response: aiohttp.ClientResponse = await self._request(call)
                if response.status < 300 and response.headers.get("Content-Encoding") is None:
                    return response
            async with asyncio.timeout(self._patience), response:
                raise _lost_or(await problem(response))
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise Lost(_reason(error), sent=False) from None

    async def pieces(self, call: Call) -> AsyncIterator[bytes]:
        """The body of an answer as it comes.  Raises: as :meth:`stream`."""
        async with self.stream(call) as response:
            async for piece in response.content.iter_any():
                yield piece

    async def socket(self, path: str, query: Mapping[str, Any]) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket.  Raises: Lost: there is none now. The errors that the server told by its status."""
        self._check()
        url = self.url(Call(method="GET", path=path, query=query))
        try:
            async with asyncio.timeout(self._patience):
                return await self._sockets.ws_connect(url, max_msg_size=4 * MIB, timeout=_CLOSING)
        except aiohttp.WSServerHandshakeError as error:
            if error.status == _STOPPING:  # of the answer there is nothing else
                raise Lost(f"the server answered {error.status}", sent=False) from None
            raise from_body(None, error.status) from None
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise Lost(_reason(error), sent=False) from None

    async def made(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]]) -> T:
        """Work that makes something. When the caller stops waiting it goes on, and what it made is taken back."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            undoing = asyncio.ensure_future(_undone(task, undo))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise

    async def close(self) -> None:
        """Close all connections; twice is no error. What is being undone has some seconds left."""
        if self._undoing:
            await asyncio.wait(set(self._undoing), timeout=_SETTLE)
        self._closed = True
        await self._sockets.close()
        await self._session.close()

    def _check(self) -> None:
        """Raises: Conflict: this is not its event loop, or it is closed."""
        if asyncio.get_running_loop() is not self._loop:
            raise Conflict("this client was opened in another event loop", hint="open one in each event loop")
        if self._closed:
            raise Conflict("this client is closed", hint="open it again")


async def _undone(task: asyncio.Task[T], undo: Callable[[T], Awaitable[object]]) -> None:
    with suppress(Exception):  # nobody waits: what was not made needs no undoing, and the reaper has the rest
        await undo(await task)


def _connector(endpoint: Endpoint) -> aiohttp.BaseConnector:
    if endpoint.socket:
        return aiohttp.UnixConnector(endpoint.socket, limit=_CONNECTIONS, keepalive_timeout=_IDLE)
    return aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=_IDLE, socket_factory=_socket)


def _no_redirects() -> aiohttp.TraceConfig:
    """The client of WebSockets follows redirects, unless somebody looks."""

    async def refuse(session: object, context: object, params: aiohttp.TraceRequestRedirectParams) -> None:
        del session, context
        raise elsewhere(params.response.status)

    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(refuse)
    return tracing


def _socket(address: Any) -> socket.socket:
    """One that notices within a minute that the other machine is gone."""
    made = socket.socket(address[0], address[1], address[2])
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _word(value: Any) -> Any:
    """A value of a query."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value


def _broken(error: Exception) -> Lost | ProtocolError:
    """A connection that ended in the middle, or an answer that is none."""
    if isinstance(error, aiohttp.ClientResponseError):
        return ProtocolError(f"the server's answer is no HTTP: {str(error.message)[:200]}")
    return Lost(_reason(error), sent=True)


def _next_step(endpoint: Endpoint, lost: Lost) -> str:
    """What to do about a server that cannot be reached."""
    said = str(lost)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return "this machine does not trust its certificate; $SSL_CERT_FILE names those it trusts"
    if "SSL" in said:
        return "what listens there speaks no TLS: write http:// if it is yours alone"
    return "is it running? `dsec serve` starts one" if endpoint.here else "is it running there?"


def _reason(error: Exception) -> str:
    """Why, in a few words that hold nothing that was sent."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return error.os_error.strerror
    return str(error)[:200] or type(error).__name__


def _lost_or(error: DsecError) -> Exception:
    """A server that is stopping has done nothing, and its successor is asked again."""
    return Lost(error.message, sent=False) if error.facts.get("stopping") is True else error
