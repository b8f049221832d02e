"""A tree as one tar archive, the same bytes for the same tree: what :mod:`dsec.images.tree` covers is all in it.

PAX headers as libarchive writes them: ``LIBARCHIVE.xattr.NAME`` (NAME percent-encoded, the value in base64), ``mtime`` to the nanosecond.
Whiteouts are character devices 0:0, sockets are FIFOs marked ``DSEC.kind=socket``. The root comes first, and each directory before what is in it.
"""

from __future__ import annotations

import base64
import errno
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from dsec.images.attributes import is_whiteout
from dsec.images.members import Refused
from dsec.images.tools import Check
from dsec.images.tree import attribute_names

KIND: Final = "DSEC.kind"
SOCKET: Final = "socket"
_XATTR: Final = "LIBARCHIVE.xattr."
_SECOND: Final = 10**9
_CHUNK: Final = 2**20
_TYPES: Final = {
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFSOCK: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
}


def write_tree(tree: Path, out: BinaryIO, check: Check) -> None:
    """Write the archive of a tree that nobody changes. Blocking.

    Raises: OSError: something could not be read or written, or is a device that is no whiteout.
    """
    first: dict[tuple[int, int], str] = {}
    for path, info in _walk(tree):
        check()
        name = os.fspath(path.relative_to(tree))
        # The caller's own path may be a link, /proc/self/fd/N; none of ours is followed.
        member = _member(f"{tree}/." if path == tree else os.fspath(path), name, info)
        identity = (info.st_dev, info.st_ino)
        if member.type != tarfile.DIRTYPE and info.st_nlink > 1 and not is_whiteout(info):
            linked = first.setdefault(identity, name)
            if linked != name:
                member.type, member.linkname, member.size = tarfile.LNKTYPE, linked, 0
                member.pax_headers = {}
        out.write(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        if member.type == tarfile.REGTYPE:
            _content(path, member.size, out, check)
    out.write(bytes(2 * tarfile.BLOCKSIZE))


def _walk(tree: Path) -> Iterator[tuple[Path, os.stat_result]]:
    pending = [tree]
    while pending:
        path = pending.pop()
        info = path.stat() if path == tree else path.lstat()
        yield path, info
        if stat.S_ISDIR(info.st_mode):
            pending.extend(sorted(path.iterdir(), key=os.fsencode, reverse=True))


def _member(path: str, name: str, info: os.stat_result) -> tarfile.TarInfo:
    kind = stat.S_IFMT(info.st_mode)
    if kind not in _TYPES or (kind == stat.S_IFCHR and not is_whiteout(info)):
        raise OSError(errno.EINVAL, "a device", path)
    member = tarfile.TarInfo(name)
    member.type, member.mode = _TYPES[kind], stat.S_IMODE(info.st_mode)
    member.uid, member.gid = info.st_uid, info.st_gid
    member.mtime, rest = divmod(info.st_mtime_ns, _SECOND)
    headers = dict(_attributes(path))
    if rest:
        headers["mtime"] = f"{member.mtime}.{rest:09d}"
    if kind == stat.S_IFSOCK:
        headers[KIND] = SOCKET
    if kind == stat.S_IFREG:
        member.size = info.st_size
    if kind == stat.S_IFLNK:
        member.linkname = os.readlink(path)
    member.pax_headers = headers
    return member


def _attributes(path: str) -> Iterator[tuple[str, str]]:
    """As headers."""
    for name in attribute_names(path):
        value = os.getxattr(path, name, follow_symlinks=False)
        yield _XATTR + quote_from_bytes(os.fsencode(name), safe=""), base64.b64encode(value).decode()


def _content(path: Path, size: int, out: BinaryIO, check: Check) -> None:
    left = size
    with path.open("rb", buffering=0) as file:
        while left:
            check()
            data = file.read(min(_CHUNK, left))
            if not data:
                raise OSError(errno.EIO, "a file became shorter while it was read", str(path))
            out.write(data)
            left -= len(data)
    out.write(bytes(-size % tarfile.BLOCKSIZE))


def attributes_of(member: tarfile.TarInfo) -> dict[str, bytes]:
    """Extended attributes of an entry.  Raises: Refused."""
    found: dict[str, bytes] = {}
    for key, value in member.pax_headers.items():
        if key.startswith(_XATTR):
            name = os.fsdecode(unquote_to_bytes(key.removeprefix(_XATTR)))
            try:
                found[name] = base64.b64decode(value, validate=True)
            except ValueError as error:
                raise Refused(f"an attribute has no value: {error}") from error
    return found


def time_of(member: tarfile.TarInfo) -> int:
    """ns since the epoch.  Raises: Refused: none that such an archive has."""
    text = member.pax_headers.get("mtime", "")
    seconds, point, rest = text.partition(".")
    if not text:
        return int(member.mtime) * _SECOND
    if not (
        seconds.isascii()
        and seconds.isdigit()
        and point
        and len(rest) == 9
        and rest.isascii()
        and rest.isdigit()
    ):
        raise Refused("an entry has a date that is none")
    return int(seconds) * _SECOND + int(rest)
