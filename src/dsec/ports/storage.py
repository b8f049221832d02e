"""Where files come from and go to: read-only images, writable layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.model.ids import SandboxId, SnapshotId, VolumeId

SHOWABLE: Final = (
    "/usr/bin",
    "/usr/games",
    "/usr/include",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec",
    "/usr/libx32",
    "/usr/sbin",
    "/usr/share",
)
"""All of this machine that a base may ever show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """What the maker of an OCI image says about running it; kept as found, obeyed by nobody yet.

    ``env``: ``NAME=value`` strings. ``user``: a name or number, perhaps ``user:group``; "" is root.
    """

    env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A read-only tree. ``path``: its EROFS file. ``digest``: over the canonical tree, ``sha256:…``.

    ``name`` is what was used, ``asked`` what was asked for when an alias led to it, else "". ``sources``: digests by which
    others know it (of its manifest, of the index that named the manifest). ``shows``: directories of this machine that a sandbox
    sees in their own places, read-only, beside the tree; all are of :data:`SHOWABLE`.
    """

    name: str
    digest: str
    path: Path
    shows: tuple[str, ...] = ()
    asked: str = ""
    sources: tuple[str, ...] = ()
    config: ImageConfig | None = None

    @property
    def mutable(self) -> bool:
        """What a sandbox sees of it changes with this machine: it is not content-addressed."""
        return bool(self.shows)


class Images(ABC):
    """The image store."""

    @abstractmethod
    async def get(self, name: str) -> Image:
        """The image of that name, built first when it is a base that can be built here.

        A name that ends in ``@sha256:…`` accepts that content only: the digest of the tree, or one of ``sources``.

        Raises:
            BadRequest: not a name, or what it names is no image (a hostile or malformed archive).
            NotFound: no such image.
            Conflict: the content is not that of the pinned digest.
            TooLarge: more bytes or entries than an image may have.
            Unsupported: it cannot be built on this machine; the reason and the packages to install are in the message.
            StoreDamaged: the stored file is not what was stored.
            Busy, StorageFull.
        """

    @abstractmethod
    async def list(self) -> tuple[Image, ...]:
        """What is stored."""


class Layers(ABC):
    """Writable layers with a quota that the kernel holds. Ownership on disk is canonical (uid 0 … 65535)."""

    @abstractmethod
    async def create(self, sandbox: SandboxId, disk_mib: int) -> Path:
        """An empty layer: a directory (relative to ``root_fd``) with ``upper`` and ``work`` in it.

        Raises:
            StorageFull, Conflict.
        """

    @abstractmethod
    async def clone(self, source: SandboxId | SnapshotId, sandbox: SandboxId, disk_mib: int) -> Path:
        """A layer that begins as a copy-on-write copy of ``source``'s, of one moment; may take ``disk_mib`` more.

        Nothing that happens to the source later shows in it.

        Raises:
            StorageFull, Conflict, NotFound.
        """

    def rehearse(self, source: SandboxId | SnapshotId) -> None:
        """Whether ``clone`` would find its source, and room to begin.  Raises: NotFound, StorageFull."""
        del source

    @abstractmethod
    def find(self, sandbox: SandboxId) -> Path:
        """The layer that it has, as ``create`` told it.  Raises: NotFound."""

    @abstractmethod
    async def discard(self, sandbox: SandboxId) -> None:
        """Take it away at once; deleting goes on in the background. Absent is not an error.  Raises: CleanupFailed."""

    @abstractmethod
    async def used(self, sandbox: SandboxId) -> int:
        """Bytes in it.  Raises: NotFound."""

    @abstractmethod
    async def list(self) -> tuple[SandboxId, ...]:
        """Layers that exist."""

    @abstractmethod
    def root_fd(self) -> int:
        """A descriptor of the directory that holds the layers, on a mount of its own."""

    @abstractmethod
    async def close(self) -> None:
        """Stop background work and release the mount; layers stay when the store is durable."""


Fill = Callable[[Path, Callable[[], None]], None]
"""Fills an empty directory; calls what it is given again and again, and lets through what that raises: then nobody wants it any more."""


class Snapshots(ABC):
    """Writable layers as they were at one moment: read-only, sharing what they hold with the layer they were taken of."""

    @abstractmethod
    async def settle(self) -> None:
        """Write out what programs have written so far, so that :meth:`take` finds little to do.  Raises: StorageFull."""

    @abstractmethod
    async def take(self, sandbox: SandboxId, snapshot: SnapshotId) -> None:
        """Keep the layer of a sandbox, which must not run meanwhile, as it is now.

        Raises:
            NotFound: it has none. Conflict: the snapshot exists. StorageFull.
        """

    @abstractmethod
    async def put(self, snapshot: SnapshotId, fill: Fill, size: int) -> None:
        """Keep what ``fill`` writes into an empty directory, as an overlay keeps it; in a thread. It takes ``size`` bytes at most, and some for names.

        Raises:
            Conflict: the snapshot exists. StorageFull. What ``fill`` raises: nothing is left then, or what :meth:`drop` takes away.
        """

    @abstractmethod
    async def secure(self) -> None:
        """What was taken survives a power loss, as far as the store survives one.  Raises: StorageFull."""

    @abstractmethod
    def changes(self, snapshot: SnapshotId) -> Path:
        """The directory that holds what is different from the images below, as an overlay keeps it. Its content is a stranger's.

        Raises: NotFound.
        """

    @abstractmethod
    async def drop(self, snapshot: SnapshotId) -> None:
        """Take it away; deleting goes on in the background. Absent is not an error.  Raises: CleanupFailed."""

    @abstractmethod
    async def list(self) -> tuple[SnapshotId, ...]:
        """Those there are."""


class Volumes(ABC):
    """Trees of files that belong to no sandbox, each with a quota that the kernel holds. Ownership on disk is canonical, as in layers."""

    @abstractmethod
    async def make(self, volume: VolumeId, size_mib: int) -> None:
        """An empty one, owned by the ordinary user; it survives a power loss, as far as the store survives one.

        Raises:
            Conflict: it exists. StorageFull.
        """

    @abstractmethod
    def open(self, volume: VolumeId) -> int:
        """A detached mount that shows it and nothing else, which the caller closes. Blocking.  Raises: NotFound, OSError."""

    @abstractmethod
    async def used(self, volume: VolumeId) -> int:
        """Bytes in it.  Raises: NotFound."""

    @abstractmethod
    async def drop(self, volume: VolumeId) -> None:
        """Take it away; deleting goes on in the background. Absent is not an error.  Raises: CleanupFailed."""

    @abstractmethod
    async def list(self) -> tuple[VolumeId, ...]:
        """Those there are."""
