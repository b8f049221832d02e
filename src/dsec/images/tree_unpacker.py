"""A child process that makes a tree of an archive as :mod:`dsec.images.tree_archive` writes them, in a root of its own.

The archive may be anybody's. What is in it is made exactly as it says, or refused: each entry once, after the directory it lies in, so that
no link is on the way to any; no device but a whiteout; no attribute that could mean something to an overlay but the one that
hides a directory. Whether it is the tree that it is said to be, the parent finds out by its digest.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
from typing import Any, Final

from dsec.images.attributes import MAX_BYTES, OPAQUE, OPAQUE_VALUE, is_kept
from dsec.images.limits import DEPTH, IDS, LATEST, PATH_BYTES
from dsec.images.members import CHUNK, Refused, Stream, decompressed, entries, shown
from dsec.images.tree_archive import KIND, SOCKET, attributes_of, time_of
from dsec.images.unpacker import enter, report_on

_HEADERS: Final = 64 * 2**20  # bytes of headers that an archive may have, however small it is
_ROOT: Final = "."


class TreeUnpacker:
    """Makes the entries of one archive in the root of this process.

    Args:
        max_bytes: of all files. max_entries: of all names.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self.bytes = self.entries = 0
        self._folders: dict[str, tarfile.TarInfo] = {}  # in the order in which they were made
        self._files: set[str] = set()

    def apply(self, stream: Stream) -> None:
        """Raises: Refused, OSError, and what tarfile raises."""
        with entries(stream) as tar:
            for member in tar:
                self.entries += 1
                if self.entries > self._max_entries:
                    raise Refused(f"a tree has more than {self._max_entries} entries", "too_large")
                try:
                    self._entry(tar, member)
                except (ValueError, OverflowError) as error:
                    raise Refused(f"entry {shown(member.name)}: {error}") from error
        if not self._folders:
            raise Refused("an archive without a tree")
        for path, member in reversed(self._folders.items()):
            self._dress(member, path)

    def _entry(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = self._place(member)
        if member.isdir():
            if path != _ROOT:
                os.mkdir(path, 0o700)
            self._folders[path] = member
            return
        self._files.add(path)
        if member.islnk():
            if member.linkname not in self._files or member.linkname == path:
                raise Refused(f"entry {shown(member.name)} is a link to what is no file")
            os.link(member.linkname, path, follow_symlinks=False)
            return
        self._make(tar, member, path)
        self._dress(member, path)

    def _place(self, member: tarfile.TarInfo) -> str:
        """Where it goes: below a directory that this archive has made, where nothing is yet."""
        name = member.name
        if name == _ROOT and not self._folders and member.isdir():
            return name
        if len(os.fsencode(name)) > PATH_BYTES or name.count("/") >= DEPTH:
            raise Refused(f"entry {shown(name)} lies too deep", "too_large")
        folder, base = posixpath.split(name)
        crooked = base in ("", ".", "..") or folder == _ROOT or posixpath.join(folder, base) != name
        if crooked or (folder or _ROOT) not in self._folders or name in self._folders or name in self._files:
            raise Refused(f"entry {shown(name)} is out of its place")
        return name

    def _make(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.isreg():
            self._file(tar, member, path)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.isfifo():
            socket = member.pax_headers.get(KIND) == SOCKET
            os.mknod(path, (stat.S_IFSOCK if socket else stat.S_IFIFO) | 0o600)
        elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        else:
            raise Refused(f"entry {shown(member.name)} is a device, or something else that no tree has")

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        self.bytes += member.size
        if member.size < 0 or self.bytes > self._max_bytes:
            raise Refused(f"the files of a tree are larger than {self._max_bytes} bytes", "too_large")
        source = tar.extractfile(member)
        if source is None or member.issparse():
            raise Refused(f"entry {shown(member.name)} has no content of its own")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            while data := source.read(CHUNK):
                if data.count(0) == len(data):  # holes of the tree that was packed are holes again
                    file.seek(len(data), os.SEEK_CUR)
                else:
                    file.write(data)
            file.truncate(member.size)

    def _dress(self, member: tarfile.TarInfo, path: str) -> None:
        if not (0 <= member.uid < IDS and 0 <= member.gid < IDS):
            raise Refused(f"entry {shown(member.name)} belongs to {member.uid}:{member.gid}")
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
        self._attribute(member, path)
        if not member.issym():
            os.chmod(path, member.mode & 0o7777)
        when = time_of(member)
        if not 0 <= when <= LATEST:
            raise Refused(f"entry {shown(member.name)} has a date that is none")
        os.utime(path, ns=(when, when), follow_symlinks=False)

    def _attribute(self, member: tarfile.TarInfo, path: str) -> None:
        found = attributes_of(member)
        if sum(len(os.fsencode(name)) + len(value) for name, value in found.items()) > MAX_BYTES:
            raise Refused(f"entry {shown(member.name)} has too many attributes", "too_large")
        for name, value in found.items():
            hides = (name, value) == (OPAQUE, OPAQUE_VALUE) and member.isdir() and path != _ROOT
            if not (hides or is_kept(name)):
                raise Refused(f"entry {shown(member.name)} has the attribute {shown(name)}")
            os.setxattr(path, name, value, follow_symlinks=False)


def main() -> None:
    """Do the job that standard input describes.

    ``root``: an empty directory. ``fd``: a file whose ``size`` bytes from ``offset`` on are the archive, through gzip.
    ``max_bytes``: of all files. ``max_entries``.
    """
    report_on(_run)


class _Part(io.RawIOBase):
    """Some bytes of a file."""

    def __init__(self, file: int, offset: int, size: int) -> None:
        self._file, self._at, self._end = file, offset, offset + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._file, min(len(buffer), self._end - self._at), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _run(job: dict[str, Any]) -> dict[str, object]:
    enter(job["root"])
    unpacker = TreeUnpacker(int(job["max_bytes"]), int(job["max_entries"]))
    part = io.BufferedReader(_Part(job["fd"], int(job["offset"]), int(job["size"])), CHUNK)
    limit = 2 * int(job["max_bytes"]) + _HEADERS
    stream = Stream(decompressed(part, packed=True), limit)
    unpacker.apply(stream)
    stream.digest()  # what follows the archive is read as well: it may be damaged, or without end
    return {"entries": unpacker.entries, "bytes": unpacker.bytes}
