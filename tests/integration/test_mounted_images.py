"""Images are mounted while somebody uses them, and a few longer: the real spawner, real images, counted from outside."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from dsec.model.files import Identity
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.model.sandbox import Level, Limits
from dsec.ports.runtime import Plan
from dsec.ports.storage import Image, Images
from dsec.runtimes import cgroups
from dsec.runtimes.container import ContainerRuntime, Mounts
from dsec.runtimes.host_paths import HostPaths
from dsec.runtimes.mounted import SPARE
from dsec.runtimes.spawner import SpawnerConfig
from dsec.stores import mounts
from dsec.stores.layers import BtrfsLayers
from dsec.wiring.settings import programs

pytestmark = [pytest.mark.needs_root, pytest.mark.anyio, pytest.mark.timeout(120)]
ROOT = Identity()
LARGE = 8 * 2**20


@dataclass
class Made(Images):
    """Images that a test made, by name."""

    found: dict[str, Image] = field(default_factory=dict)

    async def get(self, name: str) -> Image:
        return self.found[name]

    async def list(self) -> tuple[Image, ...]:
        return tuple(self.found.values())

    def make(self, top: Path, number: int, size: int = 10) -> str:
        """One whose file /number says which it is, again and again."""
        tree, path = top / "tree", top / f"{number}.erofs"
        for part in ("workspace", "tmp", "home/user", "dev/shm", "proc", "root"):
            (tree / part).mkdir(parents=True, exist_ok=True)
        (tree / "number").write_bytes((b"%09d\n" % number) * (size // 10))
        subprocess.run(["mkfs.erofs", "--quiet", path, tree], check=True, capture_output=True)
        name = str(number)
        self.found[name] = Image(name=name, digest=f"sha256:{number:064x}", path=path)
        return name


@dataclass
class Opened:
    """A runtime of level `container` in a directory of its own."""

    top: Path
    images: Made
    durable: bool = False

    async def __aenter__(self) -> ContainerRuntime:
        await to_thread.run_sync(partial(self.top.mkdir, exist_ok=True))
        self.layers = await BtrfsLayers.open(self.top, size_bytes=512 << 20, shelf=0, durable=self.durable)
        self.runtime = await to_thread.run_sync(self._make)
        await self.runtime.start()
        return self.runtime

    async def __aexit__(self, *_: object) -> None:
        await self.runtime.close()
        await self.layers.close()

    def _make(self) -> ContainerRuntime:
        groups = cgroups.prepare(f"dsec-mounted-{os.getpid()}")
        config = SpawnerConfig(
            level=Level.CONTAINER,
            directory=self.top / "c",
            sockets=self.top / "s",
            programs=programs(),
            durable=self.durable,
            cgroups=[group.argument() for group in groups],
        )
        return ContainerRuntime(
            config,
            groups,
            on_ended=lambda _: None,
            images=self.images,
            layers=self.layers,
            mounts=Mounts(mounts.mount_image, mounts.clone_detached),
            volumes=self.layers.volumes,
            host=HostPaths(None),
        )


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Path]:
    """A file system for images alone: it cannot be unmounted while anything has one of them mounted."""
    directory = tmp_path / "images"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "images", directory], check=True)
    yield directory
    subprocess.run(["umount", "-l", directory], check=False, capture_output=True)


def plan(image: str) -> Plan:
    return Plan(id=new_sandbox_id(), level=Level.CONTAINER, limits=Limits(disk_mib=64), image=image)


async def number(runtime: ContainerRuntime, sandbox: SandboxId) -> set[bytes]:
    """What /number says, each thing once."""
    guest = await runtime.connect(sandbox)
    try:
        found = b"".join([piece async for piece in guest.files.read("/number", who=ROOT)])
    finally:
        await guest.close()
    return set(found.split())


def trees(spawner: int) -> list[str]:
    """What is attached there."""
    text = Path(f"/proc/{spawner}/mountinfo").read_text()
    return re.findall(r" /l/(\S+) ", text)


def made_ahead(spawner: int) -> list[str]:
    """The processes that it keeps for sandboxes to come."""
    return Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def unmounts(shelf: Path) -> bool:
    return subprocess.run(["umount", shelf], check=False, capture_output=True).returncode == 0


async def until_unmounted(shelf: Path) -> None:
    """The kernel lets go of a file system some moments after its last user."""
    with anyio.fail_after(20):
        while not await to_thread.run_sync(unmounts, shelf):  # noqa: ASYNC110 - the kernel tells nobody
            await anyio.sleep(0.02)


async def test_more_images_than_are_kept(tmp_path: Path, shelf: Path) -> None:
    """Neither end keeps more than a few; the one in use stays, though it was asked for longest ago; each can be had again."""
    made = Made()
    names = [await to_thread.run_sync(made.make, shelf, one) for one in range(SPARE + 8)]
    async with Opened(tmp_path / "d", made) as runtime:
        held = await runtime.create(plan(names[0]))
        spawner = runtime._spawner.pid
        before = (descriptors(os.getpid()), descriptors(spawner))
        for name in names[1:]:
            sandbox = await runtime.create(plan(name))
            assert await number(runtime, sandbox.id) == {b"%09d" % int(name)}
            await runtime.destroy(sandbox.id)
        attached = trees(spawner)
        assert len(attached) == SPARE + 2, "the spare ones, the one in use, and the writable layers"
        assert f"sha256-{0:064x}" in attached
        assert f"sha256-{1:064x}" not in attached
        assert descriptors(spawner) <= before[1] + 16, "more than what is made ahead"
        assert descriptors(os.getpid()) <= before[0] + SPARE
        for again in (names[1], names[0], names[-1]):
            sandbox = await runtime.create(plan(again))
            assert await number(runtime, sandbox.id) == {b"%09d" % int(again)}
            await runtime.destroy(sandbox.id)
        await runtime.destroy(held.id)
        assert len(trees(spawner)) == SPARE + 1
    await until_unmounted(shelf)


async def test_nothing_holds_what_was_detached(tmp_path: Path, shelf: Path) -> None:
    """Not the engine, not the spawner, nor what that made ahead: the file system goes while all of them go on."""
    made = Made()
    names = [await to_thread.run_sync(made.make, shelf, 0)]
    names += [await to_thread.run_sync(made.make, tmp_path, one) for one in range(1, SPARE + 1)]
    async with Opened(tmp_path / "d", made) as runtime:
        for name in names[:-1]:
            await runtime.destroy((await runtime.create(plan(name))).id)
        assert f"sha256-{0:064x}" in trees(runtime._spawner.pid)
        assert not await to_thread.run_sync(unmounts, shelf), "it is mounted"
        await runtime.destroy((await runtime.create(plan(names[-1]))).id)
        assert f"sha256-{0:064x}" not in trees(runtime._spawner.pid)
        await until_unmounted(shelf)
        assert made_ahead(runtime._spawner.pid)


async def test_a_successor_of_the_spawner_gets_what_is_mounted(tmp_path: Path, shelf: Path) -> None:
    made = Made()
    names = [await to_thread.run_sync(made.make, shelf, one) for one in range(3)]
    async with Opened(tmp_path / "d", made, durable=True) as runtime:
        held = await runtime.create(plan(names[0]))
        spawner = runtime._spawner.pid
        os.kill(spawner, 9)
        with anyio.fail_after(20):
            while runtime._spawner.pid == spawner:  # noqa: ASYNC110 - nobody is told
                await anyio.sleep(0.01)
            await runtime.list()
        assert f"sha256-{0:064x}" in trees(runtime._spawner.pid)
        for name in names:
            sandbox = await runtime.create(plan(name))
            assert await number(runtime, sandbox.id) == {b"%09d" % int(name)}
            await runtime.destroy(sandbox.id)
        await runtime.destroy(held.id)


async def test_a_sandbox_goes_on_when_its_image_is_detached(tmp_path: Path, shelf: Path) -> None:
    """The next engine knows of no image of the earlier one's: it detaches them all. The sandbox holds its own file system, to the end."""
    made, path = Made(), shelf / "7.erofs"
    name = await to_thread.run_sync(partial(made.make, shelf, 7, LARGE))
    async with Opened(tmp_path / "d", made, durable=True) as runtime:
        sandbox = (await runtime.create(plan(name))).id
        assert f"sha256-{7:064x}" in trees(runtime._spawner.pid)
    async with Opened(tmp_path / "d", made, durable=True) as runtime:
        assert [one.id for one in await runtime.list()] == [sandbox]
        assert trees(runtime._spawner.pid) == ["rw"]
        path.unlink()
        assert await number(runtime, sandbox) == {b"%09d" % 7}, "8 MiB that nobody had read"
        assert not await to_thread.run_sync(unmounts, shelf), "the sandbox has it mounted"
        await runtime.destroy(sandbox)
        await until_unmounted(shelf)


async def test_an_image_that_left_the_store_is_looked_up_again(tmp_path: Path, shelf: Path) -> None:
    """What a name means is remembered; a file that was collected meanwhile fails nobody while its name means another."""
    made = Made()
    name = await to_thread.run_sync(made.make, shelf, 1)
    async with Opened(tmp_path / "d", made) as runtime:
        sandbox = await runtime.create(plan(name))
        await runtime.destroy(sandbox.id)
        old = made.found[name]
        await to_thread.run_sync(made.make, shelf, 2)
        old.path.unlink()
        made.found[name] = made.found["2"]
        sandbox = await runtime.create(plan(name))
        assert await number(runtime, sandbox.id) == {b"%09d" % 1}, "it is mounted: the same still"
        await runtime.destroy(sandbox.id)
        await runtime._mounted._unmount(f"sha256-{1:064x}")
        sandbox = await runtime.create(plan(name))
        assert await number(runtime, sandbox.id) == {b"%09d" % 2}
        await runtime.destroy(sandbox.id)


def test_whoever_mounts_an_image_shares_one_file_system(tmp_path: Path) -> None:
    images = Made()
    image = images.found[images.make(tmp_path, 1)]
    first, second = mounts.mount_image(image.path), mounts.mount_image(image.path)
    try:
        assert os.fstat(first).st_dev == os.fstat(second).st_dev
        assert len(_devices_over(image.path)) == 1
    finally:
        os.close(first)
        os.close(second)


def test_many_who_mount_an_image_at_once_share_one_device(tmp_path: Path) -> None:
    images = Made()
    image = images.found[images.make(tmp_path, 1)]
    with ThreadPoolExecutor(8) as threads:
        mounted = list(threads.map(lambda _: mounts.mount_image(image.path), range(32)))
    try:
        assert len({os.fstat(each).st_dev for each in mounted}) == 1
        assert len(_devices_over(image.path)) == 1
    finally:
        for each in mounted:
            os.close(each)


async def test_a_device_goes_with_its_last_mount(tmp_path: Path) -> None:
    images = Made()
    image = images.found[await to_thread.run_sync(images.make, tmp_path, 1)]
    first, second = [await to_thread.run_sync(mounts.mount_image, image.path) for _ in range(2)]
    os.close(first)
    assert len(await to_thread.run_sync(_devices_over, image.path)) == 1
    os.close(second)
    with anyio.fail_after(30):
        while await to_thread.run_sync(_devices_over, image.path):  # noqa: ASYNC110 - the kernel tells nobody
            await anyio.sleep(0.01)


def _devices_over(image: Path) -> list[str]:
    """Loop devices that are over a file, as the kernel names it."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if backing.read_text().strip() == str(image):
                found.append(backing.parts[3])
    return found
