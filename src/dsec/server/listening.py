"""A server that listens, and stops in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from uvicorn.server import ServerState

from dsec.errors import Conflict, Denied, DsecError, RuntimeUnavailable
from dsec.server.app import Application
from dsec.server.connections import Bounds, configured, sweep

log: Final = logging.getLogger("dsec.server")
BACKLOG: Final = 1024
DRAIN: Final = 10.0  # seconds for requests that are being answered
LAST_WORDS: Final = 2.0  # seconds for those that are told that the engine has let go
LOOK: Final = 1.0
_STEP: Final = 0.02


class Listener:
    """The sockets of one application.

    Args:
        bounds: on its clients.
    """

    def __init__(self, app: Application, bounds: Bounds | None = None) -> None:
        self._app = app
        bounds = bounds or Bounds()
        app.door.most = bounds.connections
        self._config = configured(app, bounds)
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._tending: list[asyncio.Task[None]] = []

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._state.connections)

    async def listen(self, *bound: socket.socket) -> None:
        """Take requests on these sockets, which are bound, from now on."""
        loop = asyncio.get_running_loop()
        for one in bound:
            if one.family == socket.AF_UNIX:
                server = await loop.create_unix_server(self._protocol, sock=one, backlog=BACKLOG)
            else:
                server = await loop.create_server(self._protocol, sock=one, backlog=BACKLOG)
            self._servers.append(server)
        if not self._tending:
            self._tending = [
                loop.create_task(self._sweep()),
                loop.create_task(self._app.door.stays.watch()),
            ]

    def _protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self._config.http_protocol_class
        return make(config=self._config, server_state=self._state, app_state={})

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK)
            sweep(self._state, loop.time())

    async def stop(self, let_go: Callable[[], Awaitable[None]], drain: float = DRAIN) -> None:
        """Take no more requests, end streams, answer what was asked, and let go of the engine.

        New requests are told to come back later for as long as others are being answered. What is not done by then hears from the engine that it
        closes, and is ended.
        """
        door = self._app.door
        door.stop.set()
        await self._until(lambda: door.running == 0, drain)
        await let_go()
        await self._until(lambda: door.running == 0, LAST_WORDS)
        for server in self._servers:
            server.close()
        for task in tuple(self._state.tasks):
            task.cancel()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        await self._until(lambda: not self._state.connections, LAST_WORDS)
        sweep(self._state, float("inf"))
        for task in self._tending:
            task.cancel()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():  # noqa: ASYNC110 - counts of uvicorn's, which tell nobody
                    await asyncio.sleep(_STEP)


def tcp_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound there.  Raises: Conflict: the port is taken. Denied. RuntimeUnavailable: there is no such address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
    except OSError as error:
        raise RuntimeUnavailable(f"{host}: {error.strerror or error}", host=host) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _unbound(error, f"{host}:{port}") from error
    bound.setblocking(False)
    return bound


def _unbound(error: OSError, place: str) -> DsecError:
    if isinstance(error, PermissionError):
        return Denied(f"{place}: {error.strerror}", hint="choose a port above 1023")
    hint = "something listens there, another `dsec serve` perhaps; `--port` chooses another one"
    return Conflict(f"{place}: {error.strerror or error}", hint=hint, place=place)


def unix_socket(path: Path) -> tuple[socket.socket, int]:
    """A socket of that path, for its owner only, and its inode; one that a dead server left is replaced at once.

    Raises:
        Conflict: a server answers there, or it is no socket. Denied, RuntimeUnavailable.
    """
    _check_free(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        fresh.unlink(missing_ok=True)
        bound.bind(str(fresh))
        fresh.chmod(0o600)
        bound.listen(BACKLOG)
        inode = fresh.stat().st_ino
        fresh.rename(path)
    except OSError as error:
        bound.close()
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        kind = Denied if isinstance(error, PermissionError) else RuntimeUnavailable
        raise kind(f"{path}: {error.strerror or error}", path=str(path)) from error
    bound.setblocking(False)
    return bound, inode


def _check_free(path: Path) -> None:
    """Raises: Conflict: somebody listens there, or something else has that name."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise Conflict(f"{path} is no socket", hint="move it away", path=str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise Conflict(f"{path}: {error.strerror or error}", path=str(path)) from error
    raise Conflict(f"a server listens on {path}", hint="stop that one first", path=str(path))


def forget_socket(path: Path, inode: int) -> None:
    """Remove the path of a socket that has that inode; another one may have taken its place."""
    with contextlib.suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()
