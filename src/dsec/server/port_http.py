"""One HTTP request into a sandbox and its answer, streamed both ways. The program that answers is hostile.

Heads are bounded by size, waits by time, and what it sends is read no faster than the client takes it. Many small pieces are handed on as
one, and other work gets its turn between them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import h11
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dsec.errors import BadRequest, DsecError, ProtocolError, TimedOut
from dsec.server.outflow import put
from dsec.server.port_headers import Headers

HEAD_BYTES: Final = 64 << 10
ANSWER_SECONDS: Final = 300.0  # without progress, until an answer begins
IDLE_SECONDS: Final = 300.0  # between two pieces of an answer
STOP_SECONDS: Final = 2.0
_READ: Final = 64 << 10
_EVENTS: Final = 128  # that are looked at before others have their turn
_BODILESS: Final = (204, 304)
_EARLY: Final = 16  # answers before the answer (1xx)


def request_head(method: str, target: bytes, headers: Headers, given: Headers) -> h11.Request:
    """The head as it is sent; ``given``: the client's own headers, which say how long its body is.  Raises: BadRequest."""
    sized = [(name, value) for name, value in given if name in (b"content-length", b"transfer-encoding")]
    body: Headers = []
    if any(name == b"transfer-encoding" for name, _ in sized):
        body = [(b"transfer-encoding", b"chunked")]
    elif sized:
        body = [(b"content-length", sized[0][1])]
    try:
        return h11.Request(
            method=method.encode(), target=target, headers=[*headers, *body, (b"connection", b"close")]
        )
    except h11.LocalProtocolError as error:
        raise BadRequest(f"request: {error}") from None


def _framed(head: h11.Response) -> Headers:
    """Its headers, without a length that is not that of the body which comes: a server takes it for a promise."""
    chunked = any(name == b"transfer-encoding" for name, _ in head.headers)
    lengthless = chunked or head.status_code in _BODILESS
    return [(name, value) for name, value in head.headers if not (lengthless and name == b"content-length")]


class Proxied(Response):
    """The answer of the program at the other end of ``sock``, which is closed in the end.

    Args:
        port: for errors. render: the headers that the client gets.
    """

    def __init__(
        self, sock: socket.socket, head: h11.Request, port: int, render: Callable[[Headers], Headers]
    ) -> None:
        super().__init__()
        self._sock = sock
        self._head = head
        self._port = port
        self._render = render
        self._conn = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        self._patience: asyncio.Timeout | None = None
        self._begun = False
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: TimedOut, ProtocolError: nothing has been sent to the client."""
        try:
            reader, writer = await asyncio.open_connection(sock=self._sock)
        except BaseException:
            self._sock.close()
            raise
        answering = asyncio.ensure_future(self._answer(reader, send))
        ends = (
            answering,
            asyncio.ensure_future(self._feed(receive, writer)),
            asyncio.ensure_future(self._last(scope)),
        )
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                self._tell(answering)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.wait(ends)
            writer.transport.abort()

    async def _last(self, scope: Scope) -> None:
        """Returns when the server has been stopping for a while: an answer that does not end by itself is ended."""
        await scope["dsec.stop"].wait()
        await asyncio.sleep(STOP_SECONDS)

    def _tell(self, answering: asyncio.Task[None]) -> None:
        error = answering.exception()
        # Half an answer is out: ending without its end closes the client's connection, and it sees that.
        if error is not None and not self._begun:
            raise error

    # In

    async def _feed(self, receive: Receive, writer: asyncio.StreamWriter) -> None:
        """Send the request; returns when the client has gone. A program that answers before it has read all is not disturbed."""
        message: Message = {"type": "http.request"}
        with suppress(OSError, h11.LocalProtocolError):
            await self._write(writer, self._head)
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                if message.get("body"):
                    await self._write(writer, h11.Data(data=message["body"]))
                more = message.get("more_body", False)
            await self._write(writer, h11.EndOfMessage())
        while message["type"] != "http.disconnect":
            message = await receive()

    async def _write(self, writer: asyncio.StreamWriter, event: h11.Event) -> None:
        data = self._conn.send(event)
        if data:
            writer.write(data)
            await writer.drain()
        if self._patience is not None:
            with suppress(RuntimeError):  # it is over already
                self._patience.reschedule(asyncio.get_running_loop().time() + ANSWER_SECONDS)

    # Out

    async def _answer(self, reader: asyncio.StreamReader, send: Send) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS) as self._patience:
                head = await self._answer_head(reader)
            self._patience = None
            self._begun = True
            headers = self._render(_framed(head))
            await send({"type": "http.response.start", "status": head.status_code, "headers": headers})
            while not self._ended:
                async with asyncio.timeout(IDLE_SECONDS):
                    piece = await self._piece(reader)
                await put(send, piece, more=not self._ended)
        except TimeoutError as error:
            raise TimedOut(f"port {self._port}: the program did not answer in time") from error
        except (h11.ProtocolError, OSError) as error:
            raise self._broken(str(error) or type(error).__name__) from error

    async def _answer_head(self, reader: asyncio.StreamReader) -> h11.Response:
        for _ in range(_EARLY):
            event = await self._event(reader)
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise self._broken("it ended without an answer")
        raise self._broken("it never comes to an answer")

    async def _event(self, reader: asyncio.StreamReader) -> object:
        while (event := self._conn.next_event()) is h11.NEED_DATA:
            self._conn.receive_data(await reader.read(_READ))
        return event

    async def _piece(self, reader: asyncio.StreamReader) -> bytes:
        """What there is of the body, or comes next; may be empty. Sets ``_ended``."""
        event, parts = await self._event(reader), []
        while not isinstance(event, h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise self._broken("its answer ended before its end")
            parts.append(bytes(event.data))
            if len(parts) == _EVENTS:
                await asyncio.sleep(0)
                return b"".join(parts)
            event = self._conn.next_event()
            if event is h11.NEED_DATA:
                return b"".join(parts)
        self._ended = True
        return b"".join(parts)

    def _broken(self, words: str) -> DsecError:
        return ProtocolError(
            f"port {self._port}: the program there speaks no HTTP that can be passed on: {words[:200]}",
            hint="see what it says: run curl inside",
        )
