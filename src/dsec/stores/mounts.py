"""Detached mounts, loop devices and the few system calls for them that Python does not wrap.

A *detached* mount is attached nowhere: it is reached through its descriptor, does not show in the host's mount table,
and ends with the last descriptor, also when the process is killed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from dsec.errors import Busy, Unsupported
from dsec.stores.btrfs import file_system_id

MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOATIME: Final = 0x10

# The same numbers on x86-64 and arm64 (and every other architecture since the tables were joined at 424).
_SYS_OPEN_TREE: Final = 428
_SYS_FSOPEN: Final = 430
_SYS_FSCONFIG: Final = 431
_SYS_FSMOUNT: Final = 432
_SYS_MOUNT_SETATTR: Final = 442

_FSCONFIG_SET_FLAG: Final = 0
_FSCONFIG_SET_STRING: Final = 1
_FSCONFIG_CMD_CREATE: Final = 6
_CLOEXEC: Final = 1
_OPEN_TREE_CLONE: Final = 1
_AT_EMPTY_PATH: Final = 0x1000

_ATTRIBUTES: Final = {
    os.ST_RDONLY: MOUNT_ATTR_RDONLY,
    os.ST_NOSUID: MOUNT_ATTR_NOSUID,
    os.ST_NODEV: MOUNT_ATTR_NODEV,
    os.ST_NOATIME: MOUNT_ATTR_NOATIME,
}

_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_GET_STATUS64: Final = 0x4C05
_LOOP_INFO_BYTES: Final = 232
_LO_FLAGS_READ_ONLY: Final = 1
_LO_FLAGS_AUTOCLEAR: Final = 4
_LO_FLAGS_DIRECT_IO: Final = 16
_TMPFS_MAGIC: Final = 0x01021994
_STATFS_BYTES: Final = 256  # more than struct statfs of any architecture
_LOOP_ATTEMPTS: Final = 64
# struct loop_config: fd, block_size, struct loop_info64 (232 bytes), 8 reserved words.
_LOOP_CONFIG: Final = struct.Struct("=II 5Q 4I 64s64s32s 2Q 8Q")


@cache
def _syscall() -> Callable[..., int]:
    """libc's ``syscall``, loaded when first needed."""
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _call(what: str, number: int, *arguments: object) -> int:
    """One system call.  Raises: OSError: with ``what`` as its file name."""
    result = _syscall()(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return int(result)


def _fsconfig(context: int, command: int, key: str | None, value: str | None) -> None:
    raw_key = None if key is None else key.encode()
    raw_value = None if value is None else os.fsencode(value)
    _call(
        f"fsconfig {key or 'create'}={value}",
        _SYS_FSCONFIG,
        ctypes.c_int(context),
        ctypes.c_uint(command),
        ctypes.c_char_p(raw_key),
        ctypes.c_char_p(raw_value),
        ctypes.c_int(0),
    )


def _explain(context: int) -> str:
    """What the kernel wrote about a failed mount, or ""."""
    lines = []
    for _ in range(16):
        try:
            lines.append(os.read(context, 4096).decode("utf-8", "replace").strip())
        except OSError:
            break
    return "; ".join(lines)


def is_tmpfs(descriptor: int) -> bool:
    """Whether an open file lives in memory.  Raises: OSError."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    function = ctypes.CDLL(None, use_errno=True).fstatfs
    if function(ctypes.c_int(descriptor), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "fstatfs")
    return bool(struct.unpack_from("@l", buffer)[0] == _TMPFS_MAGIC)


def mount_detached(fstype: str, source: str, options: Mapping[str, str | None], attributes: int) -> int:
    """A new superblock, mounted nowhere.

    Args:
        options: of the file system; a None value is a flag.
        attributes: ``MOUNT_ATTR_*`` of the mount.

    Returns: a descriptor of the root of the mount (an ``O_PATH`` one), close-on-exec.

    Raises: OSError: the kernel refused; its own explanation is in ``strerror``.
    """
    context = _call(
        f"fsopen {fstype}", _SYS_FSOPEN, ctypes.c_char_p(fstype.encode()), ctypes.c_uint(_CLOEXEC)
    )
    try:
        try:
            _fsconfig(context, _FSCONFIG_SET_STRING, "source", source)
            for key, value in options.items():
                command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
                _fsconfig(context, command, key, value)
            _fsconfig(context, _FSCONFIG_CMD_CREATE, None, None)
        except OSError as error:
            reason = _explain(context) or error.strerror
            raise OSError(error.errno, reason, error.filename) from error
        return _call(
            f"fsmount {fstype}",
            _SYS_FSMOUNT,
            ctypes.c_int(context),
            ctypes.c_uint(_CLOEXEC),
            ctypes.c_uint(attributes),
        )
    finally:
        os.close(context)


def clone_detached(directory: int, attributes: int) -> int:
    """A detached bind mount of a directory given by descriptor, with ``MOUNT_ATTR_*`` set on it.

    Linux before 6.15 cannot clone a mount that is itself detached. Its file system is mounted once more there, which needs it to
    be on a device, and ``directory`` to be its root.

    Raises: OSError.
    """
    try:
        tree = _open_tree(directory)
    except OSError as error:
        device = _device_of(directory) if error.errno == errno.EINVAL and _detached(directory) else None
        if device is None:
            raise
        return _mount_again(directory, *device, attributes)
    try:
        wanted = struct.pack("=4Q", attributes, 0, 0, 0)
        _call(
            "mount_setattr",
            _SYS_MOUNT_SETATTR,
            ctypes.c_int(tree),
            ctypes.c_char_p(b""),
            ctypes.c_uint(_AT_EMPTY_PATH),
            ctypes.c_char_p(wanted),
            ctypes.c_size_t(len(wanted)),
        )
    except OSError:
        os.close(tree)
        raise
    return tree


def _open_tree(directory: int) -> int:
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH
    return _call(
        "open_tree", _SYS_OPEN_TREE, ctypes.c_int(directory), ctypes.c_char_p(b""), ctypes.c_uint(flags)
    )


def _detached(descriptor: int) -> bool:
    """Whether the mount of an open file is none of this process's mount namespace."""
    facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    mount = next((line.split()[1] for line in facts if line.startswith("mnt_id:")), "")
    return all(line.split()[0] != mount for line in Path("/proc/self/mountinfo").read_text().splitlines())


def _device_of(directory: int) -> tuple[str, str] | None:
    """Type and device of a file system of ours; None: it is not on a block device."""
    number = os.fstat(directory).st_dev
    loop = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if loop.exists():
        return "erofs", f"/dev/{loop.resolve().name}"
    readable = os.open(f"/proc/self/fd/{directory}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        devices = list(Path("/sys/fs/btrfs", file_system_id(readable), "devices").iterdir())
    except OSError:
        return None
    finally:
        os.close(readable)
    return ("btrfs", f"/dev/{devices[0].name}") if len(devices) == 1 else None


def _mount_again(directory: int, fstype: str, device: str, attributes: int) -> int:
    """Another mount of the same superblock, with the attributes of this one and more."""
    has = os.fstatvfs(directory).f_flag
    for flag, attribute in _ATTRIBUTES.items():
        attributes |= attribute if has & flag else 0
    return mount_detached(fstype, device, {"ro": None} if fstype == "erofs" else {}, attributes)


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop device that clears itself when its last user (descriptor or mount) is gone."""

    path: str
    fd: int

    def release(self) -> None:
        """Close our descriptor; the device goes with its last user."""
        os.close(self.fd)


def attach_loop(backing: int, *, read_only: bool, direct: bool = False) -> Loop:
    """A free loop device over an open file, with autoclear.

    Args:
        backing: descriptor of the file; the device keeps its own reference.
        direct: bypass the page cache below the device, where the file system can.

    Raises:
        Busy: other processes took every free device in between, many times over.
        Unsupported: there are no loop devices here.
    """
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unsupported(
            f"/dev/loop-control cannot be opened: {error.strerror}",
            hint="loop devices are needed: run as root on the host (modprobe loop)",
        ) from error
    flags = _LO_FLAGS_AUTOCLEAR
    flags |= _LO_FLAGS_READ_ONLY if read_only else 0
    flags |= _LO_FLAGS_DIRECT_IO if direct else 0
    config = _LOOP_CONFIG.pack(backing, 0, *[0] * 8, flags, b"", b"", b"", *[0] * 10)
    try:
        for _ in range(_LOOP_ATTEMPTS):
            loop = _try_loop(control, config, read_only)
            if loop is not None:
                return loop
    finally:
        os.close(control)
    raise Busy(f"no free loop device after {_LOOP_ATTEMPTS} attempts")


def _try_loop(control: int, config: bytes, read_only: bool) -> Loop | None:
    """One attempt at the next free device; None when another process was faster."""
    path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
    mode = os.O_RDONLY if read_only else os.O_RDWR
    try:
        device = os.open(path, mode | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Unsupported(
            f"{path} does not exist", hint="/dev must be a devtmpfs (not a copy of it)"
        ) from error
    try:
        fcntl.ioctl(device, _LOOP_CONFIGURE, config)
    except OSError as error:
        os.close(device)
        if error.errno in (errno.EBUSY, errno.ENXIO):
            return None
        raise
    except BaseException:
        os.close(device)
        raise
    return Loop(path, device)


def find_loop(backing: int, *, read_only: bool = False) -> Loop | None:
    """The loop device that is over this file already: never put a second one over a file that is mounted.

    Raises: OSError.
    """
    info = os.fstat(backing)
    mode = os.O_RDONLY if read_only else os.O_RDWR
    for device in sorted(Path("/sys/block").glob("loop*/loop/backing_file")):
        path = f"/dev/{device.parts[3]}"
        try:
            descriptor = os.open(path, mode | os.O_CLOEXEC)
        except OSError:
            continue  # gone in between, or not ours to open
        status = bytearray(_LOOP_INFO_BYTES)
        try:
            fcntl.ioctl(descriptor, _LOOP_GET_STATUS64, status)
        except OSError:
            os.close(descriptor)
            continue
        if struct.unpack_from("=2Q", status) == (info.st_dev, info.st_ino):
            return Loop(path, descriptor)  # our descriptor keeps it from clearing itself
        os.close(descriptor)
    return None


def mount_image(path: Path) -> int:
    """A detached, read-only, nosuid, nodev mount of an EROFS image.

    Over a loop device that clears itself, the one that is over that file already if there is one: mounts of one device are one file
    system, so that whoever mounts an image on this machine shares it, and what of it is in memory. Where there are no loop devices,
    straight from the file, if the kernel can do that (6.12) and can also clone such a mount (6.15): one file system for each mount.

    Returns: a descriptor of the root of the image.

    Raises:
        Unsupported: no EROFS here, or no permission to mount.
        OSError: the file cannot be read, or is no EROFS image.
    """
    attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            loop = _shared_loop(backing)
        except (Unsupported, Busy):
            # Through the descriptor, so that both attempts are of one and the same file.
            return _cloneable(mount_detached("erofs", f"/proc/self/fd/{backing}", {"ro": None}, attributes))
        else:
            return _mount_and_release(loop, attributes)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENODEV):
            raise Unsupported(
                f"EROFS images cannot be mounted: {error.strerror}",
                hint="needs root and a kernel with EROFS (5.4 or later)",
            ) from error
        raise
    finally:
        os.close(backing)


def _mount_and_release(loop: Loop, attributes: int) -> int:
    """An EROFS mount of a device, which it keeps from clearing itself.  Raises: OSError."""
    try:
        return mount_detached("erofs", loop.path, {"ro": None}, attributes)
    finally:
        loop.release()


def _shared_loop(backing: int) -> Loop:
    """The device that is over a file, or a new one; two who ask at once get the same.  Raises: as :func:`attach_loop`. OSError."""
    # Opened once more: the device keeps what it is attached with, and a lock is of what was opened.
    lock = os.open(f"/proc/self/fd/{backing}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return find_loop(backing, read_only=True) or attach_loop(backing, read_only=True)
    finally:
        os.close(lock)


def _cloneable(tree: int) -> int:
    """The same mount, which :func:`clone_detached` can clone.  Raises: OSError: EINVAL, it cannot; then it is closed."""
    try:
        os.close(_open_tree(tree))
    except OSError:
        os.close(tree)
        raise
    return tree
