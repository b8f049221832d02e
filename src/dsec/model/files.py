"""Files of a sandbox, as the engine speaks of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from dsec.model.checks import check_flag, check_mode, check_path


class FileType(StrEnum):
    """Kind of a directory entry."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHAR_DEVICE = "char_device"
    BLOCK_DEVICE = "block_device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a directory, or a file that was asked for.

    Attributes:
        name: any bytes but NUL and "/", undecodable ones as surrogate escapes. type: what it is.
        mode: permission bits. size: bytes. uid, gid: of the owner, as seen inside.
        mtime_ns: of the last change of content, nanoseconds since the epoch.
        inode: its number. links: hard links to it. target: of a symlink, else "".
    """

    name: str
    type: FileType
    mode: int
    size: int
    uid: int
    gid: int
    mtime_ns: int
    inode: int = 0
    links: int = 1
    target: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose permissions a file operation has."""

    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries of a directory; ``truncated`` when there were more than the limit."""

    entries: tuple[Entry, ...]
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class MakeDir:
    """Make a directory; with ``parents`` missing parents too, and an existing one is no error."""

    path: str
    mode: int = 0o755
    parents: bool = False

    def __post_init__(self) -> None:
        check_path("path", self.path)
        check_mode("mode", self.mode)
        check_flag("parents", self.parents)


@dataclass(frozen=True, slots=True)
class Rename:
    """Rename; without ``replace`` an existing target is an error."""

    source: str
    target: str
    replace: bool = True

    def __post_init__(self) -> None:
        check_path("source", self.source)
        check_path("target", self.target)
        check_flag("replace", self.replace)


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file, or with ``recursive`` a tree."""

    path: str
    recursive: bool = False

    def __post_init__(self) -> None:
        check_path("path", self.path)
        check_flag("recursive", self.recursive)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAttr:
    """Change what is not None. Symlinks are followed only with ``follow``."""

    path: str
    mode: int | None = None
    owner: tuple[int, int] | None = None
    mtime_ns: int | None = None
    follow: bool = True


class BatchKind(IntEnum):
    """What one step of a batch makes."""

    DIRECTORY = 1
    FILE = 2
    SYMLINK = 3
    HARD_LINK = 4


@dataclass(frozen=True, slots=True)
class BatchOp:
    """One entry to make beneath the root of a batch; ``data`` is a file's content or a link's target."""

    kind: BatchKind
    path: bytes
    mode: int
    mtime_ns: int
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries to make beneath ``root``, in order, never through a symlink."""

    root: str
    ops: tuple[BatchOp, ...]


Change = MakeDir | Rename | Remove | SetAttr | Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a file is written.

    Attributes:
        mode: permission bits of a new file. parents: make missing directories. atomic: readers see the old content or the whole new one.
        root: when not "", the path is relative and resolved beneath it without following symlinks.
    """

    mode: int = 0o644
    create: bool = True
    exclusive: bool = False
    append: bool = False
    parents: bool = False
    atomic: bool = False
    root: str = ""

    def __post_init__(self) -> None:
        check_mode("mode", self.mode)
        for name in ("create", "exclusive", "append", "parents", "atomic"):
            check_flag(name, getattr(self, name))


class FileEventKind(StrEnum):
    """What happened to a watched path; ``OVERFLOW`` = some events were lost."""

    CREATED = "created"
    MODIFIED = "modified"
    REMOVED = "removed"
    MOVED_FROM = "moved_from"
    MOVED_TO = "moved_to"
    ATTRIBUTES = "attributes"
    OVERFLOW = "overflow"


@dataclass(frozen=True, slots=True)
class FileEvent:
    """One event below a watched directory.

    Attributes:
        kind: what happened. path: relative to the watched directory. is_dir: it is a directory.
        cookie: the same for the two halves of a move, else 0.
    """

    kind: FileEventKind
    path: str
    is_dir: bool = False
    cookie: int = 0


class TreeTag(StrEnum):
    """What a piece of a streamed tree is."""

    ENTRY = "entry"
    CONTENT = "content"
    FILE_END = "file_end"
    TREE_END = "tree_end"


@dataclass(frozen=True, slots=True)
class TreePiece:
    """A piece of a streamed tree. ``status``: FILE_END 0 whole, 1 shorter, 2 unreadable; TREE_END 0 whole, 1 bytes, 2 entries."""

    tag: TreeTag
    entry: Entry | None = None
    content: bytes = b""
    status: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What a tree transfer moved.

    Attributes:
        entries: files, directories and links moved. bytes: of content.
        skipped: entries left out (devices, sockets…), each with its path and why; at most the first 1,000.
        skipped_count: how many were left out.
    """

    entries: int = 0
    bytes: int = 0
    skipped: tuple[tuple[str, str], ...] = ()
    skipped_count: int = 0
