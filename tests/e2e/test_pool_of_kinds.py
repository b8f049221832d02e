"""Ready sandboxes of several kinds, on real ones: claimed once, kept by nobody else, found dead before anybody is told of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec import AsyncDsec, Dsec, Limits, Settings
from dsec.errors import BadRequest, Unsupported
from dsec.model.sandbox import Level
from dsec.node import pool as pools
from dsec.node import reconciler
from dsec.wiring import levels

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]
SMALL, LARGE = Limits(memory_mib=64), Limits(memory_mib=128)


class Seen(pools.Pool):
    """Pools that a test may look into."""

    all: list[Seen] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, places: int, memory: int = pools.MEMORY) -> None:
        super().__init__(places, memory)
        self.all.append(self)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    Seen.all.clear()
    monkeypatch.setattr(levels, "Pool", Seen)
    return Seen.all


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_kinds_and_levels_are_ready_beside_one_another(image_store: Path) -> None:
    with Dsec(settings=Settings(images=image_store, pool=32)) as dsec:
        for _ in range(3):
            for level, limits in ((Level.CONTAINER, SMALL), (Level.CONTAINER, LARGE), (Level.PROCESS, SMALL)):
                with dsec.sandboxes.create(level=level, limits=limits) as sandbox:
                    assert sandbox.exec(["/bin/true"]).ok
        until(lambda: [kind.ready > 0 for kind in dsec.pool.info().kinds] == [True] * 3)
        before = dsec.pool.info()
        for kind in before.kinds:
            dsec.sandboxes.create(level=kind.level, limits=kind.limits).destroy()
        after = dsec.pool.info()
        assert after.hits - before.hits == 3
        assert after.misses == before.misses
        assert 0 < after.memory_bytes <= after.memory_most


@pytest.mark.anyio
async def test_a_hundred_at_once_share_nothing(image_store: Path) -> None:
    async with AsyncDsec(settings=Settings(images=image_store, pool=16)) as dsec:
        assert await dsec.pool.warm("base", 16, limits=SMALL) == 16
        made = await asyncio.gather(*[dsec.sandboxes.create(limits=SMALL) for _ in range(100)])
        assert len({one.id for one in made}) == 100
        assert (await dsec.pool.info()).hits >= 16
        left = await asyncio.gather(*[one.exec("ls /tmp; echo $SESSION_ID > /tmp/mine") for one in made])
        assert {one.stdout for one in left} == {b""}


def test_what_was_asked_for_ahead_is_claimed_and_bounded(image_store: Path) -> None:
    with Dsec(settings=Settings(images=image_store, pool=3)) as dsec:
        assert dsec.pool.warm("base", 3, level="process") == 3
        for _ in range(3):
            dsec.sandboxes.create(level="process").destroy()
        info = dsec.pool.info()
        assert (info.hits, info.misses) == (3, 0)
        with pytest.raises(BadRequest, match="more than the 3"):
            dsec.pool.warm("base", 4)
    with Dsec(settings=Settings(images=image_store, pool=0)) as dsec:
        assert dsec.pool.info().most == 0
        with pytest.raises(Unsupported, match="keeps no sandboxes ready"):
            dsec.pool.warm()


def test_ready_ones_that_are_killed_are_never_handed_out(image_store: Path, seen: list[Seen]) -> None:
    with Dsec(settings=Settings(images=image_store, pool=3)) as dsec:
        assert dsec.pool.warm("base", 3) == 3
        ready = seen[0].stock.all()
        for one in ready:
            os.kill(one.running.pid, signal.SIGKILL)
        until(lambda: dsec.pool.info().wasted == 3)
        for _ in range(3):
            with dsec.sandboxes.create() as sandbox:
                assert sandbox.id not in {one.id for one in ready}
                assert sandbox.exec(["/bin/true"]).ok


def test_what_looks_for_strays_leaves_ready_ones_alone(
    image_store: Path, seen: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their layers are there, and no record is: as with strays."""
    passes = []
    compare = reconciler.Reconciler.compare

    async def counted(self: reconciler.Reconciler) -> None:
        await compare(self)
        passes.append(1)

    monkeypatch.setattr(reconciler, "EVERY", 0.05)
    monkeypatch.setattr(reconciler.Reconciler, "compare", counted)
    with Dsec(settings=Settings(images=image_store, pool=2)) as dsec:
        assert dsec.pool.warm("base", 2) == 2
        ready = {one.id for one in seen[0].stock.all()}
        begun = len(passes)
        until(lambda: len(passes) >= begun + 3)
        assert dsec.pool.info().wasted == 0
        with dsec.sandboxes.create() as sandbox:
            assert sandbox.id in ready
            assert sandbox.exec(["/bin/true"]).ok
