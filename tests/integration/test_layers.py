"""Layers on a real btrfs pool: quotas that hold, nothing carried over, nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from anyio.lowlevel import checkpoint

from dsec.errors import BadRequest, Conflict, NotFound, StorageFull, StoreDamaged
from dsec.model.ids import new_sandbox_id, new_snapshot_id
from dsec.stores.layers import BtrfsLayers
from dsec.stores.pool import open_pool

pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]

MIB = 2**20
SIZE = 512 * MIB


@pytest.fixture
async def layers(tmp_path: Path) -> AsyncIterator[BtrfsLayers]:
    opened = await BtrfsLayers.open(tmp_path, size_bytes=SIZE, shelf=2, durable=False)
    yield opened
    await opened.close()


def inside(layers: BtrfsLayers, path: Path, part: str = "upper") -> Path:
    """A path that leads into a layer although its mount is attached nowhere."""
    return Path(f"/proc/self/fd/{layers.root_fd()}") / path / part


async def settled(check: Callable[[], bool], seconds: float = 10.0) -> bool:
    """True as soon as ``check`` is."""
    end = time.monotonic() + seconds
    while not await to_thread.run_sync(check):
        if time.monotonic() > end:
            return False
        await anyio.sleep(0.01)
    return True


def is_empty(directory: Path) -> bool:
    try:
        return not os.listdir(directory)
    except FileNotFoundError:
        return False  # it is being made anew


def fill(directory: Path, size: int) -> tuple[int, int]:
    """Write up to ``size`` bytes; (bytes written, errno that ended it or 0)."""
    written = 0
    with (directory / "big").open("wb", buffering=0) as file:
        try:
            while written < size:
                written += file.write(bytes(256 * 1024))
            os.fsync(file.fileno())
        except OSError as error:
            return written, error.errno or -1
    return written, 0


def many(directory: Path, count: int) -> tuple[int, int]:
    """Make empty files; (how many, errno that ended it or 0)."""
    for number in range(count):
        try:
            (directory / f"f{number}").touch()
        except OSError as error:
            return number, error.errno or -1
    return count, 0


async def test_a_layer_is_empty_and_belongs_to_root(layers: BtrfsLayers) -> None:
    path = await layers.create(new_sandbox_id(), 64)

    def look() -> list[tuple[int, int, int, list[str]]]:
        found = []
        for part in ("upper", "work"):
            info = inside(layers, path, part).stat()
            found.append(
                (info.st_uid, info.st_gid, info.st_mode & 0o7777, os.listdir(inside(layers, path, part)))
            )
        return found

    assert await to_thread.run_sync(look) == [(0, 0, 0o755, [])] * 2


async def test_the_mount_shows_nowhere_and_is_nosuid_nodev(layers: BtrfsLayers) -> None:
    def look() -> tuple[str, int]:
        return Path("/proc/self/mountinfo").read_text(), os.fstatvfs(layers.root_fd()).f_flag

    table, flags = await to_thread.run_sync(look)
    assert layers._pool.device not in table
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV


async def test_bytes_over_the_quota_are_refused_and_others_go_on(layers: BtrfsLayers) -> None:
    full, other = new_sandbox_id(), new_sandbox_id()
    first, second = await layers.create(full, 32), await layers.create(other, 64)
    written, code = await to_thread.run_sync(fill, inside(layers, first), 200 * MIB)
    assert code in (errno.EDQUOT, errno.ENOSPC)
    assert 24 * MIB <= written <= 32 * MIB
    assert await layers.used(full) <= 32 * MIB
    # Positive control: the same bytes fit where the quota is larger.
    assert await to_thread.run_sync(fill, inside(layers, second), 40 * MIB) == (40 * MIB, 0)


async def test_empty_files_count_against_the_quota(layers: BtrfsLayers) -> None:
    sandbox, other = new_sandbox_id(), new_sandbox_id()
    path, second = await layers.create(sandbox, 2), await layers.create(other, 64)
    made, code = await to_thread.run_sync(many, inside(layers, path), 20_000)
    assert code in (errno.EDQUOT, errno.ENOSPC)
    assert made > 500
    assert await layers.used(sandbox) <= 2 * MIB
    # Positive control: where the quota is larger, more files than that can be made.
    assert await to_thread.run_sync(many, inside(layers, second), made + 1000) == (made + 1000, 0)


async def test_nothing_is_carried_over_to_the_next_sandbox(layers: BtrfsLayers) -> None:
    def soil(path: Path) -> None:
        upper = inside(layers, path)
        (upper / "deep/er").mkdir(parents=True)
        (upper / "deep/er/secret").write_text("secret")
        (upper / "link").symlink_to("/etc/passwd")
        os.mkfifo(upper / "fifo")
        os.setxattr(upper, "trusted.overlay.opaque", b"y")
        os.chmod(upper, 0o2777)
        os.chown(upper, 1000, 1000)
        (inside(layers, path, "work") / "work").mkdir()

    def clean(path: Path) -> None:
        upper = inside(layers, path)
        info = upper.stat()
        assert os.listdir(upper) == []
        assert os.listdir(inside(layers, path, "work")) == []
        assert os.listxattr(upper) == []
        assert (info.st_mode & 0o7777, info.st_uid, info.st_gid) == (0o755, 0, 0)

    used: list[Path] = []
    for _ in range(12):
        sandbox = new_sandbox_id()
        path = await layers.create(sandbox, 64)
        used.append(path)
        await to_thread.run_sync(clean, path)
        await to_thread.run_sync(soil, path)
        await layers.discard(sandbox)
        await settled(lambda: len(layers._shelf) >= 2)
    assert len(set(used)) < len(used)  # slots were used again, or this test would show nothing


@pytest.mark.parametrize("touch", ["nothing", "mode", "xattr", "file that is gone", "deep"])
async def test_a_layer_that_was_touched_is_made_anew(tmp_path: Path, touch: str) -> None:
    def use(upper: Path) -> int:
        """As the overlay and a sandbox would; the directory's inode."""
        (upper.parent / "work" / "work" / "incompat" / "volatile").mkdir(parents=True)
        (upper.parent / "work" / "work" / "incompat" / "volatile" / "dirty").touch()
        match touch:
            case "mode":
                upper.chmod(0o777)
                upper.chmod(0o755)
            case "xattr":
                os.setxattr(upper, "trusted.overlay.opaque", b"y")
            case "file that is gone":
                (upper / "f").touch()
                (upper / "f").unlink()
                os.utime(upper, ns=(0, 0))
            case "deep":
                (upper / "a" / "b").mkdir(parents=True)
        return upper.stat().st_ino

    opened = await BtrfsLayers.open(tmp_path, size_bytes=SIZE, shelf=1, durable=False)
    try:
        await anyio.sleep(0.15)  # on a slot that is given out at once change times tell nothing
        sandbox = new_sandbox_id()
        path = await opened.create(sandbox, 1024)
        before = await to_thread.run_sync(use, inside(opened, path))
        await opened.discard(sandbox)
        # The mark of an overlay is left where nothing was written: the next one's mount takes it away.
        assert touch == "nothing" or await settled(lambda: is_empty(inside(opened, path, "work")))
        upper = inside(opened, path)
        state = await to_thread.run_sync(
            lambda: (
                upper.stat().st_ino == before,
                os.listdir(upper),
                os.listxattr(upper),
                upper.stat().st_mode & 0o7777,
            )
        )
        assert state == (touch == "nothing", [], [], 0o755)
    finally:
        await opened.close()


async def test_a_full_layer_is_destroyed_and_its_space_comes_back(layers: BtrfsLayers) -> None:
    def free() -> int:
        info = os.fstatvfs(layers.root_fd())
        return info.f_bavail * info.f_frsize

    before = await to_thread.run_sync(free)
    for _ in range(3):
        sandbox = new_sandbox_id()
        path = await layers.create(sandbox, 200)
        assert await to_thread.run_sync(fill, inside(layers, path), 150 * MIB) == (150 * MIB, 0)
        await layers.discard(sandbox)
        assert await settled(lambda: free() >= before - 32 * MIB)
    assert layers.stuck() == 0


async def test_a_quota_is_that_of_this_sandbox_whatever_the_slot_had(layers: BtrfsLayers) -> None:
    for quota in (64, 16, 96, 16):
        sandbox = new_sandbox_id()
        path = await layers.create(sandbox, quota)
        written, code = await to_thread.run_sync(fill, inside(layers, path), (quota + 8) * MIB)
        assert code in (errno.EDQUOT, errno.ENOSPC)
        assert (quota - 4) * MIB <= written <= quota * MIB
        await layers.discard(sandbox)


async def test_twice_is_a_conflict_and_absent_is_no_error(layers: BtrfsLayers) -> None:
    sandbox = new_sandbox_id()
    await layers.create(sandbox, 64)
    with pytest.raises(Conflict):
        await layers.create(sandbox, 64)
    assert await layers.list() == (sandbox,)
    await layers.discard(sandbox)
    await layers.discard(sandbox)
    assert await layers.list() == ()
    with pytest.raises(NotFound):
        await layers.used(sandbox)


async def test_a_hundred_at_once_are_a_hundred_slots(layers: BtrfsLayers) -> None:
    paths: list[Path] = []

    async def one() -> None:
        sandbox = new_sandbox_id()
        paths.append(await layers.create(sandbox, 64))

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(one)
    assert len(set(paths)) == 100
    for sandbox in await layers.list():
        await layers.discard(sandbox)
    assert await settled(lambda: len(layers._shelf) >= 100)


async def test_a_cancelled_create_leaves_no_layer(layers: BtrfsLayers) -> None:
    for _ in range(20):
        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(layers.create, new_sandbox_id(), 8)
            await checkpoint()
            group.cancel_scope.cancel()
    for sandbox in await layers.list():  # those that were ready before they were cancelled
        await layers.discard(sandbox)
    made = layers._next

    def all_back() -> bool:
        here = [name for name in os.listdir(f"/proc/self/fd/{layers.root_fd()}") if name.startswith("slot-")]
        return len(here) == len(layers._shelf)

    assert made >= 2
    assert await settled(all_back)


async def test_a_full_pool_is_told_and_recovers(tmp_path: Path) -> None:
    layers = await BtrfsLayers.open(tmp_path, size_bytes=256 * MIB, shelf=0, durable=False)
    try:
        greedy = new_sandbox_id()
        path = await layers.create(greedy, 1024)
        _, code = await to_thread.run_sync(fill, inside(layers, path), 300 * MIB)
        assert code in (errno.ENOSPC, errno.EDQUOT)
        with pytest.raises(StorageFull) as caught:
            await layers.create(new_sandbox_id(), 64)
        assert caught.value.retryable
        await layers.discard(greedy)
        with anyio.fail_after(20):
            while True:
                try:
                    await layers.create(new_sandbox_id(), 64)
                    break
                except StorageFull:
                    await anyio.sleep(0.05)
    finally:
        await layers.close()


@pytest.mark.parametrize("durable", [False, True], ids=["private", "durable"])
async def test_new_layers_are_refused_before_those_in_use_meet_the_end_of_the_pool(
    tmp_path: Path, durable: bool
) -> None:
    """At once, also while what was written is in memory only; who has a layer goes on writing into the reserve."""
    layers = await BtrfsLayers.open(tmp_path, size_bytes=512 * MIB, shelf=4, durable=durable)
    try:
        running = new_sandbox_id()
        path = await layers.create(running, 1024)
        await layers.create(new_sandbox_id(), 1024)  # quotas may add up to more
        with (inside(layers, path) / "big").open("wb", buffering=0) as file:
            for _ in range(460):
                file.write(bytes(MIB))
            for _ in range(6):  # as many as there are on the shelf, and more
                with pytest.raises(StorageFull) as caught:
                    await layers.create(new_sandbox_id(), 32)
            with pytest.raises(StorageFull):
                await layers.clone(running, new_sandbox_id(), 32)
            facts = caught.value.facts
            assert facts["asked"] == 32 * MIB
            assert int(str(facts["free"])) < int(str(facts["reserve"])) == 64 * MIB
            for _ in range(16):
                file.write(bytes(MIB))
            os.fsync(file.fileno())
        assert len(await layers.list()) == 2
        await layers.discard(running)
        with anyio.fail_after(30):
            while True:
                with contextlib.suppress(StorageFull):
                    await layers.create(new_sandbox_id(), 32)
                    break
                await anyio.sleep(0.05)
    finally:
        await layers.close()


async def test_going_back_needs_no_room_that_is_free(tmp_path: Path) -> None:
    """Or a sandbox that filled the pool could not be undone, and would be lost in the attempt."""
    layers = await BtrfsLayers.open(tmp_path, size_bytes=256 * MIB, shelf=0, durable=False)
    try:
        running, snapshot = new_sandbox_id(), new_snapshot_id()
        path = await layers.create(running, 1024)
        await layers.snapshots.take(running, snapshot)
        with (inside(layers, path) / "big").open("wb", buffering=0) as file:
            for _ in range(190):
                file.write(bytes(MIB))
        await layers.discard(running)
        assert is_empty(inside(layers, await layers.clone(snapshot, running, 1024)))
    finally:
        await layers.close()


async def test_closing_a_private_pool_leaves_no_device_and_no_file(tmp_path: Path) -> None:
    layers = await BtrfsLayers.open(tmp_path, size_bytes=SIZE, durable=False)
    await layers.create(new_sandbox_id(), 64)
    device = Path("/sys/block", Path(layers._pool.device).name, "loop/backing_file")
    assert await to_thread.run_sync(device.exists)
    assert await to_thread.run_sync(os.listdir, tmp_path) == []
    await layers.close()
    await layers.close()
    assert not await to_thread.run_sync(device.exists)
    with pytest.raises(Conflict):
        await layers.create(new_sandbox_id(), 64)


KILLED = """
import asyncio, sys, time
from pathlib import Path
from dsec.model.ids import new_sandbox_id
from dsec.stores.layers import BtrfsLayers

async def main():
    layers = await BtrfsLayers.open(Path(sys.argv[1]), size_bytes=512 * 2**20, durable=sys.argv[2] == "durable")
    sandbox = new_sandbox_id()
    path = await layers.create(sandbox, 64)
    Path(f"/proc/self/fd/{layers.root_fd()}", path, "upper/kept").write_text("kept")
    print(layers._pool.device, sandbox, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def run_and_kill(state: Path, kind: str) -> tuple[Path, str]:
    """A process that opens a pool and dies by SIGKILL; (sysfs file of its device, its sandbox)."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, os.fspath(state), kind], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        device, sandbox = process.stdout.readline().split()
        process.send_signal(signal.SIGKILL)
    return Path("/sys/block", Path(device).name, "loop/backing_file"), sandbox


async def test_a_killed_owner_leaves_no_device_and_no_file(tmp_path: Path) -> None:
    device, _ = await to_thread.run_sync(run_and_kill, tmp_path, "private")
    assert await settled(lambda: not device.exists())
    assert await to_thread.run_sync(os.listdir, tmp_path) == []


async def test_a_durable_pool_keeps_layers_over_a_killed_owner(tmp_path: Path) -> None:
    _, name = await to_thread.run_sync(run_and_kill, tmp_path, "durable")
    layers = await BtrfsLayers.open(tmp_path, durable=True)
    try:
        assert await layers.list() == (name,)
        (sandbox,) = await layers.list()
        path = layers._claims[sandbox].slots[0].name
        kept = await to_thread.run_sync((inside(layers, Path(path)) / "kept").read_text)
        assert kept == "kept"
        with pytest.raises(Conflict):
            await layers.create(sandbox, 64)
        await layers.discard(sandbox)
    finally:
        await layers.close()
    again = await BtrfsLayers.open(tmp_path, durable=True)
    try:
        assert await again.list() == ()
    finally:
        await again.close()


async def test_a_durable_pool_in_use_is_mounted_again_from_the_same_device(tmp_path: Path) -> None:
    """A sandbox that outlives its engine holds the mount: a second device over its file would destroy it."""
    layers = await BtrfsLayers.open(tmp_path, size_bytes=SIZE, durable=True)
    device = layers._pool.device
    held = os.dup(layers.root_fd())
    try:
        with pytest.raises(Conflict):
            await BtrfsLayers.open(tmp_path, durable=True)
        await layers.close()
        again = await BtrfsLayers.open(tmp_path, durable=True)
        assert again._pool.device == device
        await again.close()
    finally:
        os.close(held)


async def test_a_pool_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageFull) as caught:
        await BtrfsLayers.open(tmp_path, size_bytes=2**50, durable=False)
    assert caught.value.facts["needed"] == 2**50
    with pytest.raises(BadRequest):
        await BtrfsLayers.open(tmp_path, shelf=-1, durable=False)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
async def test_a_pool_in_memory_takes_only_what_is_used(tmp_path: Path) -> None:
    before = os.statvfs("/dev/shm").f_bfree
    layers = await BtrfsLayers.open(Path("/dev/shm"), size_bytes=SIZE, durable=False)
    try:
        path = await layers.create(new_sandbox_id(), 64)
        assert await to_thread.run_sync(fill, inside(layers, path), MIB) == (MIB, 0)
        taken = (before - os.statvfs("/dev/shm").f_bfree) * os.statvfs("/dev/shm").f_frsize
        assert taken < 128 * MIB
    finally:
        await layers.close()


async def test_a_pool_that_holds_something_strange_is_refused(tmp_path: Path) -> None:
    layers = await BtrfsLayers.open(tmp_path, size_bytes=SIZE, durable=True)
    lost = new_sandbox_id()

    def soil() -> None:
        root = Path(f"/proc/self/fd/{layers.root_fd()}")
        (root / lost).symlink_to("slot-999")  # a link whose slot is gone is dropped
        (root / "stranger").mkdir()

    await to_thread.run_sync(soil)
    await layers.close()
    with pytest.raises(StoreDamaged):
        await BtrfsLayers.open(tmp_path, durable=True)

    def mend() -> None:
        pool = open_pool(tmp_path, None, durable=True)
        os.rmdir("stranger", dir_fd=pool.directory)
        pool.close()

    await to_thread.run_sync(mend)
    again = await BtrfsLayers.open(tmp_path, durable=True)
    try:
        assert await again.list() == ()
        await again.create(lost, 64)
    finally:
        await again.close()


async def test_a_damaged_file_is_not_a_pool(tmp_path: Path) -> None:
    await to_thread.run_sync((tmp_path / "layers.img").write_bytes, bytes(SIZE // 8))
    with pytest.raises(StoreDamaged):
        await BtrfsLayers.open(tmp_path, durable=True)
