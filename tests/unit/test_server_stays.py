"""A key that ends, ends what was asked with it: streams are told why, and nothing of them goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from dsec.server import stays
from dsec.server.stays import GRACE_SECONDS, LOOK_SECONDS
from dsec.testing.asking import KEY, TwoKeys, World, opened
from dsec.testing.harness import until

pytestmark = pytest.mark.anyio

BOUND = 2.0  # seconds from the end of a key to the end of what was asked with it, by the numbers
PATIENT = 10.0  # seconds, on any machine
MINE = {"x-api-key": KEY + "d"}
OTHER = {"x-api-key": KEY + "p"}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stays, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(stays, "GRACE_SECONDS", 0.1)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with opened() as made:
        yield made


async def command(world: World) -> str:
    """The URL of one that does not end."""
    sandbox = await world.sandbox()
    _, said = await world.ask("POST", f"{sandbox}/execs", {"argv": ["sleep", "inf"], "wait": False})
    return world.url(f"{sandbox}/execs/{said['id']}")


def end_keys(world: World, *keys: str) -> None:
    gate = world.app.state.gate
    assert isinstance(gate, TwoKeys)
    gate.ended.update(keys)


def test_the_bound_is_kept_by_the_numbers() -> None:
    assert LOOK_SECONDS + GRACE_SECONDS < BOUND


async def test_events_end_with_the_reason(world: World) -> None:
    one = await command(world)
    async with (
        world.client.get(f"{one}/output", headers=MINE) as answer,
        world.client.get(f"{one}/output", headers=OTHER) as others,
    ):
        await answer.content.readline()
        await others.content.readline()
        end_keys(world, "ky-d")
        async with asyncio.timeout(PATIENT):
            told = (await answer.read()).decode()
        assert "event: error\n" in told
        assert json.loads(told.split("data: ")[1])["error"]["code"] == "unauthenticated"
        assert not others.content.at_eof(), "of another key: it goes on"
        assert len(world.app.door.stays) == 1


async def test_a_terminal_ends_with_the_reason(world: World) -> None:
    one = await command(world)
    async with world.client.ws_connect(f"{one}/attach", headers=MINE) as socket:
        end_keys(world, "ky-d")
        async with asyncio.timeout(PATIENT):
            said = await socket.receive_bytes()
            await socket.receive()
        assert said[:1] == b"\3"
        assert json.loads(said[1:])["error"]["code"] == "unauthenticated"
        assert socket.close_code == 1008
    await until(lambda: not len(world.app.door.stays))


async def test_long_waits_end(world: World) -> None:
    """One returns as if its time were up, one that waits for its command is answered; the command of that one is killed, as when a client leaves."""
    one = await command(world)
    sandbox = one.split("/execs/")[0]
    waiting = asyncio.ensure_future(world.client.get(f"{one}/result?timeout=60", headers=MINE))
    running = asyncio.ensure_future(
        world.client.post(f"{sandbox}/execs", json={"argv": ["sleep", "inf"]}, headers=MINE)
    )
    runs = world.harness.engine.kit.table
    await until(lambda: world.app.door.running == 2)
    await until(lambda: sum(len(handle.runs) for handle in runs) == 2)
    end_keys(world, "ky-d")
    async with asyncio.timeout(PATIENT):
        assert (await waiting).status == 202
        answer = await running
    assert (answer.status, (await answer.json())["error"]["code"]) == (401, "unauthenticated")
    await until(lambda: sum(len(handle.runs) for handle in runs) == 1)


async def test_what_does_not_listen_is_cut(world: World) -> None:
    """A body that comes for ever: no answer has begun, so there is one."""
    sandbox = await world.sandbox()

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    sending = asyncio.ensure_future(
        world.client.put(world.url(f"{sandbox}/files/content?path=a"), data=body(), headers=MINE)
    )
    await until(lambda: world.app.door.running == 1)
    end_keys(world, "ky-d")
    async with asyncio.timeout(PATIENT):
        try:
            assert (await sending).status == 401
        except aiohttp.ClientError:
            assert world.app.door.running == 0
    await until(lambda: not world.app.door.running)


async def test_a_gate_that_cannot_tell_ends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await command(world)
    gate, asked = world.app.state.gate, asyncio.Event()

    async def broken(_: object) -> None:
        asked.set()
        raise OSError("no database")

    monkeypatch.setattr(gate, "check", broken)
    async with world.client.get(f"{one}/output", headers=MINE) as answer:
        async with asyncio.timeout(PATIENT):
            await asked.wait()
        monkeypatch.undo()
        end_keys(world, "ky-d")
        async with asyncio.timeout(PATIENT):
            assert b"unauthenticated" in await answer.read(), "it is asked again"
