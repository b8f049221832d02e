"""A server, put together: the durable engine of a home, the gate before it, and the sockets it listens on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from dsec.errors import Denied, DsecError
from dsec.handover import handed
from dsec.model.checks import check_count
from dsec.model.sandbox import State
from dsec.ports.engine import Services
from dsec.ports.gate import Gate
from dsec.server.app import Application, make_app
from dsec.server.connections import Bounds
from dsec.server.listening import DRAIN, Listener, forget_socket, tcp_socket, unix_socket
from dsec.wiring.settings import Settings

SOCKET: Final = "dsec.sock"
_BUSY: Final = (State.PENDING, State.RUNNING, State.PAUSED, State.STOPPING)
_LOOK: Final = 1.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a server listens, checked when made.

    Attributes:
        home: its socket is ``dsec.sock`` there, for its owner alone.
        host, port: of HTTP; host "" = only the socket, port 0 = one that is free.
        insecure_host: other machines may reach it, in clear text.

    Raises:
        Denied: other machines could reach it, and nobody said that they may. BadRequest.
    """

    home: Path
    host: str = "127.0.0.1"
    port: int = 7070
    insecure_host: bool = False

    def __post_init__(self) -> None:
        check_count("port", self.port, 0, 65535)
        if self.host and not self.insecure_host and not _is_loopback(self.host):
            raise Denied(
                f"host: {self.host} can be reached by other machines, and keys and files would cross the network in clear text",
                hint="listen on 127.0.0.1 behind a proxy that does TLS; --insecure-host if the network is yours alone",
                host=self.host,
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What stands behind the sockets. ``parts``: of :func:`~dsec.server.app.make_app`. ``close`` lets go of the engine."""

    services: Services
    gate: Gate
    parts: dict[str, object] = field(default_factory=dict)


Compose = Callable[[Settings], contextlib.AbstractAsyncContextManager[Behind]]


class Running:
    """A server that listens.

    Attributes:
        url: of HTTP, "" = only the socket. socket: the path of that.
    """

    def __init__(self, app: Application, listener: Listener, behind: Behind, url: str, socket: Path) -> None:
        self._app = app
        self._listener = listener
        self._behind = behind
        self.url = url
        self.socket = socket

    async def idle(self, seconds: float) -> None:
        """Return when nobody asked for anything for so long, and no sandbox is there that is not dormant."""
        while True:
            await asyncio.sleep(min(_LOOK, seconds))
            door = self._app.door
            if door.running or time.monotonic() - door.asked < seconds:
                continue
            with contextlib.suppress(DsecError):
                found = await self._behind.services.sandboxes.page(states=_BUSY, limit=1)
                if not found.items:
                    return

    async def stop(self, drain: float = DRAIN) -> None:
        """Answer what was asked, end streams, let go of the engine: sandboxes live on."""
        await self._listener.stop(self._behind.services.close, drain)
        await self._app.flights.land_all()


@contextlib.asynccontextmanager
async def serving(
    place: Place, settings: Settings, compose: Compose, *, bounds: Bounds | None = None
) -> AsyncIterator[Running]:
    """A server of the engine in ``settings.home``; at the end it is stopped.

    Args:
        compose: opens the engine and the gate before it.

    Raises:
        Conflict: another process owns the engine, or has the port or the socket. Denied, RuntimeUnavailable.
        StoreDamaged, StorageFull: the engine's.
    """
    async with contextlib.AsyncExitStack() as stack:
        bound = [tcp_socket(place.host, place.port)] if place.host else []
        for one in bound:
            stack.callback(one.close)
        behind = await stack.enter_async_context(compose(settings))
        path = place.home / SOCKET
        local, inode = await handed(partial(unix_socket, path), partial(_let_go, path))
        stack.callback(_let_go, path, (local, inode))
        app = make_app(behind.gate, **behind.parts)
        listener = Listener(app, bounds)
        running = Running(
            app, listener, behind, _url(place.host, bound[0].getsockname()) if bound else "", path
        )
        await listener.listen(*bound, local)
        try:
            yield running
        finally:
            await running.stop()


def _let_go(path: Path, bound: tuple[socket.socket, int]) -> None:
    forget_socket(path, bound[1])
    bound[0].close()


def _url(host: str, name: tuple[object, ...]) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{name[1]}"
