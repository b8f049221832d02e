"""A child process that makes a tree of image layers: nothing it is fed can reach outside, because it has no outside.

It changes its root to the empty tree before it reads the first byte of a stranger's archive, so that every path and link in
it, however crooked, is resolved inside. After that it imports nothing (modules would come from the tree).

Standard input is one JSON object (see :func:`main`), standard output another: a report, or what was refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import posixpath
import resource
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dsec.images import rootfs
from dsec.images.limits import DEPTH, IDS, LATEST_SECONDS, PATH_BYTES
from dsec.images.members import CHUNK, UNREADABLE, Refused, Stream, decompressed, entries, shown

_MEMORY: Final = 2**30  # bytes of address space: headers may claim to be huge
_NOBODY: Final = 65_534
_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"


class Unpacker:
    """Applies layers, lowest first, to the root of this process.

    Args:
        max_bytes: of all files of all layers.
        max_entries: of all layers, also those that are skipped.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self.bytes = self.entries = self.newest = 0
        self.times: dict[str, int] = {}
        self.counts = dict.fromkeys(("special", "setuid", "xattrs", "capabilities", "owners"), 0)
        self.skipped: list[str] = []
        self._made: set[str] = set()  # by this layer, with the directories above
        self._left = 0  # bytes that files of this layer may still have

    def apply(self, stream: Stream, made_after: int) -> None:
        """One layer; its files may be together as large as its archive (sparse files only seem to be more).

        Args:
            made_after: ns; what is dated later does not count as the newest.

        Raises: Refused, OSError, and what tarfile raises.
        """
        self._made = {"/"}
        self._left = min(stream.limit, self._max_bytes - self.bytes)
        with entries(stream) as tar:
            for member in tar:
                self.entries += 1
                if self.entries > self._max_entries:
                    raise Refused(f"the image has more than {self._max_entries} entries", "too_large")
                try:
                    self._entry(tar, member, made_after)
                except (ValueError, OverflowError, OSError) as error:
                    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    raise Refused(f"entry {shown(member.name)}: {error}") from error

    def _entry(self, tar: tarfile.TarFile, member: tarfile.TarInfo, made_after: int) -> None:
        path = self._place(member.name)
        if path == "/":
            return
        base = posixpath.basename(path)
        if base.startswith(_WHITEOUT):
            self._white_out(path, base)
            return
        self._note(member)
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            self.counts["special"] += 1
            if len(self.skipped) < 20:
                self.skipped.append(shown(member.name))
            return
        when = _when(member)
        if when < made_after:
            self.newest = max(self.newest, when)
        self._make(tar, member, path)
        self._remember(path)
        if member.islnk():
            return  # one file: owner, mode and time are those of its first name
        self._dress(member, path, when)

    def _place(self, name: str) -> str:
        """Where an entry goes: its directory made and free of links, so that a path has one spelling."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if len(os.fsencode(name)) > PATH_BYTES or len(parts) > DEPTH:
            raise Refused(f"entry {shown(name)} lies too deep", "too_large")
        if ".." in parts:
            raise Refused(f"entry {shown(name)} has '..' in its path")
        if not parts:
            return "/"
        parent = "/" + "/".join(parts[:-1])
        if not os.path.isdir(parent):
            self._make_parents(parts[:-1])
        path = posixpath.join(os.path.realpath(parent), parts[-1])
        if len(os.fsencode(path)) > PATH_BYTES or path.count("/") > DEPTH:
            raise Refused(f"entry {shown(name)} lies too deep", "too_large")
        return path

    def _make_parents(self, parts: list[str]) -> None:
        """Directories that no entry names; what is no directory in their place goes."""
        path = "/"
        for part in parts:
            path = posixpath.join(path, part)
            if not os.path.isdir(path):
                rootfs.remove(Path(path))
                os.mkdir(path, 0o755)

    def _remember(self, path: str) -> None:
        while path not in self._made:
            self._made.add(path)
            path = posixpath.dirname(path)

    def _white_out(self, path: str, base: str) -> None:
        """Take away what lower layers have; never what this one brought."""
        directory = posixpath.dirname(path)
        if base == _OPAQUE:
            self._empty(directory)
            return
        victim = base.removeprefix(_WHITEOUT)
        if victim in ("", ".", ".."):
            raise Refused(f"whiteout {shown(path)} names nothing")
        target = posixpath.join(directory, victim)
        if not base.startswith(".wh..wh.") and target not in self._made:
            rootfs.remove(Path(target))

    def _empty(self, directory: str) -> None:
        for name in os.listdir(directory):
            path = posixpath.join(directory, name)
            if path not in self._made:
                rootfs.remove(Path(path))
            elif os.path.isdir(path) and not os.path.islink(path):
                self._empty(path)

    def _note(self, member: tarfile.TarInfo) -> None:
        """Count what is not kept: capabilities and other attributes, setuid, ids that a sandbox cannot express."""
        self.counts["xattrs"] += any(".xattr." in key for key in member.pax_headers)
        self.counts["capabilities"] += "SCHILY.xattr.security.capability" in member.pax_headers
        self.counts["setuid"] += bool(member.isreg() and member.mode & 0o6000)
        self.counts["owners"] += not (0 <= member.uid < IDS and 0 <= member.gid < IDS)

    def _make(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.isdir():
            if not os.path.isdir(path) or os.path.islink(path):
                rootfs.remove(Path(path))
                os.mkdir(path, 0o700)
            return
        if member.islnk():
            source = self._place(member.linkname)
            if source != path:
                rootfs.remove(Path(path))
                os.link(source, path, follow_symlinks=False)
            return
        rootfs.remove(Path(path))
        if member.issym():
            os.symlink(member.linkname, path)
        else:
            self._file(tar, member, path)

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        self.bytes += member.size
        self._left -= member.size
        if member.size < 0 or self._left < 0:
            raise Refused(
                f"the files of a layer are larger than allowed ({self.bytes} bytes so far)", "too_large"
            )
        source = tar.extractfile(member)
        if source is None:
            raise Refused(f"entry {shown(member.name)} has no content")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            while data := source.read(CHUNK):
                file.write(data)

    def _dress(self, member: tarfile.TarInfo, path: str, when: int) -> None:
        """Owner, mode (without setuid and setgid: nothing inside may gain privileges) and time."""
        uid = member.uid if 0 <= member.uid < IDS else _NOBODY
        gid = member.gid if 0 <= member.gid < IDS else _NOBODY
        os.chown(path, uid, gid, follow_symlinks=False)
        if not member.issym():
            os.chmod(path, member.mode & (0o1777 if member.isdir() else 0o777))
        if member.isdir():
            self.times[path] = when
        else:
            os.utime(path, ns=(when, when), follow_symlinks=False)


def main() -> None:
    """Do the job that standard input describes.

    ``root``: an empty directory. ``layers``: each with ``fd``, ``gzip`` (bool), ``limit`` (bytes, decompressed) and
    ``diff_id`` ("" = not known). ``max_bytes``, ``max_entries``. ``made_after``: ns. ``apt_sources``: a text, for Debian
    systems that were built here, or null.
    """
    report_on(_run)


def report_on(work: Callable[[dict[str, Any]], dict[str, object]]) -> None:
    """Do the job that standard input describes, and write to standard output what came of it."""
    job = json.load(sys.stdin)
    try:
        report = work(job)
    except Refused as error:
        report = {"error": str(error), "code": error.code}
    except UNREADABLE as error:
        report = {"error": f"a layer cannot be read: {error}", "code": "bad_request"}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        report = {"error": str(error), "code": "storage_full" if full else "bad_request"}
    except MemoryError:
        report = {"error": f"a layer needs more than {_MEMORY} bytes of memory to read", "code": "too_large"}
    json.dump(report, sys.stdout)


def _run(job: dict[str, Any]) -> dict[str, object]:
    enter(job["root"])
    made_after = int(job["made_after"])
    unpacker = Unpacker(int(job["max_bytes"]), int(job["max_entries"]))
    for number, layer in enumerate(job["layers"]):
        with os.fdopen(layer["fd"], "rb") as file:
            stream = Stream(decompressed(file, packed=layer["gzip"]), int(layer["limit"]))
            unpacker.apply(stream, made_after)
            found = stream.digest()
        if layer["diff_id"] not in ("", found):
            raise Refused(f"layer {number} is {found} when decompressed, not {layer['diff_id']}")
    rootfs.normalise(unpacker.newest)
    if job["apt_sources"] is not None:
        rootfs.clean_debian(job["apt_sources"], unpacker.newest)
    rootfs.settle(unpacker.times, unpacker.newest, made_after)
    return {
        "entries": unpacker.entries,
        "bytes": unpacker.bytes,
        "dropped": unpacker.counts,
        "skipped": unpacker.skipped,
    }


def enter(root: str) -> None:
    """No way back, and nothing is imported from where we go; memory is bounded."""
    hashlib.sha256(b"").hexdigest()  # loads what it needs while that can be found
    os.umask(0o022)
    os.chdir(root)
    os.chroot(".")
    os.chdir("/")
    sys.path.clear()
    sys.meta_path.clear()
    sys.path_hooks.clear()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _when(member: tarfile.TarInfo) -> int:
    """Its time, ns, within what can be kept.  Raises: ValueError: not a number."""
    return int(min(max(member.mtime, 0), LATEST_SECONDS) * 10**9)
