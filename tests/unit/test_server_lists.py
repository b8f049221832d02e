"""Lists over HTTP: what is in memory for one answer is bounded by bytes, and nothing is lost by that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dsec.client.aio import AsyncDsec
from dsec.errors import TooLarge
from dsec.model.sandbox import SandboxSpec
from dsec.server import pages
from dsec.stores.sandbox_codec import MAX_SPEC, spec_to_json
from dsec.testing.asking import KEY, World, opened
from dsec.wiring.servers import server

pytestmark = pytest.mark.anyio
LARGE = {"A": "x" * 2000}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with opened() as made:
        yield made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_BYTES", 4000)
    monkeypatch.setattr(pages, "_LEAST_PART", 2)
    monkeypatch.setattr(pages, "_LITTLE", 0)


async def all_of(world: World, path: str, name: str) -> tuple[list[Any], int]:
    """All items, and how many answers they came in."""
    found: list[Any] = []
    cursor, answers = "", 0
    while True:
        status, said = await world.ask("GET", f"{path}?limit=1000" + (f"&{name}={cursor}" if cursor else ""))
        assert status == 200, said
        found += said["items"]
        answers, cursor = answers + 1, said["next"]
        if not cursor:
            return found, answers


async def test_large_sandboxes_are_listed_few_at_a_time(world: World, small: None) -> None:
    made = [(await world.ask("POST", "/v1/sandboxes", {"env": LARGE}))[1]["id"] for _ in range(9)]
    found, answers = await all_of(world, "/v1/sandboxes", "cursor")
    assert [each["id"] for each in found] == made
    assert answers == 5
    status, said = await world.ask("GET", "/v1/sandboxes?limit=3")
    assert (status, len(said["items"]), bool(said["next"])) == (200, 2, True)


async def test_small_ones_come_in_one_answer(world: World) -> None:
    made = [(await world.ask("POST", "/v1/sandboxes", {}))[1]["id"] for _ in range(40)]
    assert ([each["id"] for each in (await all_of(world, "/v1/sandboxes", "cursor"))[0]]) == made
    status, said = await world.ask("GET", "/v1/sandboxes?limit=39")
    assert (status, len(said["items"]), bool(said["next"])) == (200, 39, True)
    assert (await all_of(world, "/v1/sandboxes", "cursor"))[1] == 1


async def test_large_records_too_and_the_sdk_has_all_that_it_asked_for(world: World, small: None) -> None:
    sandbox = await world.sandbox()
    for number in range(7):
        await world.ask("POST", f"{sandbox}/decisions", {"n": number, "why": "x" * 2000})
    found, answers = await all_of(world, f"{sandbox}/events", "after")
    decisions = [each["payload"]["n"] for each in found if each["act"] == "decision"]
    assert decisions == list(range(7))
    assert answers > 1
    async with AsyncDsec(server(world.url(""), KEY)) as dsec:
        box = await dsec.sandboxes.get(sandbox.rpartition("/")[2])
        assert [record.seq for record in await box.events()] == [each["seq"] for each in found]
        assert len(await box.events(limit=5)) == 5


def test_no_specification_is_larger_than_what_a_command_could_be_given() -> None:
    spec_to_json(SandboxSpec(env={"A": "x" * 190_000}))
    with pytest.raises(TooLarge):
        spec_to_json(SandboxSpec(env={"A": "x" * MAX_SPEC}))
