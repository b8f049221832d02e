"""A shared server as it is really put together: ports by real keys and tokens, and the figures that it tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsec.wiring.serving import Place, Running, serving
from dsec.wiring.settings import Settings
from dsec.wiring.tenants import shared

pytestmark = pytest.mark.needs_root


@dataclass
class World:
    """A server, its owner, and everybody else."""

    running: Running
    owner: aiohttp.ClientSession
    others: aiohttp.ClientSession

    async def key(self, project: str) -> str:
        body = {"scope": "developer", "project": project}
        async with self.owner.post("http://dsec/v1/keys", json=body) as answer:
            return str((await answer.json())["key"])

    async def ask(self, method: str, path: str, key: str = "", **given: Any) -> tuple[int, Any]:
        headers = {**given.pop("headers", {}), **({"authorization": f"Bearer {key}"} if key else {})}
        async with self.others.request(
            method, self.running.url + path, headers=headers, allow_redirects=False, **given
        ) as answer:
            return (
                answer.status,
                await answer.json() if "json" in answer.content_type else await answer.read(),
            )


@asynccontextmanager
async def opened(home: Path, image_store: Path) -> AsyncIterator[World]:
    settings = Settings(home=home, images=image_store, pool=0)
    async with serving(Place(home=home, port=0), settings, compose=shared) as running:
        connector = aiohttp.UnixConnector(path=str(running.socket))
        async with aiohttp.ClientSession(connector=connector) as owner, aiohttp.ClientSession() as others:
            yield World(running, owner, others)


def test_ports_by_keys_and_tokens_and_what_is_counted(tmp_path: Path, image_store: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, image_store) as world:
            await use(world)

    asyncio.run(run())  # opening a home makes directories, once: no guard against that here


async def use(world: World) -> None:
    ours, theirs = await world.key("ours"), await world.key("theirs")
    status, made = await world.ask("POST", "/v1/sandboxes", ours, json={"level": "container"})
    assert status == 201
    sandbox = f"/v1/sandboxes/{made['id']}"
    body = {"argv": ["python3", "-m", "http.server", "8000"], "wait": False}
    assert (await world.ask("POST", f"{sandbox}/execs", ours, json=body))[0] == 201
    token = (await world.ask("POST", f"{sandbox}/token", ours))[1]["key"]
    port = f"{sandbox}/ports/8000/"
    async with asyncio.timeout(30):
        while (await world.ask("GET", port, ours))[0] != 200:  # noqa: ASYNC110 - a program inside tells nobody that it listens
            await asyncio.sleep(0.05)
    assert (await world.ask("GET", f"{port}?dsec_token={token}"))[0] == 200
    assert (await world.ask("GET", port, theirs))[0] == 404
    assert (await world.ask("GET", f"{port}?dsec_token={ours}"))[0] == 401
    host = f"8000-{made['id']}.localhost:{world.running.url.rpartition(':')[2]}"
    assert (await world.ask("GET", f"/?dsec_token={token}", headers={"host": host}))[0] == 303
    assert (await world.ask("GET", "/", headers={"host": host, "cookie": f"dsec_token={token}"}))[0] == 200
    status, record = await world.ask("POST", f"{sandbox}/decisions", token, json={"plan": "look"})
    assert (status, record["actor"].startswith("ky-")) == (201, True)
    assert (await world.ask("DELETE", sandbox, ours))[0] == 204
    assert (await world.ask("GET", f"{port}?dsec_token={token}"))[0] == 401  # it ended with its sandbox
    assert (await world.ask("GET", "/metrics", ours))[0] == 403
    async with world.owner.get("http://dsec/metrics") as answer:
        lines = (await answer.text()).splitlines()
    for line in (
        'dsec_acts_total{act="sandbox.create",outcome="ok"} 1.0',
        'dsec_acts_total{act="port.connect",outcome="ok"} 1.0',
        'dsec_acts_total{act="decision",outcome="ok"} 1.0',
        'dsec_sandboxes{state="gone"} 1.0',
        "dsec_queue_admitted_total 1.0",
        "dsec_scrape_failures_total 0.0",
    ):
        assert line in lines, line
