"""The engine's side of the spawner against one that a test plays: when it may be asked what, and what one of an earlier release says."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.errors import RuntimeUnavailable
from dsec.model.sandbox import Level
from dsec.runtimes.spawner import Spawner, SpawnerConfig
from dsec.wire import spawn
from dsec.wire.spawn import Op

pytestmark = pytest.mark.anyio


class Played:
    """A spawner of level `container` without sandboxes. ``refused``: what it answers with this errno."""

    def __init__(self, directory: Path) -> None:
        self.heard: list[Op] = []
        self.refused: dict[Op, int] = {}
        self.attached = asyncio.Event()  # TREE is answered once it is set
        self._answering: list[asyncio.Task[None]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.open(directory, os.O_PATH)
        self._listener.bind(f"/proc/self/fd/{path}/spawner.sock")
        os.close(path)
        self._listener.listen()
        self._listener.setblocking(False)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            with sock:
                while message := await loop.sock_recv(sock, 1 << 16):
                    op, seq = struct.unpack_from("<II", message)
                    self.heard.append(Op(op))
                    self._answering.append(asyncio.create_task(self._answer(sock, Op(op), seq)))

    async def _answer(self, sock: socket.socket, op: Op, seq: int) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, await self._words(op, seq))

    async def _words(self, op: Op, seq: int) -> bytes:
        if op in self.refused:
            return struct.pack("<III", seq, self.refused[op], 2) + b"no"
        if op is Op.TREE:
            await self.attached.wait()
        body = {
            Op.HELLO: struct.pack("<IIIi", spawn.VERSION, 42, 0, 0),
            Op.LIST: struct.pack("<II", 0, 0),
        }
        return struct.pack("<II", seq, 0) + body.get(op, b"")

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
async def played(tmp_path: Path) -> AsyncIterator[Played]:
    found = Played(tmp_path)
    serving = asyncio.create_task(found.serve())
    yield found
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    found.close()


async def attach(spawner: Spawner) -> None:
    with open(os.devnull, "rb") as some:  # noqa: ASYNC230 - opening it waits for nothing
        await spawner.forget_trees()
        await spawner.tree("some", some.fileno())


@pytest.fixture
async def spawner(played: Played, tmp_path: Path) -> AsyncIterator[Spawner]:
    config = SpawnerConfig(
        level=Level.CONTAINER, directory=tmp_path, sockets=tmp_path, programs=tmp_path, durable=True
    )
    found = Spawner(config, lambda _: None, attach)
    yield found
    await found.close(end=False)


async def test_nobody_asks_one_that_has_not_got_its_trees(played: Played, spawner: Spawner) -> None:
    first = asyncio.create_task(spawner.list())
    while Op.TREE not in played.heard:  # noqa: ASYNC110 - what it hears it tells nobody
        await asyncio.sleep(0.001)
    second = asyncio.create_task(spawner.list())
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert Op.LIST not in played.heard
    played.attached.set()
    assert await first == await second == ()
    assert played.heard == [Op.HELLO, Op.UNTREE, Op.TREE, Op.LIST, Op.LIST]


async def test_one_of_an_earlier_release_keeps_its_trees(played: Played, spawner: Spawner) -> None:
    played.attached.set()
    played.refused = {Op.UNTREE: errno.EPROTO}
    assert await spawner.list() == ()
    await spawner.remove_tree("some")
    played.refused = {Op.UNTREE: errno.ENOENT}
    await spawner.remove_tree("some")
    played.refused = {Op.UNTREE: errno.EBUSY, Op.TREE: errno.EIO}
    with pytest.raises(RuntimeUnavailable):
        await spawner.remove_tree("some")
    with pytest.raises(RuntimeUnavailable):
        await spawner.add_tree("some", 0)
