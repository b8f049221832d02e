"""One tree of errors. "Your command failed" is a value (:class:`~dsec.model.execs.ExecResult`); "we failed" is one of these.

``code`` crosses the wire and never changes; the message may be reworded at any time. ``facts`` are the numbers and
names behind the message; ``hint`` says what to do next, in words that a person and a language model can both act on.
"""

from __future__ import annotations

from typing import ClassVar


class DsecError(Exception):
    """Base of every error that DSec raises.

    Args:
        message: what happened, to which thing, with the numbers.
        hint: the next step, or "".
        facts: the same facts as values.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class BadRequest(DsecError, ValueError):
    """An argument is wrong: the message names the field and what it may be."""

    code = "bad_request"


class NotFound(DsecError):
    """There is no such thing, or it is somebody else's: both read alike."""

    code = "not_found"


class Conflict(DsecError):
    """The thing exists already, or is in a state in which this cannot be done."""

    code = "conflict"


class Busy(DsecError):
    """A bound is reached *now*: the same request can succeed later."""

    code, retryable = "busy", True


class OverQuota(Busy):
    """A project has all that it may have. ``facts`` holds ``quota``, ``used`` and ``limit``."""

    code = "over_quota"


class Unsupported(DsecError):
    """This can never work here as it was asked for (wrong level, missing feature)."""

    code = "unsupported"


class IsolationUnavailable(Unsupported):
    """The isolation level cannot be had on this machine; the message says which layer is missing and why."""

    code = "isolation_unavailable"


class Denied(DsecError):
    """A policy, an owner or a permission forbids it."""

    code = "denied"


class Unauthenticated(DsecError):
    """No key was given, or one that is not good (any more)."""

    code = "unauthenticated"


class RuntimeUnavailable(DsecError):
    """The isolation machinery failed before the caller's command was reached."""

    code, retryable = "runtime_unavailable", True


class SandboxFailed(DsecError):
    """The sandbox died (its init ended, or was killed for memory); its reason is in the message."""

    code = "sandbox_failed"


class BuildFailed(DsecError):
    """A command that a template runs when it is built did not succeed. ``facts`` holds its ``field`` and ``exit_code``."""

    code = "build_failed"


class UnknownOutcome(DsecError):
    """The command was started and its init was lost before it told how it ended."""

    code = "unknown_outcome"


class FileProblem(DsecError):
    """A file operation failed inside the sandbox. ``facts`` holds ``path`` and, where the kernel said one, ``errno``."""

    code = "file_error"


class FileMissing(FileProblem, FileNotFoundError):
    """No such file or directory in the sandbox."""

    code = "file_not_found"


class FileDenied(FileProblem, PermissionError):
    """The sandbox's user may not do this to that file."""

    code = "file_denied"


class FileIsDirectory(FileProblem, IsADirectoryError):
    """A file was needed and this is a directory."""

    code = "file_is_directory"


class FileKind(FileProblem):
    """Neither a regular file nor a directory: devices, FIFOs and sockets are refused."""

    code = "file_kind"


class QuotaExceeded(FileProblem):
    """The sandbox's disk quota is used up (ENOSPC or EDQUOT inside)."""

    code = "quota_exceeded"


class TooLarge(DsecError):
    """More bytes or entries than the stated bound."""

    code = "too_large"


class CleanupFailed(DsecError):
    """Something could not be removed; it is recorded and will be retried."""

    code, retryable = "cleanup_failed", True


class StoreDamaged(DsecError):
    """The journal or a stored file is not what was written; nothing was repaired silently."""

    code = "store_damaged"


class StorageFull(DsecError):
    """The disk under the state directory is full; nothing was acknowledged that is not stored."""

    code, retryable = "storage_full", True


class ProtocolError(DsecError):
    """The other side (a sandbox's init, the spawner) sent something that the protocol does not allow."""

    code = "protocol_error"


class TimedOut(DsecError, TimeoutError):
    """A limit of time passed, and what it limited is over."""

    code = "timed_out"


def all_errors() -> tuple[type[DsecError], ...]:
    """Every class of the tree, base first, in a stable order."""
    found: list[type[DsecError]] = []
    pending: list[type[DsecError]] = [DsecError]
    while pending:
        cls = pending.pop(0)
        if cls not in found:
            found.append(cls)
            pending.extend(cls.__subclasses__())
    return tuple(found)
