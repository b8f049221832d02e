"""Every level keeps its contract behind a server too: real sandboxes, by HTTP and by a unix socket, and behind a durable engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from dsec.client.aio import AsyncDsec
from dsec.model.sandbox import Level
from dsec.testing.contracts.runtime import RuntimeContract
from dsec.testing.databases import NewDatabase
from dsec.testing.serving import KEY, served
from dsec.wiring.engines import open_engine
from dsec.wiring.servers import server
from dsec.wiring.settings import Settings

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def private_url() -> Iterator[str]:
    with served(partial(open_engine, Settings(pool=0, shelf=2))) as url:
        yield url


@pytest.fixture(scope="module")
def durable_url(tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[str]:
    home = tmp_path_factory.mktemp("h")
    with new_database() as database:
        settings = Settings(home=home / "engine", pool=0, shelf=2, database=database)
        with served(partial(open_engine, settings), home / "s") as url:
            yield url


class OverServer(RuntimeContract):
    """All tests of a class have one server."""

    @pytest.fixture
    async def dsec(self, url: str) -> AsyncIterator[AsyncDsec]:
        async with AsyncDsec(server(url, KEY)) as opened:
            yield opened


@pytest.mark.needs_root
class TestContainerOverHttp(OverServer):
    @pytest.fixture
    def level(self) -> Level:
        return Level.CONTAINER

    @pytest.fixture
    def url(self, private_url: str) -> str:
        return private_url


class TestProcessOverUnixSocket(OverServer):
    """Behind it is a durable engine."""

    @pytest.fixture
    def level(self) -> Level:
        return Level.PROCESS

    @pytest.fixture
    def url(self, durable_url: str) -> str:
        return durable_url
