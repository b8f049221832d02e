"""What a build runs, over services that only pretend: its time, its end, and what it asks of the image's own links."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from dsec.control import building
from dsec.control.building import SECONDS, Builder, Step
from dsec.errors import BadRequest, BuildFailed
from dsec.images.tools import Check
from dsec.model.execs import ExecRequest, ExecResult
from dsec.model.ids import ExecId, SandboxId
from dsec.model.sandbox import SandboxSpec
from dsec.ports.engine import Workplace

pytestmark = pytest.mark.anyio
STEPS = tuple(Step(field=f"runtime.setup[{number}]", argv=("true",)) for number in range(3))


@dataclass
class Place:
    """Sandboxes, commands and changes at once. ``takes``: seconds of each command. ``status``: of each program."""

    upper: Path
    takes: float = 0.0
    status: dict[bytes, int] = field(default_factory=dict)
    now: float = 1000.0
    alive: set[SandboxId] = field(default_factory=set)
    timeouts: list[float] = field(default_factory=list)
    hang: bool = False
    on_run: Callable[[], None] = lambda: None

    async def create(self, spec: SandboxSpec) -> Any:
        self.alive.add(SandboxId("sb"))
        return cast("Any", type("Info", (), {"id": SandboxId("sb")}))

    async def destroy(self, sandbox: SandboxId, *, reason: str) -> None:
        await asyncio.sleep(0)
        self.alive.discard(sandbox)

    async def run(self, sandbox: SandboxId, request: ExecRequest) -> ExecResult:
        self.timeouts.append(request.timeout or 0.0)
        self.on_run()
        if self.hang:
            await anyio.sleep(600)
        late = self.takes > (request.timeout or 0.0)
        self.now += min(self.takes, request.timeout or 0.0)
        code = self.status.get(request.argv[0], 0)
        return ExecResult(
            id=ExecId("x"), exit_code=137 if late else code, stdout=b"", stderr=b"", timed_out=late
        )

    @asynccontextmanager
    async def changes(self, of: SandboxId) -> AsyncIterator[Path]:
        yield self.upper

    @property
    def builder(self) -> Builder:
        us = cast("Any", self)
        place = Workplace(sandboxes=us, execs=us, snapshots=us, changes=us, arrivals=us)
        return Builder(place, clock=lambda: self.now)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "upper").mkdir()
    return Place(tmp_path / "upper")


async def test_all_steps_have_one_deadline(place: Place, tree: Path) -> None:
    place.takes = 100.0
    await place.builder.run(SandboxSpec(), STEPS, tree, latest=0)
    assert place.timeouts == [SECONDS, SECONDS - 100, SECONDS - 200]


@pytest.mark.parametrize("takes", [SECONDS / 2, SECONDS / 2 + 1])
async def test_a_build_that_takes_too_long_fails_by_name(place: Place, tree: Path, takes: float) -> None:
    """No time is left for a step; a step takes longer than what is left."""
    place.takes = takes
    with pytest.raises(BuildFailed, match=rf"runtime.setup\[{2 if takes == SECONDS / 2 else 1}\].*1800 s"):
        await place.builder.run(SandboxSpec(), STEPS, tree, latest=0)
    assert not place.alive
    assert place.now == 1000 + SECONDS


async def test_a_working_directory_is_looked_for_inside(place: Place, tree: Path) -> None:
    await place.builder.run(SandboxSpec(), STEPS[:1], tree, latest=0, workdir="/app")
    place.status[b"/bin/sh"] = 2
    with pytest.raises(BadRequest, match=r"runtime\.workdir"):
        await place.builder.run(SandboxSpec(), STEPS[:1], tree, latest=0, workdir="/app")
    place.status.clear()
    with pytest.raises(BadRequest, match=r"runtime\.workdir"):
        await place.builder.run(SandboxSpec(), STEPS[:1], tree, latest=0, workdir="/tmp/app")


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_build_that_is_cancelled_ends_its_sandbox(place: Place, tree: Path, how: str) -> None:
    place.hang = True
    running = asyncio.Event()
    place.on_run = running.set
    if how == "task":
        task = asyncio.create_task(place.builder.run(SandboxSpec(), STEPS, tree, latest=0))
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: place.builder.run(SandboxSpec(), STEPS, tree, latest=0))
            await running.wait()
            group.cancel_scope.cancel()
    assert not place.alive
    assert len(place.timeouts) == 1


async def test_what_a_build_wrote_is_not_copied_on_when_nobody_waits(
    place: Place, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def slow(source: Path, target: Path, *, check: Check, **_: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        try:
            while True:
                check()
        finally:
            ended.append(True)

    monkeypatch.setattr(building, "copy_layer", slow)
    task = asyncio.create_task(place.builder.run(SandboxSpec(), STEPS, tree, latest=0))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
    assert not place.alive


async def test_what_a_build_wrote_has_the_date_of_the_base_also_when_that_is_in_the_future(
    place: Place, tmp_path: Path
) -> None:
    """2100: what is written now is older than the base, and would keep the time of the build."""
    future = 4_102_444_800 * 10**9
    (place.upper / "made").write_text("made")
    (place.upper / "old").write_text("old")
    os.utime(place.upper / "old", ns=(10**9, 10**9))
    (tmp_path / "tree").mkdir()
    await place.builder.run(SandboxSpec(), STEPS, tmp_path / "tree", latest=future)
    assert (tmp_path / "tree/made").stat().st_mtime_ns == future
    assert (tmp_path / "tree/old").stat().st_mtime_ns == 10**9
