"""A client of a server keeps the contract of engines: over the fakes, by HTTP and by a unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.client.aio import AsyncDsec
from dsec.model.sandbox import Level
from dsec.testing.contracts.engine import EngineContract
from dsec.testing.harness import Harness
from dsec.testing.serving import KEY, served
from dsec.wiring.servers import server

pytestmark = pytest.mark.anyio


class OverServer(EngineContract):
    @pytest.fixture
    def level(self) -> Level:
        return Level.CONTAINER

    @pytest.fixture
    async def dsec(self, url: str) -> AsyncIterator[AsyncDsec]:
        async with AsyncDsec(server(url, KEY)) as opened:
            yield opened


class TestHttp(OverServer):
    @pytest.fixture
    def url(self) -> Iterator[str]:
        with served(Harness(system_clock=True).connect) as url:
            yield url


class TestUnixSocket(OverServer):
    @pytest.fixture
    def url(self, tmp_path: Path) -> Iterator[str]:
        with served(Harness(system_clock=True).connect, tmp_path / "s") as url:
            yield url
