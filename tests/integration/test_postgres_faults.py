"""A server of PostgreSQL that is killed, connections that are lost, and disks that are full: nothing acknowledged is lost, and nothing is doubled."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
import asyncpg  # type: ignore[import-untyped]
import pytest

from dsec.control import changes
from dsec.control.accounts import Accounts
from dsec.control.counted import CountedSandboxes, CountedVolumes
from dsec.core.quotas import NOTHING, Holding, Ledger, held
from dsec.core.quotas import volume as of_volume
from dsec.errors import Conflict, DsecError, RuntimeUnavailable, StorageFull
from dsec.model.sandbox import State
from dsec.model.tenants import Quota
from dsec.ports.journal import Unsettled
from dsec.stores.control.store import ControlStore, open_control
from dsec.stores.keeper import Pace
from dsec.stores.postgres import line
from dsec.stores.postgres import writer as writing
from dsec.stores.postgres.store import PostgresStore
from dsec.stores.schema import Durability
from dsec.testing import postgres
from dsec.testing.contracts.journal import note, sandbox
from dsec.testing.contracts.volumes import volume

pytestmark = pytest.mark.anyio


class Server:
    """One of this test's own, that can be killed and begun again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = f"postgresql://dsec@/{{}}?host={root}"
        self.url = self.address.format("postgres")
        self._stack = ExitStack()
        # It ends with the thread that began it, and those of a test's loop end with the test.
        self._starter = ThreadPoolExecutor(1)

    def start(self) -> None:
        self._starter.submit(self._start).result()

    def _start(self) -> None:
        for tries in range(100, 0, -1):
            (self.root / "data" / "postmaster.pid").unlink(missing_ok=True)
            try:
                self._stack.enter_context(postgres._running(self.root, self.root / "data"))
            except RuntimeError as error:  # a session that began while it was killed has not noticed yet
                if tries == 1 or "still in use" not in str(error):
                    raise
                time.sleep(0.05)
            else:
                return

    @property
    def pid(self) -> int:
        return int((self.root / "data" / "postmaster.pid").read_text().split()[0])

    def kill(self) -> None:
        """All of it, as a loss of its memory."""
        self.signal(signal.SIGKILL)
        self.stop()

    def signal(self, signo: int) -> None:
        """To the server and every session of it."""
        parent = self.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in (parent, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signo)

    def ensure(self) -> None:
        """It runs, also where it ended by itself."""
        with suppress(FileNotFoundError):
            if Path(f"/proc/{self.pid}").exists():
                return
        self.stop()
        self.start()

    def stop(self) -> None:
        stack, self._stack = self._stack, ExitStack()
        with suppress(ProcessLookupError):
            stack.close()


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    with postgres.made() as root:
        server = Server(root)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def server(one_server: Server) -> Iterator[Server]:
    """Running, with a database of this test's."""
    one_server.ensure()
    with postgres.database(one_server.address) as one_server.url:
        yield one_server
        one_server.ensure()


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


# Changes of which nobody knows what became


class Cut:
    """Ends a server in the middle of the next change, before or after it is stored; whoever sent it hears nothing."""

    def __init__(self, server: Server, when: str) -> None:
        self._server = server
        self._when = when
        self._real = writing._send
        self.armed = False

    async def send(self, connection: Any, sheet: Any) -> None:
        if not self.armed:
            await self._real(connection, sheet)
            return
        self.armed = False
        if self._when == "after":
            await self._real(connection, sheet)
        await asyncio.to_thread(self._server.kill)
        raise ConnectionResetError("lost")


class Counted:
    """Records of one project that are counted, over a store."""

    def __init__(self, store: PostgresStore) -> None:
        self.ledger = Ledger(lambda _: Quota(sandboxes=10, disk_mib=10_000))
        accounts = Accounts(self.ledger)
        accounts.enforcing = True
        self.sandboxes = CountedSandboxes(store, accounts)
        self.volumes = CountedVolumes(store.volumes, accounts)

    async def doubtful(self, change: Awaitable[object]) -> None:
        """A change that is in doubt: what it may hold is held."""
        with pytest.raises(RuntimeUnavailable) as caught:
            await change
        assert caught.value.facts == {"unknown": True}
        assert caught.value.hint
        assert self.ledger.reserved("default") != NOTHING

    async def known(self) -> Holding:
        """When nothing is in doubt any more: what is held."""
        async with asyncio.timeout(30):
            while self.ledger.reserved("default") != NOTHING:  # noqa: ASYNC110 - seen from outside only
                await asyncio.sleep(0.02)
        return self.ledger.held("default")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_change_in_doubt_is_counted_when_its_fate_is_known(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    store, cut, stored = (
        await opened(server.url, tmp_path, "disk", patience=0.2),
        Cut(server, when),
        when == "after",
    )
    counted, info, kept = Counted(store), sandbox(), volume()
    monkeypatch.setattr(writing, "_send", cut.send)
    cut.armed = True
    await counted.doubtful(counted.sandboxes.add(info, note(info.id)))
    await asyncio.to_thread(server.start)
    found = await counted.known()  # nobody asked for anything meanwhile
    assert found == (held(info.state, info.spec) if stored else NOTHING)
    assert await store.count() == ({State.PENDING: 1} if stored else {})
    cut.armed = True
    await counted.doubtful(counted.volumes.keep(kept, note()))
    await asyncio.to_thread(server.start)
    assert (await counted.known()) - found == (of_volume(kept) if stored else NOTHING)
    assert await store.volumes.all() == ((kept,) if stored else ())
    if stored:
        await counted.sandboxes.move(info.id, seen=State.PENDING, to=State.FAILED, draft=note(info.id))
        await counted.volumes.forget(kept.project, kept.name, note())
        assert counted.ledger.held("default") == NOTHING
    await store.close()


async def test_a_move_waits_for_one_in_doubt(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "PATIENCE", 0.1)
    store, cut = await opened(server.url, tmp_path, "disk", patience=0.2), Cut(server, "after")
    counted, info = Counted(store), sandbox()
    monkeypatch.setattr(writing, "_send", cut.send)
    cut.armed = True
    await counted.doubtful(counted.sandboxes.add(info, note(info.id)))
    with pytest.raises(RuntimeUnavailable, match="in doubt"):
        await counted.sandboxes.move(info.id, seen=State.PENDING, to=State.FAILED, draft=note(info.id))
    await asyncio.to_thread(server.start)
    monkeypatch.setattr(changes, "PATIENCE", 30.0)
    await counted.sandboxes.move(info.id, seen=State.PENDING, to=State.FAILED, draft=note(info.id))
    assert counted.ledger.all() == {}
    await store.close()


async def test_what_stays_in_doubt_to_the_end_holds_nobody(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cut = await opened(server.url, tmp_path, "disk", patience=0.2), Cut(server, "after")
    counted, info = Counted(store), sandbox()
    monkeypatch.setattr(writing, "_send", cut.send)
    cut.armed = True
    await counted.doubtful(counted.sandboxes.add(info, note(info.id)))
    await counted.sandboxes.settled()
    with suppress(DsecError):
        await store.close()
    assert await counted.known() == NOTHING


# Servers that do not answer, or not everybody


class Loads:
    """Workers that append numbers for ever, and what they were told of each."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.told: list[int] = []
        self.refused: list[DsecError] = []
        self.over = False

    async def work(self, worker: int) -> None:
        number = worker
        while not self.over:
            try:
                await self.store.append(note("c", n=number))
            except DsecError as error:
                self.refused.append(error)
            else:
                self.told.append(number)
            number += 4

    async def until(self, what: str, more: int) -> None:
        """Until so many more were told, or refused."""
        wanted = len(getattr(self, what)) + more
        async with asyncio.timeout(60):
            while len(getattr(self, what)) < wanted:  # noqa: ASYNC110 - seen from outside only
                await asyncio.sleep(0.01)

    async def check(self) -> None:
        """None was lost, and none doubled."""
        stored: list[object] = []
        while found := await self.store.read("c", after=len(stored), limit=1000):
            stored += [record.payload["n"] for record in found]
        assert len(set(stored)) == len(stored)
        assert set(self.told) <= set(stored)
        assert await self.store.verify() == ()


async def test_a_server_that_stands_still_is_said_and_goes_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "STATEMENT_SECONDS", 0.5)
    monkeypatch.setattr(line, "CONNECT_SECONDS", 0.3)
    store = await opened(server.url, tmp_path, patience=0.5)
    monkeypatch.setattr(line, "STATEMENT_SECONDS", 30.0)
    loads = Loads(store)
    async with anyio.create_task_group() as group:
        for worker in range(4):
            group.start_soon(loads.work, worker)
        await loads.until("told", 50)
        server.signal(signal.SIGSTOP)
        try:
            await loads.until("refused", 8)
        finally:
            server.signal(signal.SIGCONT)
        await loads.until("told", 50)
        loads.over = True
    assert {type(error) for error in loads.refused} <= {RuntimeUnavailable, Unsettled}
    assert all(error.retryable and error.hint for error in loads.refused)
    await loads.check()
    await store.close()


async def test_a_server_that_takes_no_changes_any_more(server: Server, tmp_path: Path) -> None:
    """As one whose place another has taken."""
    store = await opened(server.url, tmp_path, patience=0.3)
    await store.append(note(n=0))
    await _alter(server, "SET default_transaction_read_only = on")
    try:
        for _ in range(2):
            with pytest.raises(RuntimeUnavailable) as caught:
                await store.append(note(n=1))
            assert not isinstance(caught.value, Unsettled)
        assert [record.payload["n"] for record in await store.read("engine")] == [0]
        with pytest.raises(RuntimeUnavailable):
            await opened(server.url, tmp_path / "other", patience=0.3)
    finally:
        await _alter(server, "RESET default_transaction_read_only")
    await store.append(note(n=2))
    assert [record.payload["n"] for record in await store.read("engine")] == [0, 2]
    await store.close()


async def _alter(server: Server, what: str) -> None:
    """Whether changes are taken. Sessions hear of it before a new one does."""
    connection = await asyncpg.connect(server.url, server_settings={"default_transaction_read_only": "off"})
    await connection.execute(f"ALTER SYSTEM {what}")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()
    wanted = "on" if what.endswith("= on") else "off"
    for _ in range(1000):
        (row,) = await postgres.execute(server.url, "SHOW default_transaction_read_only")
        if row[0] == wanted:
            return
        await anyio.sleep(0.01)
    raise AssertionError(f"the server does not hear of {what}")


async def test_connections_that_cannot_be_had(server: Server, tmp_path: Path) -> None:
    """A role that is no superuser, whose bound is reached when its connections have to be made again."""
    await postgres.execute(server.url, "CREATE ROLE few LOGIN")
    await postgres.execute(server.url, "CREATE DATABASE ours OWNER few")
    url = server.address.format("ours").replace("dsec@", "few@")
    store = await opened(url, tmp_path, patience=0.3)
    await store.append(note(n=0))
    await postgres.execute(server.url, "ALTER ROLE few CONNECTION LIMIT 0")
    await postgres.execute(
        server.url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'few'"
    )
    for asked in (lambda: store.append(note(n=1)), lambda: store.read("engine")):
        with pytest.raises(RuntimeUnavailable, match="too many connections"):
            await asked()
    await postgres.execute(server.url, "ALTER ROLE few CONNECTION LIMIT -1")
    await store.append(note(n=2))
    assert [record.payload["n"] for record in await store.read("engine")] == [0, 2]
    await store.close()


async def test_a_lost_session_that_has_not_ended_is_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the lock is asked: what is our own comes to an end, and nobody else has been there."""
    store = await opened(server.url, tmp_path, patience=0.2)
    await store.append(note(n=0))
    store._parts.line._lock_patience = 0.0
    monkeypatch.setattr(line, "_END_OURS", "SELECT $1::int")  # it cannot be ended from here
    left = store._parts.line._connection
    store._parts.line._connection = None
    with pytest.raises(RuntimeUnavailable, match="has not ended"):
        await store.append(note(n=1))
    left.terminate()
    async with asyncio.timeout(30):
        while True:
            with suppress(RuntimeUnavailable):
                await store.append(note(n=2))
                break
    assert [record.payload["n"] for record in await store.read("engine")] == [0, 2]
    await store.close()


async def test_a_server_that_dies_of_a_statement_is_not_asked_for_ever(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real, sent = await opened(server.url, tmp_path), writing._send, 0

    async def send(connection: Any, sheet: Any) -> None:
        nonlocal sent
        sent += 1
        await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(writing, "_send", send)
    with pytest.raises(RuntimeUnavailable) as caught:
        await store.append(note(n=0))
    assert not isinstance(caught.value, Unsettled)
    assert sent == writing._SENDS
    monkeypatch.setattr(writing, "_send", real)
    await store.append(note(n=1))
    assert [record.payload["n"] for record in await store.read("engine")] == [1]
    await store.close()


async def test_of_several_hosts_the_one_that_is_there_is_used(server: Server, tmp_path: Path) -> None:
    """By journal, control database and migrations alike."""
    url = server.url.replace("host=", "host=/nowhere,")
    store = await opened(url, tmp_path)
    await store.append(note(n=0))
    assert await store.verify() == ()
    await store.close()
    control = await open_control(url, was_used=_never)
    assert await control.projects() == ()
    await control.close()


async def test_a_control_database_that_takes_no_changes_any_more(server: Server) -> None:
    control = await open_control(server.url, was_used=_never)
    await _alter(server, "SET default_transaction_read_only = on")
    try:
        with pytest.raises(RuntimeUnavailable, match="mend the URL"):
            await _advance_until_refused(control)
    finally:
        await _alter(server, "RESET default_transaction_read_only")
    await control.advance("siem", 2)
    assert await control.position("siem") == 2
    await control.close()


async def _advance_until_refused(control: ControlStore) -> None:
    """The server is told by a signal, and heeds it when it may."""
    async with asyncio.timeout(30):
        while True:
            await control.advance("siem", 1)


async def _never() -> bool:
    return False
