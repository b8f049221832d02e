"""What a command is, and how one ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from dsec.errors import BadRequest, TooLarge
from dsec.model.checks import check_flag, check_path, check_seconds, check_text, shown
from dsec.model.ids import ExecId

MAX_ARGUMENTS = 4096
MAX_ARGUMENT_BYTES = 196_608


class Stream(StrEnum):
    """Which output a chunk belongs to (a pty has ``STDOUT`` only)."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output.

    Attributes:
        stream: which one it belongs to. offset: of its first byte, counted in bytes from the start of that stream. data: exact bytes.
    """

    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PtySize:
    """Size of a terminal in characters."""

    rows: int = 24
    cols: int = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command, fully resolved: what the guest's init is asked to run.

    Attributes:
        uid, gid, groups: inside the sandbox.
        timeout: seconds, 0 = none; the whole process tree ends when it passes.
        keep: bytes per stream that init keeps for re-attachment.
        open_files: RLIMIT_NOFILE, 0 = unchanged.
        late: nobody waits for the start alone, so word of it may come together with what follows.
    """

    id: ExecId
    argv: Sequence[bytes]
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cwd: str = "/"
    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()
    pty: PtySize | None = None
    stdin: bool = False
    timeout: float = 0.0
    keep: int = 65536
    open_files: int = 0
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRequest:
    """One command as a caller asked for it, checked when made.

    Attributes:
        argv: program and arguments, without NUL.
        env: added to the sandbox's own variables.
        cwd: "" = the sandbox's working directory; a relative one is below that.
        user: "" = the level's ordinary user; "root" or "user" where the level has users.
        timeout: seconds until the whole process tree is ended, 0 = none.
        stdin: all of standard input, or None. stdin_open: more of it comes later, piece by piece.
        scratch: in a throw-away copy of the sandbox.
        mark: recorded with its intent, so that whoever asked for it finds it again; "" = none.
    """

    argv: tuple[bytes, ...]
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cwd: str = ""
    user: str = ""
    timeout: float = 0.0
    stdin: bytes | None = None
    stdin_open: bool = False
    pty: PtySize | None = None
    scratch: bool = False
    mark: str = ""

    def __post_init__(self) -> None:
        size = _check_argv(self.argv)
        if self.env:
            size += _check_env(self.env)
        if size > MAX_ARGUMENT_BYTES:
            raise TooLarge(
                f"argv and env: {size} bytes are more than {MAX_ARGUMENT_BYTES}",
                hint="send large data as stdin or a file",
            )
        check_seconds("timeout", self.timeout)
        if self.cwd != "":
            check_path("cwd", self.cwd)
        check_flag("scratch", self.scratch)


def _check_argv(argv: tuple[bytes, ...]) -> int:
    """Check the arguments; their size in bytes."""
    if not argv or not argv[0]:
        raise BadRequest("argv: it is empty", hint="give a program and its arguments")
    if len(argv) > MAX_ARGUMENTS:
        raise TooLarge(f"argv: {len(argv)} arguments are more than {MAX_ARGUMENTS}")
    size = 0
    for argument in argv:
        if b"\0" in argument:
            raise BadRequest(f"argv[{argv.index(argument)}]: it holds a NUL byte")
        size += len(argument)
    return size


def _check_env(env: Mapping[str, str]) -> int:
    """Check names and values; their size in bytes."""
    if len(env) > MAX_ARGUMENTS:
        raise TooLarge(f"env: {len(env)} variables are more than {MAX_ARGUMENTS}")
    size = 0
    for name, value in env.items():
        check_variable(name, value)
        size += len(name) + len(value) + 1
    return size


def check_variable(name: object, value: object) -> None:
    """Raises: BadRequest: not a variable of an environment."""
    check_text("env", name)
    check_text(f"env: {shown(name)}", value)
    if not name or "=" in str(name) or "\0" in str(name) or "\0" in str(value):
        raise BadRequest(f"env: {shown(name)} is not a name without '=' and NUL with a value without NUL")


class Cause(StrEnum):
    """Why a command ended."""

    ITSELF = "itself"
    TIMEOUT = "timeout"
    KILLED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a command ended, as init told it.

    Attributes:
        cause: why it ended.
        code: exit code; 127 or 126 when it could not be started, 128 + n when signal n ended it.
        signal: the signal that ended it, or 0.
        start_errno: errno of chdir, setuid or execve when the command never started, else 0.
        whole_sandbox: ending its tree took every process of the sandbox (its root had killed the tree's owner).
        stdout_bytes, stderr_bytes: produced in all.
        wall: seconds from start to end. user, system: CPU seconds of the tree. max_rss: bytes.
    """

    code: int
    signal: int = 0
    start_errno: int = 0
    cause: Cause = Cause.ITSELF
    whole_sandbox: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    user: float = 0.0
    system: float = 0.0
    max_rss: int = 0
    wall: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecInfo:
    """One command in a list.

    Attributes:
        id: for ``attach``. pid: inside the sandbox, 0 when it has ended. started_at: seconds since the epoch.
        exit: how it ended, None while it runs. argv: program and arguments, undecodable bytes as surrogate escapes.
    """

    id: ExecId
    pid: int
    started_at: float
    exit: Exit | None
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of a command that was reached, whatever its outcome.

    Attributes:
        id: of the command.
        exit_code: the exit code, or 128 + signal; 127 not found, 126 not executable.
        start_errno: errno when the command could not be started (``ENOENT``: no such program, or no such working
            directory), 0 when it was: then 126 and 127 are its own exit codes.
        stdout, stderr: exact bytes, up to ``output_bytes`` of the limits.
        signal: the signal that ended it, or 0. timed_out: its time was up, and its whole process tree is dead.
        truncated: bytes were dropped (the *first* bytes are kept). dropped: how many, of both streams together.
        duration: seconds.
        oom: the kernel killed a process of this sandbox for memory while the command ran.
    """

    id: ExecId
    exit_code: int
    stdout: bytes
    stderr: bytes
    start_errno: int = 0
    signal: int = 0
    timed_out: bool = False
    truncated: bool = False
    dropped: int = 0
    oom: bool = False
    duration: float = 0.0

    @property
    def text(self) -> str:
        """Standard output as UTF-8; undecodable bytes are replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Exit code 0, in time."""
        return self.exit_code == 0 and not self.timed_out
