"""The fakes keep the engine's contract, so that what is tested over them is worth something."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dsec.client.aio import AsyncDsec
from dsec.model.sandbox import Level
from dsec.testing.contracts.engine import EngineContract
from dsec.testing.harness import Harness

pytestmark = pytest.mark.anyio


class TestFake(EngineContract):
    @pytest.fixture
    async def dsec(self) -> AsyncIterator[AsyncDsec]:
        async with Harness(system_clock=True).open() as opened:
            yield opened

    @pytest.fixture
    def level(self) -> Level:
        return Level.CONTAINER
