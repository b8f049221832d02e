"""A durable engine in this process keeps the contract: one home, which is opened again for every test and remembers all that came before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncDsec, Settings
from dsec.model.sandbox import Level
from dsec.testing.contracts.engine import EngineContract
from dsec.testing.databases import NewDatabase

pytestmark = pytest.mark.anyio
POOL_BYTES = 256 * 2**20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("h") / "home"


@pytest.fixture(scope="module")
def settings(new_database: NewDatabase) -> Iterator[Settings]:
    with new_database() as url:
        yield Settings(pool=0, shelf=0, pool_bytes=POOL_BYTES, database=url)


class TestProcess(EngineContract):
    @pytest.fixture
    def level(self) -> Level:
        return Level.PROCESS

    @pytest.fixture
    async def dsec(self, home: Path, settings: Settings) -> AsyncIterator[AsyncDsec]:
        async with AsyncDsec(home, settings=settings) as opened:
            yield opened
