"""Bodies that people write: what the model has no class of its own for. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from dsec.model.journal import Record
from dsec.model.sandbox import SandboxInfo, SandboxSpec

T = TypeVar("T")

Count = Annotated[int, Meta(ge=1, le=10_000)]


class VolumeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A volume, as :class:`dsec.model.sandbox.Volume`."""

    source: str
    target: str
    read_only: bool = False


class LimitsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Hard ceilings; what is not named is as the template has it, or as by default."""

    cpu_millis: int | None = None
    memory_mib: int | None = None
    pids: int | None = None
    disk_mib: int | None = None
    open_files: int | None = None
    output_bytes: int | None = None


class CreateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A sandbox to make: from a template (or a snapshot's id) and what goes before it, or with ``spec`` exactly that one.

    ``cold``: only written down; the first act in it starts it. ``project``: for administrators.
    """

    template: str | None = None
    level: str | None = None
    ttl: float | None = None
    idle: float | None = None
    limits: LimitsBody | None = None
    read_only: bool | None = None
    env: dict[str, str] | None = None
    volumes: tuple[str | VolumeBody, ...] | None = None
    labels: dict[str, str] | None = None
    project: str | None = None
    cold: bool = False
    spec: SandboxSpec | None = None
    snapshot: str | None = None


class BatchBody(CreateBody, forbid_unknown_fields=True, kw_only=True):
    """Cold sandboxes, ``count`` of them, that are all alike."""

    count: Count


class ExtendBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``ttl``: seconds from now, 0 = without end."""

    ttl: float


class ForkBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How many children, and what they begin with."""

    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    kind: str = "files"


class RollbackBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The snapshot to go back to."""

    snapshot: str


class KindBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a snapshot is to hold."""

    kind: str = "files"


class PtyBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Size of a terminal in characters."""

    rows: Annotated[int, Meta(ge=1, le=65535)] = 24
    cols: Annotated[int, Meta(ge=1, le=65535)] = 80


class ExecBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A command: one of ``argv``, ``argv_base64`` (any bytes) and ``command`` (for a shell).

    ``wait``: the answer is its result, and a client that leaves kills it. Otherwise it goes on by itself.
    ``stdin``, or ``stdin_base64``: all of standard input. ``stdin_open``: it comes later.
    """

    argv: tuple[str, ...] | None = None
    argv_base64: tuple[bytes, ...] | None = None
    command: str | None = None
    env: dict[str, str] | None = None
    cwd: str = ""
    user: str = ""
    timeout: float = 0.0
    stdin: str | None = None
    stdin_base64: bytes | None = None
    stdin_open: bool = False
    pty: PtyBody | None = None
    scratch: bool = False
    wait: bool = True


class ExecAnswer(msgspec.Struct, omit_defaults=False, kw_only=True):
    """How a command ended. Output is text when it is UTF-8, else ``…_base64`` has its bytes."""

    id: str
    exit_code: int
    stdout: str | msgspec.UnsetType = msgspec.UNSET
    stderr: str | msgspec.UnsetType = msgspec.UNSET
    stdout_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    stderr_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    start_errno: int
    signal: int
    timed_out: bool
    truncated: bool
    dropped: int
    oom: bool
    duration: float


class ExecEnd(msgspec.Struct, kw_only=True):
    """How a command ended, without its output."""

    id: str
    exit_code: int
    start_errno: int
    signal: int
    timed_out: bool
    truncated: bool
    dropped: int
    oom: bool
    duration: float


class Started(msgspec.Struct, kw_only=True):
    """A command that goes on by itself."""

    id: str
    pid: int


class SignalBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``tree``: kill the whole process tree instead."""

    signal: Annotated[int, Meta(ge=0, le=64)]
    tree: bool = False


Mode = Annotated[int, Meta(ge=0, le=0o7777)]
Owner = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class MakeDirBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="mkdir"):
    """Make a directory; with ``parents`` missing parents too, and an existing one is no error."""

    path: str
    mode: Mode = 0o755
    parents: bool = False


class RenameBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="rename"):
    """Rename; without ``replace`` an existing target is an error."""

    source: str
    target: str
    replace: bool = True


class RemoveBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="remove"):
    """Remove a file, or with ``recursive`` a tree."""

    path: str
    recursive: bool = False


class SetAttrBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="setattr"):
    """Change what is given. Symlinks are followed only with ``follow``."""

    path: str
    mode: Mode | None = None
    owner: tuple[Owner, Owner] | None = None
    mtime_ns: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    follow: bool = True


ChangeBody = MakeDirBody | RenameBody | RemoveBody | SetAttrBody


class SandboxPage(msgspec.Struct, kw_only=True):
    """A part of a list; ``next`` is the cursor of the next one, "" = this was the last."""

    items: tuple[SandboxInfo, ...]
    next: str


class RecordPage(msgspec.Struct, kw_only=True):
    """Records, in order; ``next`` is the number after which there may be more of them, "" = there are none."""

    items: tuple[Record, ...]
    next: str


class Items(msgspec.Struct, Generic[T], kw_only=True):
    """A list that is whole."""

    items: tuple[T, ...]


class Ids(msgspec.Struct, kw_only=True):
    """Of what was made."""

    ids: tuple[str, ...]


class TokenBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``ttl``: seconds for which the key is good, 0 = for as long as the sandbox is there."""

    ttl: float = 0.0


class Empty(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Nothing is to be said."""
