"""The inside of one sandbox, as the engine sees it: commands and files.

A guest is hostile: whatever it answers is checked, bounded, and at worst a :class:`~dsec.errors.ProtocolError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator

from dsec.model.execs import Chunk, Command, ExecInfo, Exit, PtySize
from dsec.model.files import Change, Entry, FileEvent, Identity, Listing, TreePiece, WriteOptions
from dsec.model.ids import ExecId


class GuestExec(ABC):
    """One command, attached. Not consuming ``chunks`` blocks the command once its window is full, and nothing else.

    Attributes:
        pid: inside the sandbox; 0 before it has begun, and for one that could not be started.
        has_begun: the guest has said that it started, or could not be started.
        refused: the guest would not take it: it never ran and never will.
    """

    id: ExecId
    pid: int
    has_begun: bool = False
    refused: bool = False

    @abstractmethod
    async def begun(self) -> None:
        """Wait until the guest has said that it has started (or could not be: an ordinary exit, 127 or 126).

        Raises:
            Conflict, Busy, RuntimeUnavailable: as :meth:`Guest.post`. UnknownOutcome: init was lost first.
        """

    @abstractmethod
    def chunks(self) -> AsyncIterator[Chunk]:
        """Output as it comes, per stream in order; ends when the command has ended. A later call goes on from there."""

    @abstractmethod
    async def wait(self) -> Exit:
        """How it ended; output must be consumed (or ``discard`` called) for that to come.

        Raises:
            UnknownOutcome: init was lost first. Conflict, Busy, RuntimeUnavailable: it was ``refused``.
        """

    @abstractmethod
    def discard(self) -> None:
        """Consume and drop all further output."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Standard input; waits while the command does not read. After the command's end it does nothing."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """End of standard input."""

    @abstractmethod
    def detach(self) -> None:
        """Stop listening; the command goes on. Who still waits for it gets Conflict."""


class Guest(ABC):
    """Commands of one sandbox, over one connection."""

    @property
    def lost(self) -> bool:
        """The connection is gone, whatever the reason; another must be made."""
        return False

    @abstractmethod
    async def post(self, command: Command) -> GuestExec:
        """Ask for a command to be started, and wait for nothing but room to send. Cancelled here, it was not sent.

        What it raises: BadRequest; Busy: too many operations; RuntimeUnavailable: the guest is gone, nothing was sent.
        What whoever waits for the command gets when the guest refuses it:

        Raises:
            Conflict: this exec id was used before.
            Busy: the guest keeps its maximum of unacknowledged commands.
            RuntimeUnavailable: the guest cannot start anything now.
        """

    @abstractmethod
    async def attach(self, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0) -> GuestExec:
        """Listen again from these offsets; what is no longer kept shows as a gap.  Raises: NotFound."""

    @abstractmethod
    async def signal(self, exec_id: ExecId, signo: int, *, tree: bool = False) -> None:
        """Signal the command, or kill its whole tree. One that has ended is not an error.  Raises: NotFound."""

    @abstractmethod
    async def resize(self, exec_id: ExecId, size: PtySize) -> None:
        """Tell a pty its size."""

    @abstractmethod
    async def forget(self, *exec_ids: ExecId) -> None:
        """These outcomes are stored: the guest may drop them. Unknown ids are not an error."""

    @abstractmethod
    async def execs(self) -> tuple[ExecInfo, ...]:
        """All that run, and all ended ones not yet forgotten."""

    @abstractmethod
    async def shift(self, seconds: float) -> None:
        """Move every deadline later (a pause does not count). Sent before a thaw it takes effect first; does not wait for the answer."""

    @abstractmethod
    async def ping(self) -> None:
        """Wait until it has seen everything that was sent so far.  Raises: RuntimeUnavailable."""

    @property
    @abstractmethod
    def files(self) -> GuestFiles:
        """Files, over the same connection."""

    @abstractmethod
    async def close(self) -> None:
        """Drop the connection; commands go on."""


class GuestFiles(ABC):
    """Files of one sandbox. Every path is resolved inside it, by its init.

    Every method raises:
        FileMissing, FileDenied, FileIsDirectory, FileKind, QuotaExceeded, FileProblem: as the kernel inside said.
        RuntimeUnavailable: the guest is gone.
    """

    @abstractmethod
    def read(
        self, path: str, *, who: Identity, offset: int = 0, length: int = 2**63 - 1
    ) -> AsyncIterator[bytes]:
        """Content in pieces of at most 256 KiB. Leaving the iterator early cancels it."""

    @abstractmethod
    async def write(
        self, path: str, content: AsyncIterator[bytes | memoryview], *, who: Identity, options: WriteOptions
    ) -> Entry:
        """Write all of ``content``; on any failure, or cancellation, an atomic write leaves nothing."""

    @abstractmethod
    async def stat(self, path: str, *, who: Identity, follow: bool = True) -> Entry:
        """One entry."""

    @abstractmethod
    async def list(self, path: str, *, who: Identity, limit: int = 100_000) -> Listing:
        """Entries of a directory, sorted by name."""

    @abstractmethod
    async def apply(self, change: Change, *, who: Identity) -> None:
        """Make a directory, rename, remove, set attributes, or make a batch of entries."""

    @abstractmethod
    async def watch(
        self, path: str, *, who: Identity, recursive: bool = False
    ) -> AsyncGenerator[FileEvent, None]:
        """Events from the moment on at which this returns; closing the iterator ends it."""

    @abstractmethod
    def tree(
        self, path: str, *, who: Identity, max_bytes: int = 2**40, max_entries: int = 1_000_000
    ) -> AsyncIterator[TreePiece]:
        """A directory tree, depth first, the root as ``.``; symlinks are reported, never followed."""
