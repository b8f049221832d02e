"""From an ERROR of init to one error of the tree. Init's words are hostile text: shown, cut, never interpreted."""

from __future__ import annotations

import errno
import os
from typing import Final

from dsec.errors import (
    BadRequest,
    Busy,
    Conflict,
    DsecError,
    FileDenied,
    FileIsDirectory,
    FileKind,
    FileMissing,
    FileProblem,
    NotFound,
    QuotaExceeded,
    RuntimeUnavailable,
    TooLarge,
)
from dsec.wire import guest as wire

_FILE: Final[dict[int, type[FileProblem]]] = {
    errno.ENOENT: FileMissing,
    errno.EACCES: FileDenied,
    errno.EPERM: FileDenied,
    errno.EISDIR: FileIsDirectory,
    errno.ENOSPC: QuotaExceeded,
    errno.EDQUOT: QuotaExceeded,
}
_HINTS: Final[dict[int, str]] = {
    errno.ENOENT: "list the directory above it to see what is there",
    errno.EACCES: "the sandbox's user may not; ask as root of the sandbox, or change the owner or mode",
    errno.EPERM: "the sandbox's user may not; ask as root of the sandbox, or change the owner or mode",
    errno.EISDIR: "name a file inside it, or list it",
    errno.ENOSPC: "remove files, or create the sandbox with a larger limits.disk_mib",
    errno.EDQUOT: "remove files, or create the sandbox with a larger limits.disk_mib",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.ELOOP: "a symlink is in the way where none is followed, or links form a loop",
    errno.ENAMETOOLONG: "a name has at most 255 bytes, a path 4095",
    errno.EEXIST: "remove it first, or ask for it to be replaced",
    errno.ENOTEMPTY: "ask for recursive removal",
    errno.EROFS: "only /workspace, /tmp and the home directory may be writable in this sandbox",
    errno.EXDEV: "the two paths are on different file systems: copy, then remove",
    errno.EBUSY: "it is a mount point or in use",
    errno.EINVAL: "check the path and its arguments",
}


def reason(error: wire.Error | wire.BatchDone) -> str:
    """What went wrong, in the kernel's words and init's."""
    said = "".join(c if c.isprintable() else "?" for c in error.message.decode("utf-8", "replace"))
    name = os.strerror(error.errno) if error.errno > 0 else ""
    return ": ".join(part for part in (name, said) if part) or "init gave no reason"


def file_error(error: wire.Error | wire.BatchDone, path: str) -> DsecError:
    """The error of a file operation on ``path``."""
    code = error.code if isinstance(error, wire.Error) else wire.ErrorCode.ERRNO
    why = reason(error)
    if code == wire.ErrorCode.MALFORMED:
        return BadRequest(f"{path!r}: {why}", path=path)
    if code == wire.ErrorCode.NOT_REGULAR and error.errno != errno.EISDIR:
        hint = "devices, FIFOs and sockets cannot be read or written as files"
        return FileKind(f"{path!r} is not a regular file", hint=hint, path=path, errno=error.errno)
    if code == wire.ErrorCode.BOUND:
        if error.errno == errno.EMFILE:
            return Busy(f"{path!r}: {why}", hint="try again later", path=path)
        return TooLarge(f"{path!r}: {why}", hint="ask for less at once", path=path)
    kind = _FILE.get(error.errno, FileProblem)
    return kind(f"{path!r}: {why}", hint=_HINTS.get(error.errno, ""), path=path, errno=error.errno)


def exec_error(error: wire.Error, exec_id: str) -> DsecError:
    """The error of an operation on an exec."""
    why = reason(error)
    if error.code == wire.ErrorCode.UNKNOWN_EXEC:
        return NotFound(f"exec {exec_id}: no such exec in this sandbox", exec_id=exec_id)
    if error.code == wire.ErrorCode.MALFORMED:
        return BadRequest(f"exec {exec_id}: {why}", exec_id=exec_id)
    if error.code == wire.ErrorCode.BOUND:
        hint = "wait for commands to end, or acknowledge ended ones"
        return Busy(f"exec {exec_id}: {why}", hint=hint, exec_id=exec_id)
    if error.errno == errno.EEXIST:
        hint = "an exec id runs once; attach to it, or choose a new one"
        return Conflict(f"exec {exec_id}: this id was used before", hint=hint, exec_id=exec_id)
    if error.errno == errno.EBUSY:
        return Conflict(f"exec {exec_id}: it still runs", hint="wait for it or kill it", exec_id=exec_id)
    return RuntimeUnavailable(f"exec {exec_id}: {why}", exec_id=exec_id, errno=error.errno)
