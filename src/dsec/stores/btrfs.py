"""The btrfs ioctls that layers need, as functions over descriptors."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final

_NAME_MAX: Final = 255
_FIRST_ID: Final = 256

_VOL_ARGS: Final = struct.Struct("=q4088s")
_VOL_ARGS_V2: Final = struct.Struct("=q2Q32x4040s")
_QUOTA_CTL: Final = struct.Struct("=2Q")
_QGROUP_LIMIT: Final = struct.Struct("=6Q")
_QGROUP_CREATE: Final = struct.Struct("=2Q")
_INO_LOOKUP: Final = struct.Struct("=2Q4080s")
_FS_INFO: Final = struct.Struct("=2Q16s3IHHQ16s944x")

_READ: Final = 2
_WRITE: Final = 1


def _number(direction: int, nr: int, size: int) -> int:
    """An ioctl number of btrfs, as <linux/ioctl.h> makes it."""
    return direction << 30 | size << 16 | 0x94 << 8 | nr


_IOC_SUBVOL_CREATE: Final = _number(_WRITE, 14, _VOL_ARGS.size)
_IOC_SNAP_DESTROY: Final = _number(_WRITE, 15, _VOL_ARGS.size)
_IOC_SNAP_CREATE_V2: Final = _number(_WRITE, 23, _VOL_ARGS_V2.size)
_IOC_INO_LOOKUP: Final = _number(_READ | _WRITE, 18, _INO_LOOKUP.size)
_IOC_FS_INFO: Final = _number(_READ, 31, 1024)
_IOC_QUOTA_CTL: Final = _number(_READ | _WRITE, 40, _QUOTA_CTL.size)
_IOC_QGROUP_CREATE: Final = _number(_WRITE, 42, _QGROUP_CREATE.size)
_IOC_QGROUP_LIMIT: Final = _number(_READ, 43, _QGROUP_LIMIT.size)
_IOC_SYNC: Final = 0x9408
_IOC_SUBVOL_SETFLAGS: Final = _number(_WRITE, 26, 8)
_IOC_START_SYNC: Final = _number(_READ, 24, 8)

_QUOTA_ENABLE: Final = 1
_QUOTA_ENABLE_SIMPLE: Final = 4
_LIMIT_MAX_RFER: Final = 1
_SNAPSHOT_READ_ONLY: Final = 2


def _vol_args(name: str) -> bytes:
    raw = os.fsencode(name)
    if not raw or len(raw) > _NAME_MAX or b"/" in raw or b"\0" in raw:
        raise ValueError(f"not a name of a subvolume: {name!r}")
    return _VOL_ARGS.pack(0, raw)


def create_subvolume(parent: int, name: str) -> None:
    """Raises: OSError."""
    fcntl.ioctl(parent, _IOC_SUBVOL_CREATE, bytearray(_vol_args(name)))


def snapshot(source: int, parent: int, name: str, *, read_only: bool = False) -> None:
    """Make a copy-on-write copy of the subvolume whose root directory is ``source``.  Raises: OSError."""
    flags = _SNAPSHOT_READ_ONLY if read_only else 0
    args = _VOL_ARGS_V2.pack(source, 0, flags, _vol_args(name)[8:].ljust(4040, b"\0")[:4040])
    fcntl.ioctl(parent, _IOC_SNAP_CREATE_V2, bytearray(args))


def seal(directory: int) -> None:
    """Let nobody write to the subvolume with that root directory any more.  Raises: OSError."""
    fcntl.ioctl(directory, _IOC_SUBVOL_SETFLAGS, bytearray(struct.pack("=Q", _SNAPSHOT_READ_ONLY)))


def sync(directory: int) -> None:
    """Write everything that is dirty in the file system to its device, and wait for that.  Raises: OSError."""
    fcntl.ioctl(directory, _IOC_SYNC, 0)


def destroy_subvolume(parent: int, name: str) -> None:
    """Unlink a subvolume; the kernel frees its blocks later.  Raises: OSError."""
    fcntl.ioctl(parent, _IOC_SNAP_DESTROY, bytearray(_vol_args(name)))


def subvolume_id(directory: int) -> int:
    """The id of the subvolume that a directory is in; its qgroup is ``0/id``.  Raises: OSError."""
    buffer = bytearray(_INO_LOOKUP.pack(0, _FIRST_ID, b""))
    fcntl.ioctl(directory, _IOC_INO_LOOKUP, buffer)
    return int(_INO_LOOKUP.unpack(buffer)[0])


def file_system_id(directory: int) -> str:
    """The UUID of the file system, as it is named below /sys/fs/btrfs.  Raises: OSError."""
    buffer = bytearray(1024)
    fcntl.ioctl(directory, _IOC_FS_INFO, buffer)
    raw = buffer[16:32].hex()
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))


def enable_quota(directory: int) -> bool:
    """Switch quotas on. True: simple quotas (kernel 6.7 and later), False: full qgroups.  Raises: OSError."""
    try:
        fcntl.ioctl(directory, _IOC_QUOTA_CTL, bytearray(_QUOTA_CTL.pack(_QUOTA_ENABLE_SIMPLE, 0)))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTTY):
            raise
    else:
        return True
    fcntl.ioctl(directory, _IOC_QUOTA_CTL, bytearray(_QUOTA_CTL.pack(_QUOTA_ENABLE, 0)))
    return False


def limit_qgroup(directory: int, subvolume: int, size: int) -> None:
    """Let subvolume ``0/subvolume`` refer to at most ``size`` bytes, metadata included.  Raises: OSError."""
    limit = _QGROUP_LIMIT.pack(subvolume, _LIMIT_MAX_RFER, size, 0, 0, 0)
    fcntl.ioctl(directory, _IOC_QGROUP_LIMIT, bytearray(limit))


def remove_qgroup(directory: int, subvolume: int) -> None:
    """Raises: OSError: EBUSY while the deleted subvolume still has blocks."""
    fcntl.ioctl(directory, _IOC_QGROUP_CREATE, bytearray(_QGROUP_CREATE.pack(0, subvolume)))


def start_commit(directory: int) -> None:
    """Begin to commit the running transaction, after which blocks of deleted subvolumes are freed. Writes nobody's dirty data
    and waits for nothing.

    Raises: OSError.
    """
    fcntl.ioctl(directory, _IOC_START_SYNC, bytearray(8))


def qgroup_bytes(file_system: str, subvolume: int) -> int:
    """Bytes that a subvolume is charged with now: on disk, and reserved for what is not written yet.

    Raises: FileNotFoundError: no such subvolume, or no quotas.
    """
    group = f"/sys/fs/btrfs/{file_system}/qgroups/0_{subvolume}"
    return _figure(f"{group}/referenced") + _figure(f"{group}/rsv_data")


def open_unwritten(file_system: str) -> int:
    """A descriptor for :func:`free_bytes`.  Raises: FileNotFoundError: there is no sysfs here."""
    path = f"/sys/fs/btrfs/{file_system}/allocation/data/bytes_may_use"
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def free_bytes(directory: int, unwritten: int) -> tuple[int, int]:
    """Bytes that are free, and bytes in all. Waits for nothing.

    What programs have written and the kernel not yet (that can be gigabytes, for half a minute) is not free, though ``statfs`` says so.
    """
    info = os.fstatvfs(directory)
    promised = int(os.pread(unwritten, 32, 0))
    return max(0, info.f_bavail * info.f_frsize - promised), info.f_blocks * info.f_frsize


def _figure(path: str) -> int:
    """A number from sysfs. Plain system calls: this is done for each layer that ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 32))
    finally:
        os.close(descriptor)
