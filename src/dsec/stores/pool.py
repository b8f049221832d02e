"""The file system that layers live in: btrfs in a preallocated file, over a loop device, mounted nowhere.

A private pool has no name: its file is unlinked from the start, and file, device and mount vanish with the last descriptor,
however the process ends. A durable pool is ``layers.img`` in its state directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.errors import Conflict, RuntimeUnavailable, StorageFull, StoreDamaged, Unsupported
from dsec.stores import btrfs
from dsec.stores.mounts import (
    MOUNT_ATTR_NOATIME,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    Loop,
    attach_loop,
    find_loop,
    is_tmpfs,
    mount_detached,
)

GIB: Final = 2**30
_PRIVATE_DEFAULT: Final = 4 * GIB
_DURABLE_DEFAULT: Final = 16 * GIB
_SMALLEST: Final = 256 * 2**20
_ATTRIBUTES: Final = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOATIME
# No discard: it would punch holes into the file, and the space that was preallocated would be lost to others.
_OPTIONS: Final[Mapping[str, str | None]] = {"nodiscard": None, "commit": "30"}
# What a crash of the machine would damage in a private pool is lost in any case.
_PRIVATE_OPTIONS: Final[Mapping[str, str | None]] = {**_OPTIONS, "nodatasum": None, "nobarrier": None}
_GONE_SECONDS: Final = 2.0
_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_IOC_SETFLAGS: Final = 0x40086602
_FS_NOCOW_FL: Final = 0x00800000


@dataclass(frozen=True, slots=True)
class Pool:
    """An open pool.

    Attributes:
        mount: root of the detached mount (``O_PATH``). directory: the same, for ioctls and reading.
        unwritten: tells what was written and is not on the disk yet.
        lock: descriptor that holds the ownership of a durable pool, else -1.
        device: path of the loop device. file_system: its UUID.
        simple_quota: simple quotas rather than full qgroups.
    """

    mount: int
    directory: int
    unwritten: int
    lock: int
    device: str
    file_system: str
    simple_quota: bool

    def mount_subvolume(self, number: int) -> int:
        """A detached mount whose root is that subvolume.  Raises: OSError."""
        return mount_detached("btrfs", self.device, {"subvolid": str(number)}, _ATTRIBUTES)

    def close(self) -> None:
        """Let go of it. A private pool ends here, unless a sandbox still uses it."""
        for descriptor in (self.unwritten, self.directory, self.mount, self.lock):
            if descriptor >= 0:
                os.close(descriptor)

    def wait_gone(self) -> bool:
        """Wait (2 s at most) until the loop device has cleared itself; False: something still uses the pool."""
        backing = Path("/sys/block", Path(self.device).name, "loop/backing_file")
        deadline = time.monotonic() + _GONE_SECONDS
        while backing.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


def open_pool(state: Path, size: int | None, *, durable: bool) -> Pool:
    """Open the pool of a state directory, made first when it is private or not there yet.

    Args:
        size: bytes, for a pool that is made. None: 4 GiB (private) or 16 GiB (durable), at most a quarter of what is free.

    Raises:
        StorageFull: the disk cannot hold it.
        Conflict: another process owns this durable pool.
        Unsupported: no root, no btrfs, no loop devices.
        StoreDamaged: ``layers.img`` is not a file system that can be mounted.
    """
    if os.geteuid() != 0:
        raise Unsupported(
            "writable layers need root: they are mounted", hint="run as root", euid=os.geteuid()
        )
    return _open_durable(state, size) if durable else _open_private(state, size)


def pool_size(free: int, wanted: int | None, *, durable: bool) -> int:
    """How big a new pool is, given the free bytes of the disk.  Raises: StorageFull."""
    size = min(_DURABLE_DEFAULT if durable else _PRIVATE_DEFAULT, free // 4) if wanted is None else wanted
    size -= size % 4096
    if size > free or size < _SMALLEST:
        raise StorageFull(
            f"writable layers need {max(size, _SMALLEST):,} bytes, and {free:,} are free",
            hint="free some space, or name a smaller pool (at least 256 MiB)",
            needed=max(size, _SMALLEST),
            free=free,
        )
    return size


def _open_private(state: Path, size: int | None) -> Pool:
    """Nothing of it has a name, at any moment."""
    try:
        file = os.open(state, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        raise Unsupported(
            f"{state} cannot hold writable layers: its file system has no unnamed files",
            hint="put the state directory on a local file system (ext4, xfs, btrfs)",
        ) from error
    try:
        _allocate(file, state, size, durable=False)
        loop = attach_loop(file, read_only=False, direct=True)
    finally:
        os.close(file)
    try:
        _make_btrfs(loop.path)
        return _mount(loop, -1, _PRIVATE_OPTIONS)
    finally:
        loop.release()


def _open_durable(state: Path, size: int | None) -> Pool:
    lock = os.open(state / "layers.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"{state} is in use by another engine", hint="connect to that engine instead"
            ) from None
        image = state / "layers.img"
        if not image.exists():
            _make_durable(state, image, size)
        return _mount_durable(image, lock)
    except BaseException:
        os.close(lock)
        raise


def _make_durable(state: Path, image: Path, size: int | None) -> None:
    """Whole or not at all: the name appears when the file system is complete."""
    half = state / "layers.img.new"
    file = os.open(half, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _allocate(file, state, size, durable=True)
        _make_btrfs(os.fspath(half))
        os.fsync(file)
        half.rename(image)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def _mount_durable(image: Path, lock: int) -> Pool:
    file = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Sandboxes that outlived their engine still use the pool: it must be the same device again.
        loop = find_loop(file) or attach_loop(file, read_only=False, direct=True)
    finally:
        os.close(file)
    try:
        return _mount(loop, lock, _OPTIONS)
    except OSError as error:
        raise StoreDamaged(
            f"{image} cannot be mounted: {error.strerror}", hint="btrfs check --readonly"
        ) from error
    finally:
        loop.release()


def _allocate(file: int, state: Path, wanted: int | None, *, durable: bool) -> None:
    """Take the space now, so that a full disk is found here and not by a sandbox."""
    info = os.statvfs(state)
    size = pool_size(info.f_bavail * info.f_frsize, wanted, durable=durable)
    _no_copy_on_write(file)
    try:
        if is_tmpfs(file):
            os.ftruncate(file, size)  # allocating would take that much memory at once
        else:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFull(
                f"no {size:,} bytes for writable layers in {state}: {error.strerror}"
            ) from error
        raise


def _no_copy_on_write(file: int) -> None:
    """On btrfs every write to the preallocated file would take new space; elsewhere there is no such flag."""
    with suppress(OSError):
        flags = struct.unpack("=I", fcntl.ioctl(file, _FS_IOC_GETFLAGS, bytes(4)))[0]
        fcntl.ioctl(file, _FS_IOC_SETFLAGS, struct.pack("=I", flags | _FS_NOCOW_FL))


def _make_btrfs(target: str) -> None:
    """A file system with single copies, without discarding what was just allocated.  Raises: Unsupported, RuntimeUnavailable."""
    tool = shutil.which("mkfs.btrfs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if tool is None:
        raise Unsupported(
            "mkfs.btrfs is not installed", hint="apt-get install btrfs-progs", missing=["btrfs-progs"]
        )
    command = [tool, "-q", "-f", "-K", "-m", "single", "-d", "single", target]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise RuntimeUnavailable(f"mkfs.btrfs failed ({done.returncode}): {done.stderr.strip()[-500:]}")


def _mount(loop: Loop, lock: int, options: Mapping[str, str | None]) -> Pool:
    try:
        mount = mount_detached("btrfs", loop.path, options, _ATTRIBUTES)
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.EPERM):
            raise Unsupported(
                f"btrfs cannot be mounted: {error.strerror}", hint="modprobe btrfs, as root"
            ) from error
        raise
    directory = unwritten = -1
    try:
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
        simple = btrfs.enable_quota(directory)
        name = btrfs.file_system_id(directory)
        unwritten = btrfs.open_unwritten(name)
        return Pool(mount, directory, unwritten, lock, loop.path, name, simple)
    except BaseException:
        for descriptor in (unwritten, directory, mount):
            if descriptor >= 0:
                os.close(descriptor)
        raise
