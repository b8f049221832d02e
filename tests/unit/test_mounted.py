"""Which images stay mounted, with two at once and failures at every step; the mounts are numbers here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dsec.errors import RuntimeUnavailable
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.ports.storage import Image
from dsec.runtimes.mounted import MountedImages

pytestmark = pytest.mark.anyio
SPARE = 2


class Machine:
    """What is mounted here and attached there, by the names of files."""

    def __init__(self) -> None:
        self.attached: set[str] = set()
        self.mounted: list[str] = []
        self.open: set[int] = set()
        self.broken = False
        self.held = asyncio.Event()
        self.held.set()
        self.detaching = asyncio.Event()
        self.images = MountedImages(
            mount=self.mount, clone=os.dup, attach=self.attach, detach=self.detach, spare=SPARE
        )

    def mount(self, path: Path) -> int:
        if path.name == "absent":
            raise FileNotFoundError(path)
        self.mounted.append(path.name)
        fd = os.open("/dev/null", os.O_RDONLY)
        self.open.add(fd)
        return fd

    def leaked(self) -> list[int]:
        """Of ours, those that are open still."""
        return [fd for fd in self.open if os.path.exists(f"/proc/self/fd/{fd}")]

    async def attach(self, name: str, fd: int) -> None:
        os.fstat(fd)
        await self.held.wait()
        if self.broken:
            raise RuntimeUnavailable("the spawner ended")
        self.attached.add(name)

    async def detach(self, name: str) -> None:
        self.detaching.set()
        await self.held.wait()
        if self.broken:
            raise RuntimeUnavailable("the spawner ended")
        self.attached.discard(name)

    async def use(self, *names: str) -> SandboxId:
        sandbox = new_sandbox_id()
        await self.images.take(sandbox, [image(name) for name in names])
        assert set(names) <= self.attached
        return sandbox

    async def used(self, *names: str) -> None:
        await self.images.release(await self.use(*names))


@pytest.fixture
async def machine() -> Machine:
    return Machine()


def image(name: str) -> Image:
    return Image(name=name, digest=name, path=Path(name))


async def test_those_used_last_stay(machine: Machine) -> None:
    for name in ("a", "b", "a", "c"):
        await machine.used(name)
    assert machine.attached == {"a", "c"}
    assert machine.mounted == ["a", "b", "c"], "each once"
    await machine.images.close()
    assert machine.leaked() == []


async def test_what_is_used_stays_until_its_last_user_goes(machine: Machine) -> None:
    first, second = await machine.use("base", "layer"), await machine.use("base")
    for name in "abcd":
        await machine.used(name)
    assert machine.attached == {"base", "layer", "c", "d"}
    await machine.images.release(first)
    assert machine.attached == {"base", "d", "layer"}
    await machine.images.release(first)  # twice is once
    for name in "ab":
        await machine.used(name)
    assert machine.attached == {"base", "a", "b"}
    await machine.images.release(second)
    assert machine.attached == {"base", "b"}
    await machine.images.close()


async def test_what_is_needed_while_it_is_detached_is_mounted_again(machine: Machine) -> None:
    for name in "ab":
        await machine.images.ready([image(name)])
    leaving = await machine.use("c")
    machine.detaching.clear()
    machine.held.clear()
    going = asyncio.create_task(machine.images.release(leaving))  # now "a" is one too many
    await machine.detaching.wait()
    coming = asyncio.create_task(machine.use("a"))
    await asyncio.sleep(0)
    machine.held.set()
    await going
    sandbox = await coming
    assert "a" in machine.attached
    assert machine.mounted.count("a") == 2
    await machine.images.release(sandbox)
    await machine.images.close()
    assert machine.leaked() == []


async def test_two_at_once_mount_it_once(machine: Machine) -> None:
    await asyncio.gather(*(machine.use("a") for _ in range(5)))
    assert machine.mounted == ["a"]
    await machine.images.close()


async def test_one_that_is_cancelled_leaves_it_to_the_others_and_loses_nothing(machine: Machine) -> None:
    machine.held.clear()
    first, second = asyncio.create_task(machine.use("a")), asyncio.create_task(machine.use("a"))
    while not machine.mounted:  # noqa: ASYNC110 - it is done in a thread
        await asyncio.sleep(0.001)
    first.cancel()
    machine.held.set()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert machine.mounted == ["a"]
    await machine.images.close()
    assert machine.leaked() == []


async def test_what_cannot_be_attached_is_not_kept(machine: Machine) -> None:
    machine.broken = True
    for _ in range(3):
        sandbox = new_sandbox_id()
        with pytest.raises(RuntimeUnavailable):
            await machine.images.take(sandbox, [image("a")])
        await machine.images.release(sandbox)
    assert machine.leaked() == []
    with pytest.raises(FileNotFoundError):
        await machine.images.ready([image("absent")])
    machine.broken = False
    await machine.used("a")
    await machine.images.close()
    assert machine.leaked() == []


async def test_what_cannot_be_detached_is_let_go_here_and_never_counted_again(machine: Machine) -> None:
    for name in "ab":
        await machine.used(name)
    sandbox = await machine.use("c")
    machine.broken = True
    with pytest.raises(RuntimeUnavailable):
        await machine.images.release(sandbox)
    machine.broken = False
    assert len(machine.leaked()) == SPARE
    again: list[str] = []

    async def attach(name: str, fd: int) -> None:
        os.fstat(fd)
        again.append(name)

    await machine.images.attach_all(attach)  # its successor
    assert again == ["b", "c"]
    await machine.images.close()
    assert machine.leaked() == []
