"""A server of PostgreSQL that is killed, connections that are lost, and disks that are full: nothing acknowledged is lost, and nothing is doubled."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
import pytest

from dsec.errors import Conflict, DsecError, RuntimeUnavailable, StorageFull
from dsec.model.sandbox import State
from dsec.stores.keeper import Pace
from dsec.stores.postgres import writer as writing
from dsec.stores.postgres.store import PostgresStore
from dsec.stores.schema import Durability
from dsec.testing import postgres
from dsec.testing.contracts.journal import note, sandbox

pytestmark = pytest.mark.anyio


class Server:
    """One of this test's own, that can be killed and begun again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"postgresql://dsec@/postgres?host={root}"
        self._stack = ExitStack()

    def start(self) -> None:
        (self.root / "data" / "postmaster.pid").unlink(missing_ok=True)
        self._stack.enter_context(postgres._running(self.root, self.root / "data"))

    @property
    def pid(self) -> int:
        return int((self.root / "data" / "postmaster.pid").read_text().split()[0])

    def kill(self) -> None:
        """The server and every session of it, as a loss of all its memory."""
        parent = self.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in (parent, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.stop()

    def ensure(self) -> None:
        """It runs, also where it ended by itself."""
        if not Path(f"/proc/{self.pid}").exists():
            self.stop()
            self.start()

    def stop(self) -> None:
        stack, self._stack = self._stack, ExitStack()
        with suppress(ProcessLookupError):
            stack.close()


@contextmanager
def own_server() -> Iterator[Server]:
    with postgres.made() as root:
        server = Server(root)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    with own_server() as server:
        yield server


async def opened(
    url: str, home: Path, durability: Durability = "process", patience: float = 20.0
) -> PostgresStore:
    return await PostgresStore.open(
        url,
        home / "state",
        key=home / "key",
        engine_id=f"en-{token_hex(4)}",
        durability=durability,
        pace=Pace(records=50, seconds=0.2),
        patience=patience,
    )


@pytest.mark.parametrize("durability", ["process", "disk"])
async def test_what_a_killed_server_acknowledged_is_there(
    server: Server, tmp_path: Path, durability: Durability
) -> None:
    store = await opened(server.url, tmp_path, durability)
    told: list[tuple[str, int, str]] = []
    stop = False

    async def work(chain: str) -> None:
        while not stop:
            (one,) = await store.append(note(chain, n=len(told)))
            told.append((chain, one.seq, one.digest))

    async with anyio.create_task_group() as group:
        for n in range(4):
            group.start_soon(work, f"c{n}")
        for _ in range(3):
            before = len(told)
            while len(told) < before + 100:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await anyio.to_thread.run_sync(server.kill)
            await anyio.to_thread.run_sync(server.start)
        before = len(told)
        while len(told) < before + 20:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        stop = True
    for chain in {chain for chain, _, _ in told}:
        stored = [(record.seq, record.digest) for record in await store.read(chain, limit=10_000)]
        assert stored == [(seq, digest) for name, seq, digest in told if name == chain], (
            "none lost, none doubled"
        )
    assert await store.verify() == ()
    await store.close()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_connection_lost_in_the_middle_of_a_commit(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The answer is lost; what became of the statement is read, not guessed."""
    store = await opened(server.url, tmp_path)
    await store.append(note(n=0))
    real, lost = writing._send, 0

    async def send(connection: Any, sheet: Any) -> None:
        nonlocal lost
        if when == "after":
            await real(connection, sheet)
        if lost < 1:
            lost += 1
            connection.terminate()
            raise ConnectionResetError("lost")
        if when == "before":
            await real(connection, sheet)

    monkeypatch.setattr(writing, "_send", send)
    info = sandbox()
    await store.add(info, note(info.id))
    await store.move(info.id, seen=State.PENDING, to=State.RUNNING, draft=note(info.id))
    await store.append(note(n=1))
    assert [record.seq for record in await store.read(info.id)] == [1, 2]
    assert [record.payload for record in await store.read("engine")] == [{"n": 0}, {"n": 1}]
    assert await store.count() == {State.RUNNING: 1}
    assert await store.verify() == ()
    await store.close()
    assert lost == 1


async def test_a_server_that_stays_away_is_said_and_found_again(server: Server, tmp_path: Path) -> None:
    store = await opened(server.url, tmp_path, patience=0.3)
    await store.append(note(n=0))
    await anyio.to_thread.run_sync(server.kill)
    for _ in range(2):
        with pytest.raises(RuntimeUnavailable) as caught:
            await store.append(note(n=1))
        assert caught.value.hint
    with pytest.raises(RuntimeUnavailable):
        await store.read("engine")
    await anyio.to_thread.run_sync(server.start)
    await store.append(note(n=2))
    found = [record.payload["n"] for record in await store.read("engine")]
    assert (found[0], found[-1]) == (0, 2)
    assert await store.verify() == ()
    await store.close()


async def test_another_engine_that_came_between_ends_this_one(server: Server, tmp_path: Path) -> None:
    store = await opened(server.url, tmp_path)
    await store.append(note())
    await store._parts.keeper.sign()
    store._parts.line.lost()
    other = await opened(server.url, tmp_path)
    await other.append(note())
    await other.close()
    with pytest.raises(Conflict):
        await store.append(note())
    with suppress(DsecError):  # what it did not sign it never will
        await store.close()


@pytest.fixture
def small() -> Iterator[Server]:
    """On a disk of 160 MB."""
    with postgres.made(size="160m") as root:
        server = Server(root)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_full_disk_is_said_and_heals(small: Server, tmp_path: Path) -> None:
    store = await opened(small.url, tmp_path, patience=2.0)
    await store.append(note(n=0))
    filler = small.root / "filler"

    def fill() -> None:
        with filler.open("wb") as file, suppress(OSError):
            while True:
                file.write(b"\0" * 65536)
                file.flush()

    await anyio.to_thread.run_sync(fill)
    acknowledged: list[int] = []

    async def append_until_full() -> None:
        for n in range(4000):
            await store.append(*(note(f"c{k}", n=n, text=token_hex(4000)) for k in range(8)))
            acknowledged.append(n)

    with pytest.raises((StorageFull, RuntimeUnavailable)):
        await append_until_full()
    await anyio.to_thread.run_sync(filler.unlink)
    await anyio.to_thread.run_sync(small.ensure)
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        try:
            await store.append(note(n=1))
            break
        except DsecError:
            assert asyncio.get_running_loop().time() < deadline
            await anyio.sleep(0.2)
    stored = sum([len(await store.read(f"c{k}", limit=10_000)) for k in range(8)])
    assert stored >= 8 * len(acknowledged)
    assert await store.verify() == ()
    await store.close()
