"""The files of volumes in a real pool: a quota of their own, a mount of their own, and nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from anyio import to_thread

from dsec.errors import Conflict, Denied, NotFound, StoreDamaged
from dsec.model.ids import new_sandbox_id, new_volume_id
from dsec.model.sandbox import MIB
from dsec.runtimes.host_paths import HostPaths
from dsec.stores import btrfs, mounts
from dsec.stores.layers import BtrfsLayers

pytestmark = [pytest.mark.needs_root, pytest.mark.anyio, pytest.mark.timeout(60)]
POOL_BYTES = 300 * MIB
# What the kernel grants to whoever may write to a directory of btrfs. Inside a sandbox it is refused: see tests/e2e/test_volumes.py.
MAKE_SUBVOLUME = (
    "import fcntl, os, struct; os.fchdir({mount}); os.setuid(1000); d = os.open('.', os.O_RDONLY); "
    "fcntl.ioctl(d, 0x5000940e, bytearray(struct.pack('=q4088s', 0, b'sub')))"
)


async def opened(path: Path) -> BtrfsLayers:
    return await BtrfsLayers.open(path, size_bytes=POOL_BYTES, shelf=1, durable=True)


@pytest.fixture
async def layers(tmp_path: Path) -> AsyncIterator[BtrfsLayers]:
    found = await opened(tmp_path)
    yield found
    await found.close()
    (tmp_path / "layers.img").unlink()  # big


def filled(mount: int, name: str, size: int) -> int:
    """How many bytes of ``size`` a new file took, written out: the quota counts what is on its way, too."""
    fd = os.open(name, os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=mount)
    written = 0
    try:
        while written < size:
            written += os.write(fd, os.urandom(256 * 1024))
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EDQUOT, errno.ENOSPC):
            raise
    finally:
        os.close(fd)
    return written


async def test_each_has_its_own_bound(layers: BtrfsLayers) -> None:
    one, other = new_volume_id(), new_volume_id()
    await layers.volumes.make(one, 8)
    await layers.volumes.make(other, 16)
    assert await layers.volumes.list() == tuple(sorted((one, other)))
    with pytest.raises(Conflict):
        await layers.volumes.make(one, 8)

    def fill() -> list[int]:
        mounts = [layers.volumes.open(volume) for volume in (one, other)]
        try:
            return [filled(mount, "f", 20 * MIB) for mount in mounts]
        finally:
            for mount in mounts:
                os.close(mount)

    first, second = await to_thread.run_sync(fill)
    assert 6 * MIB < first <= 8 * MIB
    assert 14 * MIB < second <= 16 * MIB
    assert first <= await layers.volumes.used(one) <= 8 * MIB


async def test_a_mount_shows_it_alone_and_belongs_to_the_ordinary_user(layers: BtrfsLayers) -> None:
    volume = new_volume_id()
    await layers.volumes.make(volume, 8)
    await layers.create(new_sandbox_id(), 8)

    def look() -> tuple[list[str], list[str], int, int, int]:
        mount = layers.volumes.open(volume)
        try:
            here, above = (os.listdir(f"/proc/self/fd/{mount}/{part}") for part in (".", ".."))
            info = os.fstat(mount)
            return here, above, info.st_uid, info.st_mode & 0o7777, os.fstatvfs(mount).f_flag
        finally:
            os.close(mount)

    here, above, uid, mode, flags = await to_thread.run_sync(look)
    assert (here, above, uid, mode) == ([], [], 1000, 0o755)
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV


async def test_it_stays_until_it_is_dropped(tmp_path: Path) -> None:
    volume, sandbox = new_volume_id(), new_sandbox_id()
    first = await opened(tmp_path)
    await first.volumes.make(volume, 8)
    await first.create(sandbox, 8)
    mount = await to_thread.run_sync(first.volumes.open, volume)
    await to_thread.run_sync(filled, mount, "f", MIB)
    os.close(mount)
    used = await first.volumes.used(volume)
    await first.close()
    again = await opened(tmp_path)
    assert await again.volumes.list() == (volume,)
    assert await again.list() == (sandbox,), "a volume is no layer"
    assert await again.volumes.used(volume) == used
    await again.volumes.drop(volume)
    await again.volumes.drop(volume)
    assert await again.volumes.list() == ()
    for act in (again.volumes.used(volume), to_thread.run_sync(again.volumes.open, volume)):
        with pytest.raises(NotFound):
            await act
    await again.close()
    third = await opened(tmp_path)
    assert await third.volumes.list() == ()
    await third.close()
    (tmp_path / "layers.img").unlink()


async def test_a_strange_name_in_the_pool_is_damage(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    await to_thread.run_sync(btrfs.create_subvolume, first._pool.directory, "vo-strange")
    await first.close()
    with pytest.raises(StoreDamaged, match="vo-strange"):
        await opened(tmp_path)
    (tmp_path / "layers.img").unlink()


async def test_outside_of_a_sandbox_anybody_could_make_subvolumes_in_it(layers: BtrfsLayers) -> None:
    """The control of what is refused inside."""
    volume = new_volume_id()
    await layers.volumes.make(volume, 8)
    mount = await to_thread.run_sync(layers.volumes.open, volume)

    def make() -> tuple[int, list[str]]:
        place = f"/proc/self/fd/{mount}"
        argv = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            MAKE_SUBVOLUME.format(mount=mount),
        ]
        done = subprocess.run(argv, pass_fds=[mount], capture_output=True, check=False)
        found = os.listdir(place)
        if "sub" in found:
            os.rmdir(f"{place}/sub")
        return done.returncode, found

    try:
        assert await to_thread.run_sync(make) == (0, ["sub"])
    finally:
        os.close(mount)


async def test_a_path_of_a_mount_that_is_none_of_ours_only_reads_like_one(tmp_path: Path) -> None:
    """Within a detached mount names begin at its own root: what lies there is not what the operator allowed."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()

    def judge() -> bool:
        mount = mounts.mount_detached("tmpfs", "none", {}, 0)
        root = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)
        try:
            inside = Path(f"/proc/self/fd/{root}/{allowed}")
            inside.mkdir(parents=True)
            fd = os.open(inside, os.O_PATH)
            reads_alike = os.readlink(f"/proc/self/fd/{fd}") == str(allowed)
            os.close(fd)
            with pytest.raises(Denied):
                HostPaths((allowed,)).open(inside, lent=False)
            return reads_alike
        finally:
            os.close(root)
            os.close(mount)

    assert await to_thread.run_sync(judge), "the control: by its name alone it would pass"
