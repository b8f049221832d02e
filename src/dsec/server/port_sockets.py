"""A WebSocket into a sandbox. The program at the other end is hostile; messages, waits and what lies in between are bounded."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from starlette.responses import Response
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
    WebSocketException,
)
from websockets.frames import CloseCode
from websockets.typing import Subprotocol

from dsec.errors import BadRequest, ProtocolError, TimedOut
from dsec.server.outflow import WRITE_SECONDS
from dsec.server.port_headers import Headers
from dsec.server.waits import why_of

HANDSHAKE_SECONDS: Final = 60.0
MOST_MESSAGE: Final = 16 << 20  # bytes, either way
_CLOSE_SECONDS: Final = 5.0
_PING_SECONDS: Final = 30.0
_PONG_SECONDS: Final = 60.0
_QUEUE: Final = 4  # messages of the program that wait for the client
_UNSAID: Final = (1004, 1005, 1006, 1015)  # may not be sent
_PRIVATE: Final = range(3000, 5000)
_KNOWN: Final = frozenset(CloseCode)


async def bridge(client: WebSocket, sock: socket.socket, port: int, target: bytes, headers: Headers) -> None:
    """Shake hands with the program first, then with the client; carry messages until one of both ends it. Closes ``sock``.

    Raises:
        ProtocolError, TimedOut: the program does not speak WebSocket; the client is not accepted yet.
    """
    try:
        inner = await _reach(client, sock, port, target, headers)
    except InvalidStatus as refused:
        sock.close()
        await client.send_denial_response(Response(status_code=refused.response.status_code))
        return
    except BaseException:
        sock.close()
        raise
    try:
        await client.accept(subprotocol=inner.subprotocol)
        await _carry(client, inner)
    finally:
        inner.transport.abort()


async def _reach(
    client: WebSocket, sock: socket.socket, port: int, target: bytes, headers: Headers
) -> ClientConnection:
    offered = [Subprotocol(str(name)) for name in client.scope.get("subprotocols", ())]
    try:
        return await connect(
            f"ws://localhost:{port}{target.decode('latin-1')}",
            sock=sock,
            additional_headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
            subprotocols=offered or None,
            user_agent_header=None,
            compression=None,
            proxy=None,
            open_timeout=HANDSHAKE_SECONDS,
            ping_interval=_PING_SECONDS,
            ping_timeout=_PONG_SECONDS,
            close_timeout=_CLOSE_SECONDS,
            max_size=MOST_MESSAGE,
            max_queue=_QUEUE,
        )
    except InvalidStatus:
        raise
    except TimeoutError as error:
        raise TimedOut(f"port {port}: the program did not answer in time") from error
    except InvalidURI as error:
        raise BadRequest(f"path: {error}") from None
    except (InvalidHandshake, WebSocketException, OSError, ValueError) as error:
        raise ProtocolError(
            f"port {port}: the program there speaks no WebSocket: {str(error)[:200] or type(error).__name__}"
        ) from error


async def _carry(client: WebSocket, inner: ClientConnection) -> None:
    inward = asyncio.ensure_future(_inward(client, inner))
    outward = asyncio.ensure_future(_outward(client, inner))
    stopping = asyncio.ensure_future(client.scope["dsec.stop"].wait())
    tasks = (inward, outward, stopping)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if done == {stopping}:
        why = why_of(client)
        if why is not None:
            await client.close(CloseCode.POLICY_VIOLATION, why.message)
        else:
            await client.close(CloseCode.GOING_AWAY, "the server is stopping")
        await inner.close(CloseCode.GOING_AWAY)


async def _inward(client: WebSocket, inner: ClientConnection) -> None:
    """From the client to the program."""
    while True:
        message = await client.receive()
        if message["type"] != "websocket.receive":
            break
        text, data = message.get("text"), message.get("bytes")
        try:
            await inner.send(text if text is not None else data or b"")
        except ConnectionClosed:
            await asyncio.Event().wait()  # the other direction tells the client how it ended
    await inner.close(_code(message.get("code") or CloseCode.NORMAL_CLOSURE), message.get("reason") or "")


async def _outward(client: WebSocket, inner: ClientConnection) -> None:
    """From the program to the client, which may take its time, but not for ever."""
    try:
        while True:
            message = await inner.recv()
            async with asyncio.timeout(WRITE_SECONDS):
                await (client.send_text(message) if isinstance(message, str) else client.send_bytes(message))
    except ConnectionClosed as closed:
        said = closed.rcvd
        code = said.code if said is not None else CloseCode.INTERNAL_ERROR
        await client.close(_code(code), said.reason if said is not None else "the program ended")


def _code(code: int) -> int:
    """One that may be sent."""
    if code in (CloseCode.NO_STATUS_RCVD,):
        return CloseCode.NORMAL_CLOSURE
    if code in _PRIVATE or (code in _KNOWN and code not in _UNSAID):
        return code
    return CloseCode.INTERNAL_ERROR
