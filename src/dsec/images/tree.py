"""The digest of a tree: the same files give the same digest on every machine, whatever holds them."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from dsec.images.tools import Check, unstoppable

_FORMAT: Final = b"dsec tree 1\n"
# A label of the machine that holds the tree, not a part of the tree.
_FOREIGN_XATTRS: Final = frozenset({"security.selinux"})


def tree_digest(root: Path, *, check: Check = unstoppable) -> str:
    """``sha256:…`` over every entry below ``root`` and ``root`` itself.

    Covered: path, type, mode, uid, gid, mtime, size, extended attributes, content or target. Not covered: inode numbers,
    the order on disk, access times, and which files are hard links of one another (a link counts as a file).

    Args:
        check: called for each entry; what it raises ends the work.

    Raises: OSError: something could not be read, or is a device (EINVAL): none but whiteouts (0:0) is kept in a tree.
    """
    digest = hashlib.sha256(_FORMAT)
    for path, info in _walk(root):
        check()
        for part in _record(path.relative_to(root), path, info):
            digest.update(b"%d:" % len(part))
            digest.update(part)
        digest.update(b"\n")
    return f"sha256:{digest.hexdigest()}"


def has_attributes(root: Path) -> bool:
    """Whether anything below has an extended attribute that the digest covers.  Raises: OSError."""
    return any(attribute_names(path) for path, _ in _walk(root))


def content_bytes(root: Path) -> int:
    """Bytes of all files together, holes and further names counted.  Raises: OSError."""
    return sum(info.st_size for _, info in _walk(root) if stat.S_ISREG(info.st_mode))


def file_digest(path: Path) -> str:
    """``sha256:…`` over the bytes of one file.  Raises: OSError."""
    with path.open("rb", buffering=0) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything, each directory before what is in it, names in byte order."""
    pending = [root]
    while pending:
        path = pending.pop()
        info = path.lstat()
        yield path, info
        if stat.S_ISDIR(info.st_mode):
            pending.extend(sorted(path.iterdir(), key=os.fsencode, reverse=True))


def _record(relative: Path, path: Path, info: os.stat_result) -> Iterable[bytes]:
    """The fields of one entry, in their fixed order."""
    kind, size, content = _content(path, info)
    numbers = f"{stat.S_IMODE(info.st_mode):o} {info.st_uid} {info.st_gid} {info.st_mtime_ns} {size}"
    yield os.fsencode(relative)
    yield kind
    yield numbers.encode()
    yield content
    for name in attribute_names(path):
        yield os.fsencode(name)
        yield os.getxattr(path, name, follow_symlinks=False)


def attribute_names(path: Path | str) -> list[str]:
    """Of the extended attributes that the digest covers, sorted.  Raises: OSError."""
    return sorted(name for name in os.listxattr(path, follow_symlinks=False) if name not in _FOREIGN_XATTRS)


def _content(path: Path, info: os.stat_result) -> tuple[bytes, int, bytes]:
    """Kind, size and content (of a file: its digest)."""
    if stat.S_ISDIR(info.st_mode):
        return b"directory", 0, b""
    if stat.S_ISLNK(info.st_mode):
        return b"symlink", 0, os.fsencode(path.readlink())
    if stat.S_ISREG(info.st_mode):
        with path.open("rb", buffering=0) as file:
            return b"file", info.st_size, hashlib.file_digest(file, "sha256").digest()
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
        return b"whiteout", 0, b""
    if stat.S_ISFIFO(info.st_mode):
        return b"fifo", 0, b""
    if stat.S_ISSOCK(info.st_mode):
        return b"socket", 0, b""
    raise OSError(errno.EINVAL, "a device", str(path))
