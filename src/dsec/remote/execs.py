"""Commands behind HTTP: one request for one that is waited for, and sessions for those that are followed.

Output comes over a WebSocket, which is opened again at the offsets that were reached when it is lost. Everything else of a session is a request
of its own, so that each has its own answer.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec

from dsec.errors import ProtocolError, RuntimeUnavailable
from dsec.model.execs import Chunk, ExecInfo, ExecRequest, ExecResult, PtySize, Stream
from dsec.model.ids import ExecId, SandboxId
from dsec.ports.engine import ExecService, ExecSession
from dsec.remote.connection import BACK_OFF, LARGE, POLL, QUICK, Call, Connection, Lost, fresh_key, segment
from dsec.remote.sandboxes import sandbox_path
from dsec.remote.uploads import PIECE, Upload, sliced
from dsec.remote.values import done, items, read, value
from dsec.wire.problems import from_body
from dsec.wire.values import encode

_STREAMED: Final = "application/vnd.dsec.stdin"
_RAW: Final = "application/octet-stream"
_INLINE: Final = 256 * 1024  # bytes of standard input that go into the request itself
_SIGKILL: Final = 9
_STREAMS: Final = {0: Stream.STDOUT, 1: Stream.STDERR}
_EXIT: Final = 2
_ERROR: Final = 3
_HEAD: Final = struct.Struct(">BQ")


class _Started(msgspec.Struct):
    id: ExecId
    pid: int


class RemoteExecs(ExecService):
    """See :class:`ExecService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def run(
        self, sandbox: SandboxId, request: ExecRequest, stdin: AsyncIterator[bytes] | None = None
    ) -> ExecResult:
        whole = request.stdin
        if stdin is not None or (whole is not None and len(whole) > _INLINE):
            return await self._streamed(sandbox, request, stdin or sliced(whole or b""))
        call = Call(
            method="POST",
            path=sandbox_path(sandbox, "/execs"),
            body=encode(_body(request)),
            patience=None,
            most=LARGE,
        )
        return read(ExecResult, (await self._connection.send(call)).body)

    async def _streamed(
        self, sandbox: SandboxId, request: ExecRequest, stdin: AsyncIterator[bytes]
    ) -> ExecResult:
        """The request in one line, and behind it standard input until the body ends."""
        head = encode({**_body(request), "stdin_base64": None}) + b"\n"
        upload = Upload(stdin)

        async def pieces() -> AsyncIterator[bytes]:
            yield head
            async for piece in upload.pieces():
                yield piece

        call = Call(
            method="POST",
            path=sandbox_path(sandbox, "/execs"),
            body=pieces(),
            kind=_STREAMED,
            patience=None,
            most=LARGE,
        )
        return await upload.told(value(self._connection, ExecResult, call))

    async def start(self, sandbox: SandboxId, request: ExecRequest) -> ExecSession:
        call = Call(
            method="POST",
            path=sandbox_path(sandbox, "/execs"),
            body=encode({**_body(request), "wait": False}),
            key=fresh_key(),
            patience=None,
        )
        return await self._connection.made(self._session(sandbox, call), _killed)

    async def attach(
        self, sandbox: SandboxId, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0
    ) -> ExecSession:
        call = Call(method="GET", path=sandbox_path(sandbox, f"/execs/{segment(exec_id)}"), again=True)
        return await self._session(sandbox, call, stdout, stderr)

    async def _session(
        self, sandbox: SandboxId, call: Call, stdout: int = 0, stderr: int = 0
    ) -> RemoteSession:
        started = await value(self._connection, _Started, call)
        return RemoteSession(self._connection, sandbox, started.id, started.pid, stdout, stderr)

    async def list(self, sandbox: SandboxId) -> tuple[ExecInfo, ...]:
        call = Call(method="GET", path=sandbox_path(sandbox, "/execs"), again=True, most=LARGE)
        return await items(self._connection, ExecInfo, call)


async def _killed(session: ExecSession) -> None:
    await session.signal(_SIGKILL, tree=True)


def _body(request: ExecRequest) -> dict[str, Any]:
    """What of a request is not as it is by default."""
    body: dict[str, Any] = {}
    try:
        body["argv"] = [argument.decode() for argument in request.argv]
    except UnicodeDecodeError:
        body["argv_base64"] = request.argv
    if request.env:
        body["env"] = request.env
    if request.cwd:
        body["cwd"] = request.cwd
    if request.user:
        body["user"] = request.user
    if request.timeout:
        body["timeout"] = request.timeout
    if request.stdin is not None:
        body["stdin_base64"] = request.stdin
    if request.stdin_open:
        body["stdin_open"] = True
    if request.pty is not None:
        body["pty"] = request.pty
    if request.scratch:
        body["scratch"] = True
    return body


class RemoteSession(ExecSession):
    """A command, followed from given offsets."""

    def __init__(
        self, connection: Connection, sandbox: SandboxId, id: ExecId, pid: int, stdout: int, stderr: int
    ) -> None:
        self.id = id
        self.pid = pid
        self._connection = connection
        self._path = sandbox_path(sandbox, f"/execs/{segment(id)}")
        self._offsets = (stdout, stderr)

    async def output(self) -> AsyncIterator[Chunk]:
        at = {Stream.STDOUT: self._offsets[0], Stream.STDERR: self._offsets[1]}
        tries = 0
        while True:
            try:
                socket = await self._connection.socket(f"{self._path}/attach", _query(at))
                async with _closing(socket), aclosing(_chunks(socket)) as chunks:
                    async for chunk in chunks:
                        at[chunk.stream] = chunk.offset + len(chunk.data)
                        tries = 0
                        yield chunk
                    return
            except Lost as lost:
                if tries >= len(BACK_OFF):
                    raise self._lost(lost) from None
            await asyncio.sleep(BACK_OFF[tries])
            tries += 1

    def _lost(self, lost: Lost) -> RuntimeUnavailable:
        where = self._connection.endpoint.shown
        return RuntimeUnavailable(
            f"the output of {self.id} cannot be followed: {where}: {lost}",
            hint="attach again when the server is back: the command goes on",
            exec=self.id,
        )

    async def wait(self) -> ExecResult:
        call = Call(
            method="GET",
            path=f"{self._path}/result",
            query={"timeout": POLL},
            again=True,
            patience=POLL + QUICK,
            most=LARGE,
        )
        while True:
            answer = await self._connection.send(call)
            if answer.status != 202:
                return read(ExecResult, answer.body)

    async def signal(self, signo: int, *, tree: bool = False) -> None:
        body = encode({"signal": signo, "tree": tree})
        final = tree or signo == _SIGKILL  # twice is once
        await done(self._connection, Call(method="POST", path=f"{self._path}/signal", body=body, again=final))

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE] if len(data) > PIECE else data
            call = Call(method="POST", path=f"{self._path}/stdin", body=piece, kind=_RAW, patience=None)
            await done(self._connection, call)

    async def close_stdin(self) -> None:
        await done(self._connection, Call(method="DELETE", path=f"{self._path}/stdin", again=True))

    async def resize(self, size: PtySize) -> None:
        call = Call(method="POST", path=f"{self._path}/resize", body=encode(size), again=True)
        await done(self._connection, call)


def _query(at: dict[Stream, int]) -> dict[str, int]:
    return {"stdout": at[Stream.STDOUT], "stderr": at[Stream.STDERR]}


@asynccontextmanager
async def _closing(socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[None]:
    """The WebSocket is closed at the end, whoever else wants something of it."""
    try:
        yield
    finally:
        await asyncio.shield(socket.close())


async def _chunks(socket: aiohttp.ClientWebSocketResponse) -> AsyncGenerator[Chunk, None]:
    """Until the command has ended.  Raises: Lost: the connection ended first. ProtocolError. The error that the server told."""
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            raise ProtocolError("the server sent something that is no output")
        kind = message.data[0]
        if kind == _EXIT:
            return
        if kind == _ERROR:
            raise from_body(_parsed(message.data[1:]), 500)
        yield _chunk(message.data)
    raise Lost(f"the connection ended ({socket.close_code or 'broken'})", sent=False)


def _chunk(data: bytes) -> Chunk:
    """Raises: ProtocolError."""
    if len(data) < _HEAD.size or data[0] not in _STREAMS:
        raise ProtocolError("the server sent something that is no output")
    kind, offset = _HEAD.unpack_from(data)
    return Chunk(_STREAMS[kind], offset, data[_HEAD.size :])


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
