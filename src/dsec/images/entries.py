"""Making one entry of a tree in another one, by descriptors of directories: no link on the way is ever followed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dsec.errors import Unsupported
from dsec.images import attributes
from dsec.images.attributes import OPAQUE, OPAQUE_VALUE, Attributes
from dsec.images.limits import IDS, LATEST
from dsec.images.tools import Check

NEVER: Final = 2**63
"""ns: later than any date."""
_CHUNK: Final = 2**22
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Dates:
    """What files are dated. What is later than ``latest``, or not older than ``since``, gets the date ``latest``. ns since the epoch."""

    latest: int = LATEST
    since: int = NEVER

    def of(self, info: os.stat_result) -> int:
        """The date of a copy."""
        when = self.latest if info.st_mtime_ns >= self.since else info.st_mtime_ns
        return max(0, min(when, self.latest, LATEST))


def open_folder(name: str, folder: int) -> int:
    """A descriptor of a directory in an open one.  Raises: OSError."""
    return os.open(name, _FOLDER, dir_fd=folder)


def reached(root: int, way: Iterable[str]) -> int | None:
    """A descriptor of the directory that these names lead to; None when one of them is no directory.  Raises: OSError."""
    descriptor = os.dup(root)
    for name in way:
        above = descriptor
        try:
            descriptor = open_folder(name, above)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            return None
        finally:
            os.close(above)
    return descriptor


def copy_content(name: str, source: int, target: int, check: Check) -> bool:
    """The bytes of a regular file alone, for its owner to read and write. False: it is none.  Raises: OSError."""
    info = os.stat(name, dir_fd=source, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode):
        return False
    read = os.open(name, _READ, dir_fd=source)
    try:
        made = os.open(name, _MAKE, 0o600, dir_fd=target)
        try:
            _copy_data(read, made, info.st_size, check)
        finally:
            os.close(made)
    finally:
        os.close(read)
    return True


def make_whiteout(name: str, folder: int) -> None:
    """What says that there is nothing. All are alike: nobody sees their owners and times.  Raises: OSError."""
    try:
        os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=folder)
    except PermissionError as error:
        raise Unsupported(
            "what a layer takes away cannot be written down where the image store is: is that an overlay itself?",
            hint="put the image store (images) on a file system such as ext4, xfs or btrfs",
        ) from error
    os.chmod(name, 0, dir_fd=folder)
    os.utime(name, ns=(0, 0), dir_fd=folder, follow_symlinks=False)


def copy_entry(name: str, source: int, target: int, dates: Dates, check: Check) -> None:
    """What is no directory, with all that :func:`dress` gives. Holes of files stay holes.

    Raises: TooLarge, Unsupported, OSError.
    """
    info = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISREG(info.st_mode):
        _copy_file(name, source, target, dates, check)
        return
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
        os.mknod(name, stat.S_IFMT(info.st_mode) | 0o600, dir_fd=target)
    else:
        raise Unsupported("a device cannot be kept in a layer", hint="remove it")
    found = attributes.read(f"/proc/self/fd/{source}/{name}")
    _dress_named(name, target, info, found, dates)


def dress(descriptor: int, info: os.stat_result, found: Attributes, dates: Dates) -> None:
    """Owner, attributes, mode (all of it: overlays are mounted nosuid) and time.

    Raises: Unsupported: an owner that no sandbox has. TooLarge, OSError.
    """
    _check_owner(info)
    os.fchown(descriptor, info.st_uid, info.st_gid)
    attributes.write(descriptor, found.values)
    if found.opaque:
        os.setxattr(descriptor, OPAQUE, OPAQUE_VALUE)
    os.fchmod(descriptor, stat.S_IMODE(info.st_mode))
    when = dates.of(info)
    os.utime(descriptor, ns=(when, when))


def _dress_named(name: str, folder: int, info: os.stat_result, found: Attributes, dates: Dates) -> None:
    """The same, for what cannot be opened."""
    _check_owner(info)
    os.chown(name, info.st_uid, info.st_gid, dir_fd=folder, follow_symlinks=False)
    attributes.write(f"/proc/self/fd/{folder}/{name}", found.values)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=folder)
    when = dates.of(info)
    os.utime(name, ns=(when, when), dir_fd=folder, follow_symlinks=False)


def _copy_file(name: str, source: int, target: int, dates: Dates, check: Check) -> None:
    read = os.open(name, _READ, dir_fd=source)
    try:
        info = os.fstat(read)
        made = os.open(name, _MAKE, 0o600, dir_fd=target)
        try:
            _copy_data(read, made, info.st_size, check)
            dress(made, info, attributes.read(read), dates)
        finally:
            os.close(made)
    finally:
        os.close(read)


def _copy_data(source: int, target: int, size: int, check: Check) -> None:
    begin = 0
    while begin < size:
        try:
            begin = os.lseek(source, begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                break
            raise
        end = min(os.lseek(source, begin, os.SEEK_HOLE), size)
        os.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            check()
            sent = os.sendfile(target, source, begin, min(end - begin, _CHUNK))
            if sent == 0:
                raise OSError(errno.EIO, "a file became shorter while it was read")
            begin += sent
    os.ftruncate(target, size)


def _check_owner(info: os.stat_result) -> None:
    if info.st_uid >= IDS or info.st_gid >= IDS:
        raise Unsupported(
            f"an entry belongs to {info.st_uid}:{info.st_gid}, which no sandbox has",
            hint=f"ids are below {IDS}",
            uid=info.st_uid,
            gid=info.st_gid,
        )
