"""Connections into sandboxes, and decisions, over fakes: bounded, recorded, over when the sandbox is."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
from collections.abc import AsyncIterator

import pytest

from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.errors import BadRequest, Busy, Conflict, NotFound, SandboxFailed, StorageFull, TooLarge
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.model.journal import Phase, Record
from dsec.model.sandbox import SandboxSpec
from dsec.node import ports
from dsec.testing.harness import Harness, until

pytestmark = pytest.mark.anyio

PORT = 8000


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
async def dsec(harness: Harness) -> AsyncIterator[AsyncDsec]:
    harness.runtime.listening.add(PORT)
    async with harness.open() as opened:
        yield opened
    for end in harness.runtime.dialled:
        end.close()


@pytest.fixture
async def sb(dsec: AsyncDsec) -> AsyncSandbox:
    return await dsec.sandboxes.create()


def service(harness: Harness) -> ports.Ports:
    made = harness.engine.services.ports
    assert isinstance(made, ports.Ports)
    return made


async def connected(harness: Harness, sb: AsyncSandbox, port: int = PORT) -> socket.socket:
    return await service(harness).connect(sb.id, port)


def busy(harness: Harness, sb: AsyncSandbox) -> int:
    handle = harness.engine.kit.table.find(sb.id)
    assert handle is not None
    return handle.busy


async def notes(sb: AsyncSandbox) -> list[Record]:
    return [record for record in await sb.events() if record.act == "port.connect"]


def _forget(sockets: list[socket.socket]) -> None:
    sockets.clear()
    gc.collect()


class TestConnecting:
    async def test_bytes_both_ways(self, harness: Harness, sb: AsyncSandbox) -> None:
        sock = await connected(harness, sb)
        loop = asyncio.get_running_loop()
        inside = harness.runtime.dialled[0]
        inside.setblocking(False)
        await loop.sock_sendall(sock, b"question")
        assert await loop.sock_recv(inside, 100) == b"question"
        await loop.sock_sendall(inside, b"answer")
        assert await loop.sock_recv(sock, 100) == b"answer"
        assert not sock.getblocking()
        sock.close()

    async def test_what_cannot_be_reached(self, harness: Harness, sb: AsyncSandbox, dsec: AsyncDsec) -> None:
        with pytest.raises(NotFound):
            await service(harness).connect(new_sandbox_id(), PORT)
        for wrong in (0, 65536, -1, True):
            with pytest.raises(BadRequest):
                await connected(harness, sb, wrong)
        with pytest.raises(Conflict, match="nothing listens"):
            await connected(harness, sb, PORT + 1)
        await sb.pause()
        with pytest.raises(Conflict, match="paused"):
            await connected(harness, sb)
        await sb.destroy()
        with pytest.raises(NotFound):
            await connected(harness, sb)
        del dsec

    async def test_only_so_many(
        self, harness: Harness, sb: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ports, "MAX_OPEN", 3)
        open_ = [await connected(harness, sb) for _ in range(3)]
        with pytest.raises(Busy):
            await connected(harness, sb)
        open_.pop().close()
        await asyncio.sleep(0)
        open_.append(await connected(harness, sb))
        for _ in range(10):  # failures take no places
            with pytest.raises((Conflict, Busy)):
                await connected(harness, sb, PORT + 1)
        for sock in open_:
            sock.close()
        await asyncio.sleep(0)
        assert busy(harness, sb) == 0

    async def test_a_place_comes_back_however_it_is_let_go(self, harness: Harness, sb: AsyncSandbox) -> None:
        """Closed, closed twice, given to an event loop, or forgotten."""
        closed = await connected(harness, sb)
        closed.close()
        closed.close()
        _, writer = await asyncio.open_connection(sock=await connected(harness, sb))
        writer.close()
        await writer.wait_closed()
        given = await connected(harness, sb)
        socket.close(given.detach())
        forgotten = [await connected(harness, sb)]
        assert busy(harness, sb) == 1
        with pytest.warns(ResourceWarning):
            _forget(forgotten)
        await asyncio.sleep(0)
        assert busy(harness, sb) == 0

    async def test_one_that_takes_none_holds_nobody_else_up(
        self, harness: Harness, sb: AsyncSandbox, dsec: AsyncDsec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dialling: dict[SandboxId, int] = {}
        dial = harness.runtime.dial

        async def counted(sandbox: SandboxId, port: int, timeout: float) -> socket.socket:
            dialling[sandbox] = dialling.get(sandbox, 0) + 1
            return await dial(sandbox, port, timeout)

        monkeypatch.setattr(harness.runtime, "dial", counted)
        harness.runtime.deaf = asyncio.Event()
        tasks = [asyncio.ensure_future(connected(harness, sb)) for _ in range(20)]
        other = await dsec.sandboxes.create()
        tasks.append(asyncio.ensure_future(connected(harness, other)))
        await until(lambda: dialling.get(other.id) == 1)
        assert dialling[sb.id] == ports.MAX_MAKING_EACH
        harness.runtime.deaf.set()
        for sock in await asyncio.gather(*tasks):  # all who came at once have theirs
            sock.close()

    async def test_a_project_leaves_as_many_places_as_it_has(
        self, harness: Harness, dsec: AsyncDsec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many sandboxes of one project take no connections, others get through."""
        monkeypatch.setattr(ports, "MAX_MAKING", 8)
        making = service(harness)._making
        harness.runtime.deaf = asyncio.Event()
        spec = SandboxSpec(project="deaf")
        deaf = [await harness.engine.services.sandboxes.create(spec) for _ in range(8)]
        tasks = [asyncio.ensure_future(service(harness).connect(each.id, PORT)) for each in deaf]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        while len(waiting) > 4:
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            done |= more
        assert {type(each.exception()) for each in done} == {Busy}
        assert making == {"deaf": 4}
        other = asyncio.ensure_future(connected(harness, await dsec.sandboxes.create()))
        await until(lambda: making.total() == 5)
        harness.runtime.deaf.set()
        for sock in await asyncio.gather(other, *waiting):
            sock.close()
        assert not making

    async def test_nobody_waits_for_ever_for_a_turn(
        self, harness: Harness, sb: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ports, "TURN_SECONDS", 0.05)
        harness.runtime.deaf = asyncio.Event()
        holding = [asyncio.ensure_future(connected(harness, sb)) for _ in range(ports.MAX_MAKING_EACH)]
        await until(lambda: busy(harness, sb) == ports.MAX_MAKING_EACH)
        with pytest.raises(Busy):
            await connected(harness, sb)
        harness.runtime.deaf.set()
        for sock in await asyncio.gather(*holding):
            sock.close()

    async def test_while_one_is_open_it_is_not_idle(self, harness: Harness, dsec: AsyncDsec) -> None:
        sb = await dsec.sandboxes.create(idle=60)
        sock = await connected(harness, sb)
        harness.clock.advance(100)
        assert busy(harness, sb) == 1
        sock.close()
        await asyncio.sleep(0)
        handle = harness.engine.kit.table.find(sb.id)
        assert handle is not None
        assert handle.used == harness.clock.boot()

    async def test_when_the_sandbox_ends_it_is_shut(self, harness: Harness, sb: AsyncSandbox) -> None:
        sock = await connected(harness, sb)
        await sb.destroy()
        assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""
        sock.close()

    async def test_each_life_of_a_sandbox_shuts_its_own(self, harness: Harness, sb: AsyncSandbox) -> None:
        """One that somebody still holds when the sandbox goes on takes nothing from those that come later."""
        handle = harness.engine.kit.table.find(sb.id)
        assert handle is not None
        earlier = await connected(harness, sb)
        news, handle.ending = handle.ending, asyncio.Event()  # as a rollback does
        news.set()
        assert await asyncio.get_running_loop().sock_recv(earlier, 10) == b""
        later = await connected(harness, sb)
        await sb.destroy()
        async with asyncio.timeout(5):
            assert await asyncio.get_running_loop().sock_recv(later, 10) == b""
        for sock in (earlier, later):
            sock.close()

    async def test_of_an_earlier_life_none_is_given(self, harness: Harness, sb: AsyncSandbox) -> None:
        """It was being made when the sandbox was rolled back."""
        handle = harness.engine.kit.table.find(sb.id)
        assert handle is not None
        harness.runtime.deaf = asyncio.Event()
        making = asyncio.ensure_future(connected(harness, sb))
        await until(lambda: service(harness)._making.total() == 1)
        news, handle.ending = handle.ending, asyncio.Event()
        news.set()
        harness.runtime.deaf.set()
        with pytest.raises(NotFound):
            await making
        await asyncio.sleep(0)
        assert busy(harness, sb) == 0

    async def test_cancelled_it_leaves_nothing(self, harness: Harness, sb: AsyncSandbox) -> None:
        task = asyncio.ensure_future(connected(harness, sb))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert busy(harness, sb) == 0


class TestRecord:
    async def test_one_for_each_port_and_minute(self, harness: Harness, sb: AsyncSandbox) -> None:
        harness.runtime.listening.add(PORT + 1)
        for port in (PORT, PORT, PORT + 1, PORT):
            (await connected(harness, sb, port)).close()
        assert [(record.phase, dict(record.payload)) for record in await notes(sb)] == [
            (Phase.NOTE, {"port": PORT, "earlier": 0}),
            (Phase.NOTE, {"port": PORT + 1, "earlier": 0}),
        ]
        harness.clock.advance(61)
        (await connected(harness, sb)).close()
        assert (await notes(sb))[-1].payload == {"port": PORT, "earlier": 2}

    async def test_what_cannot_be_recorded_is_not_done(self, harness: Harness, sb: AsyncSandbox) -> None:
        harness.store.full = True
        for _ in range(2):
            with pytest.raises(StorageFull):
                await connected(harness, sb)
        assert not harness.runtime.dialled
        harness.store.full = False
        (await connected(harness, sb)).close()
        assert len(await notes(sb)) == 1

    async def test_what_is_remembered_is_bounded(
        self, harness: Harness, sb: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ports, "MAX_NOTED", 4)
        for port in range(1, 10):
            with pytest.raises(Conflict):
                await connected(harness, sb, port)
        assert len(service(harness)._noted) == 4


class TestDecisions:
    async def test_it_is_a_record_beside_what_was_done(self, sb: AsyncSandbox) -> None:
        record = await sb.decide(
            {"plan": "list the files", "tools": ["ls", {"cost": 1.5}], "sure": True, "why": None}
        )
        assert (record.act, record.phase) == ("decision", Phase.NOTE)
        await sb.exec(["true"])
        assert [each.act for each in await sb.events()][2:4] == ["decision", "exec"]
        assert (await sb.events())[2] == record

    async def test_one_that_is_paused_too(self, sb: AsyncSandbox) -> None:
        await sb.pause()
        assert (await sb.decide({"a": 1})).payload == {"a": 1}

    async def test_not_of_one_that_has_ended(
        self, harness: Harness, dsec: AsyncDsec, sb: AsyncSandbox
    ) -> None:
        failed = await dsec.sandboxes.create()
        await harness.runtime.die(failed.id)
        await until(lambda: harness.engine.kit.table.find(failed.id) is None)
        with pytest.raises(SandboxFailed):
            await failed.decide({"a": 1})
        await sb.destroy()
        with pytest.raises(NotFound):
            await sb.decide({"a": 1})

    async def test_bounds(self, sb: AsyncSandbox) -> None:
        await sb.decide({"a": "x" * 32_000})
        with pytest.raises(TooLarge):
            await sb.decide({"a": "x" * 33_000})
        with pytest.raises(TooLarge):
            await sb.decide({"a": "\u20ac" * 6_000})  # each takes six bytes in the journal

    @pytest.mark.parametrize(
        "wrong",
        [
            {},
            [],
            "text",
            {"a": math.nan},
            {"a": math.inf},
            {"a": b"x"},
            {1: "a"},
            {"a": 2**63},
            {"a": "\ud800"},
            {"a": {"\ud800": 1}},
        ],
        ids=repr,
    )
    async def test_what_is_no_json(self, sb: AsyncSandbox, wrong: object) -> None:
        with pytest.raises(BadRequest):
            await sb.decide(wrong)  # type: ignore[arg-type]

    async def test_depth(self, sb: AsyncSandbox) -> None:
        deep: object = 1
        for _ in range(31):
            deep = [deep]
        await sb.decide({"a": deep})  # type: ignore[dict-item]
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(BadRequest, match="nested"):
            await sb.decide({"a": deep})  # type: ignore[dict-item]
