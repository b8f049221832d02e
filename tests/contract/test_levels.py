"""Every isolation level keeps the contract of levels."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dsec import AsyncDsec
from dsec.model.sandbox import Level
from dsec.testing.contracts.runtime import RuntimeContract

pytestmark = pytest.mark.anyio


class OverPrivateEngine(RuntimeContract):
    """Each test has an engine of its own."""

    @pytest.fixture
    async def dsec(self) -> AsyncIterator[AsyncDsec]:
        async with AsyncDsec() as opened:
            yield opened


@pytest.mark.needs_root
class TestContainer(OverPrivateEngine):
    @pytest.fixture
    def level(self) -> Level:
        return Level.CONTAINER


class TestProcess(OverPrivateEngine):
    @pytest.fixture
    def level(self) -> Level:
        return Level.PROCESS
