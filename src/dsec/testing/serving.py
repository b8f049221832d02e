"""A server in a thread of its own, over any engine: what a client sees of it goes over a real connection."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from dsec.errors import Unauthenticated
from dsec.model.tenants import OWNER, Principal
from dsec.ports.engine import Services
from dsec.ports.gate import Gate
from dsec.server.app import make_app
from dsec.server.listening import Listener, tcp_socket, unix_socket
from dsec.testing.idempotency import FakeIdempotency

KEY = "dsec_test-key"
_PATIENCE = 30.0  # seconds
_CREDENTIALS = struct.Struct("3i")


class OneKey(Gate):
    """One key, of the owner, for all of one engine, which may come later."""

    def __init__(self) -> None:
        self.engine: Services | None = None

    async def principal(self, key: str) -> Principal:
        if key != KEY:
            raise Unauthenticated("that is no key")
        return OWNER

    def services(self, principal: Principal) -> Services:
        del principal
        assert self.engine is not None
        return self.engine


class Server:
    """A thread with an event loop, in which an engine is opened and served.

    Args:
        connect: opens the engine, on that loop. path: of a unix socket; None = a port of the loopback interface.
    """

    def __init__(self, connect: Callable[[], Awaitable[Services]], path: Path | None = None) -> None:
        self._connect = connect
        self._gate = OneKey()
        self._listener = Listener(make_app(self._gate, idempotency=FakeIdempotency()))
        self._bound = tcp_socket("127.0.0.1", 0) if path is None else unix_socket(path)[0]
        self.url = f"unix://{path}" if path else f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        self._ready = threading.Event()
        self._loop = uvloop.new_event_loop()
        self._ended: asyncio.Future[None] | None = None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dsec-test-server")

    def start(self) -> None:
        """Start it, and wait until it listens.  Raises: what opening the engine raised."""
        self._thread.start()
        self._ready.wait(_PATIENCE)
        if self._failed is not None:
            self._thread.join()
            raise self._failed

    def stop(self) -> None:
        """End it in good order, and its engine with it."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_PATIENCE)

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:  # noqa: BLE001 - who started it raises it
                self._failed = error
            finally:
                self._ready.set()

    async def _serve(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        self._gate.engine = await self._connect()
        await self._listener.listen(self._bound)
        self._ready.set()
        await self._ended
        await self._listener.stop(self._gate.engine.close)


@contextmanager
def served(connect: Callable[[], Awaitable[Services]], path: Path | None = None) -> Iterator[str]:
    """The URL of a server that serves that engine meanwhile."""
    server = Server(connect, path)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def stop_server_of(home: Path) -> None:
    """End the server that commands of ours started for a home, and wait until it is gone; that there is none is no error."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(home / "dsec.sock"))
        except OSError:
            return
        pid, _, _ = _CREDENTIALS.unpack(
            probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        select.select([process], [], [], _PATIENCE)
    finally:
        os.close(process)
