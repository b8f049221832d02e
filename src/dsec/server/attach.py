"""A command over a WebSocket: its output, and its input, signals and terminal, in binary frames.

To the client: a byte of kind, 0 stdout and 1 stderr with an offset (8 bytes, big-endian) and bytes, 2 the end as JSON (what follows nothing),
3 an error as JSON. To the server: 0 bytes of standard input, 1 their end, 2 rows and columns (two big-endian 16 bit numbers),
3 a signal and whether it is for the whole tree (a byte each).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Annotated, Final

from fastapi import APIRouter, Query, WebSocket
from starlette.websockets import WebSocketDisconnect

from dsec.client.requests import pty_size
from dsec.errors import BadRequest, DsecError
from dsec.model.execs import Stream
from dsec.model.ids import parse_exec_id, parse_sandbox_id
from dsec.ports.engine import ExecSession
from dsec.server.context import gate_services
from dsec.server.outflow import ending
from dsec.server.output import ended
from dsec.server.waits import why_of
from dsec.wire.problems import to_body
from dsec.wire.values import encode

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}/execs", tags=["execs"])

Offset = Annotated[int, Query(ge=0, le=2**63 - 1)]
_HEAD: Final = struct.Struct(">BQ")
_SIZE: Final = struct.Struct(">HH")
_KINDS: Final = {Stream.STDOUT: 0, Stream.STDERR: 1}
_EXIT: Final = b"\2"
_ERROR: Final = b"\3"
WAITING: Final = 4  # frames of standard input that wait for the command to read
GOING_AWAY: Final = 1012
DONE: Final = 1000
WRONG: Final = 1003
REFUSED: Final = 1008


@router.websocket("/{exec}/attach")
async def attach(
    websocket: WebSocket, sandbox: str, exec: str, stdout: Offset = 0, stderr: Offset = 0
) -> None:
    """Follow a command, and act on it; leaving it leaves it alone."""
    execs = gate_services(websocket).execs
    session = await execs.attach(parse_sandbox_id(sandbox), parse_exec_id(exec), stdout=stdout, stderr=stderr)
    await websocket.accept()
    await Attachment(websocket, session).run(websocket.scope["dsec.stop"])


class Attachment:
    """One client at one command."""

    def __init__(self, websocket: WebSocket, session: ExecSession) -> None:
        self._socket = websocket
        self._session = session
        self._input: asyncio.Queue[bytes] = asyncio.Queue(WAITING)

    async def run(self, stop: asyncio.Event) -> None:
        """Until the command has ended and that is told, the client has left, its key has ended, or the server stops."""
        telling = asyncio.ensure_future(self._tell())
        listening, feeding = asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._feed())
        stopping = asyncio.ensure_future(stop.wait())
        tasks = (telling, listening, feeding, stopping)
        try:
            await asyncio.wait((telling, listening, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        why = why_of(self._socket)
        if why is not None:
            await self._quietly(lambda: self._refused(why))
            return
        await self._close(telling)

    async def _refused(self, why: DsecError) -> None:
        await self._socket.send_bytes(_ERROR + encode(to_body(why)))
        await self._socket.close(REFUSED, why.message)

    async def _close(self, telling: asyncio.Task[None]) -> None:
        failed = None if telling.cancelled() else telling.exception()
        if failed is not None and not isinstance(failed, WebSocketDisconnect | OSError):
            raise failed
        code = GOING_AWAY if failed is not None or telling.cancelled() else DONE
        await self._quietly(lambda: self._socket.close(code))

    async def _quietly(self, say: Callable[[], Awaitable[None]]) -> None:
        """Say something to a client that may have left."""
        try:
            await say()
        except (RuntimeError, WebSocketDisconnect, OSError):
            return

    async def _tell(self) -> None:
        """Output, and then how it ended."""
        try:
            async with ending(self._session.output()) as chunks:
                async for chunk in chunks:
                    await self._socket.send_bytes(_HEAD.pack(_KINDS[chunk.stream], chunk.offset) + chunk.data)
            end = _EXIT + encode(ended(await self._session.wait()))
        except DsecError as error:
            end = _ERROR + encode(to_body(error))
        await self._socket.send_bytes(end)

    async def _listen(self) -> None:
        """Until the client leaves, or says something that means nothing."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            frame = message.get("bytes")
            try:
                await self._take(frame or b"")
            except DsecError as error:
                await self._socket.send_bytes(_ERROR + encode(to_body(error)))
                if isinstance(error, BadRequest):
                    await self._quietly(lambda: self._socket.close(WRONG))
                    return

    async def _take(self, frame: bytes) -> None:
        """Raises: BadRequest: it is no frame. What the session raises."""
        kind, rest = frame[:1], frame[1:]
        if kind == b"\0" or (kind == b"\1" and not rest):
            await self._input.put(frame)
        elif kind == b"\2" and len(rest) == _SIZE.size:
            await self._session.resize(pty_size(*_SIZE.unpack(rest)))
        elif kind == b"\3" and len(rest) == 2:
            await self._session.signal(rest[0], tree=bool(rest[1]))
        else:
            raise BadRequest("frame: it is none of the four that a client sends")

    async def _feed(self) -> None:
        """Standard input, apart from all else: a command that does not read still gets its signals."""
        while True:
            frame = await self._input.get()
            try:
                if frame[:1] == b"\0":
                    await self._session.send(frame[1:])
                else:
                    await self._session.close_stdin()
            except DsecError as error:
                await self._socket.send_bytes(_ERROR + encode(to_body(error)))
