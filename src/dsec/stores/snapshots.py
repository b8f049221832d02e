"""Snapshots of writable layers: read-only btrfs subvolumes named by their id, beside the slots of the pool."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from anyio import CapacityLimiter, to_thread

from dsec.errors import CleanupFailed, Conflict, NotFound, StorageFull
from dsec.model.ids import SandboxId, SnapshotId, parse_snapshot_id
from dsec.ports.storage import Fill, Snapshots
from dsec.stores import btrfs

T = TypeVar("T")

PREFIX: Final = "sn-"
_COPIERS: Final = 2  # snapshots from elsewhere that are written at once
_MOST: Final = 10_000  # snapshots in one pool
_OVERHEAD: Final = 2**30  # bytes that names, small files and attributes of one may take besides


class Threads(Protocol):
    """Runs work on the disk in a thread of the pool's."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Raises: Conflict: the pool is closed."""


class BtrfsSnapshots(Snapshots):
    """Made by :class:`~dsec.stores.layers.BtrfsLayers`, whose pool it shares.

    Args:
        directory: of the pool.
        run: see :class:`Threads`.
        origin: name of the subvolume that is a sandbox's layer.  Raises: NotFound.
        retire: told of every subvolume that was destroyed: its blocks are freed later, its quota group after that.
        need_room: asked before one is taken; need_all: for one that takes so many bytes.  Raises: StorageFull.
        closing: whether the pool is being closed.
    """

    def __init__(
        self,
        directory: int,
        *,
        run: Threads,
        origin: Callable[[SandboxId], str],
        retire: Callable[[int], None],
        need_room: Callable[[], None],
        need_all: Callable[[int], None],
        closing: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._run = run
        self._origin = origin
        self._retire = retire
        self._need_room = need_room
        self._need_all = need_all
        self._closing = closing
        self._copiers = CapacityLimiter(_COPIERS)
        self._names: set[SnapshotId] = set()

    def found(self, name: str) -> None:
        """One of an earlier run.  Raises: BadRequest: its name is none of ours."""
        self._names.add(parse_snapshot_id(name))

    def name(self, snapshot: SnapshotId) -> str:
        """The subvolume that holds it.  Raises: NotFound."""
        if snapshot not in self._names:
            raise NotFound(f"there is no snapshot {snapshot}", snapshot=snapshot)
        return snapshot

    def changes(self, snapshot: SnapshotId) -> Path:
        """See :class:`~dsec.ports.storage.Snapshots`."""
        return Path(f"/proc/self/fd/{self._directory}/{self.name(snapshot)}/upper")

    async def settle(self) -> None:
        """See :class:`~dsec.ports.storage.Snapshots`."""
        await self._run(partial(self._translated, partial(btrfs.sync, self._directory)))

    async def secure(self) -> None:
        """See :class:`~dsec.ports.storage.Snapshots`."""
        await self.settle()

    async def take(self, sandbox: SandboxId, snapshot: SnapshotId) -> None:
        """See :class:`~dsec.ports.storage.Snapshots`."""
        self._check_number()
        self._need_room()
        await self._run(
            partial(self._translated, partial(self._take, self._origin(sandbox), self._new(snapshot)))
        )
        self._names.add(snapshot)

    async def put(self, snapshot: SnapshotId, fill: Fill, size: int) -> None:
        """See :class:`~dsec.ports.storage.Snapshots`.

        Filling may take minutes, so it takes none of the threads that sandboxes wait for.
        """
        self._check_number()
        self._need_all(size)
        # What is half-made is dropped by whoever asked, or by the next engine.
        self._names.add(self._new(snapshot))
        inside = await self._run(partial(self._translated, partial(self._empty, snapshot, size)))
        try:
            filling = partial(fill, Path(f"/proc/self/fd/{inside}/upper"), self._check_open)
            await to_thread.run_sync(partial(self._translated, filling), limiter=self._copiers)
            await self._run(partial(self._translated, partial(self._seal, inside)))
        finally:
            os.close(inside)

    def _check_open(self) -> None:
        if self._closing():
            raise Conflict("the store of layers is closed")

    def _empty(self, snapshot: SnapshotId, size: int) -> int:
        """A writable subvolume with an empty directory, opened."""
        btrfs.create_subvolume(self._directory, snapshot)
        inside = os.open(
            snapshot, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory
        )
        try:
            btrfs.limit_qgroup(self._directory, btrfs.subvolume_id(inside), size + _OVERHEAD)
            for name in ("upper", "work"):
                os.mkdir(name, dir_fd=inside)
                os.chmod(name, 0o755, dir_fd=inside)  # noqa: S103 - a root directory, whatever the umask
        except BaseException:
            os.close(inside)
            raise
        return inside

    def _seal(self, inside: int) -> None:
        os.fsync(inside)
        btrfs.seal(inside)

    def _check_number(self) -> None:
        """Raises: StorageFull."""
        if len(self._names) >= _MOST:
            raise StorageFull(
                f"the pool holds {_MOST} snapshots, its most", hint="remove some", snapshots=len(self._names)
            )

    def _new(self, snapshot: SnapshotId) -> SnapshotId:
        if snapshot in self._names:
            raise Conflict(f"snapshot {snapshot} exists already", snapshot=snapshot)
        return parse_snapshot_id(snapshot)

    def _take(self, origin: str, snapshot: SnapshotId) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        source = os.open(origin, flags, dir_fd=self._directory)
        try:
            btrfs.snapshot(source, self._directory, snapshot, read_only=True)
        finally:
            os.close(source)

    async def drop(self, snapshot: SnapshotId) -> None:
        """See :class:`~dsec.ports.storage.Snapshots`."""
        if snapshot in self._names:
            await self._run(partial(self._drop, snapshot))
            self._names.discard(snapshot)

    def _drop(self, snapshot: SnapshotId) -> None:
        try:
            subvolume = self._number(snapshot)
            btrfs.destroy_subvolume(self._directory, snapshot)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CleanupFailed(
                f"snapshot {snapshot} cannot be removed: {error.strerror}", errno=error.errno
            ) from error
        self._retire(subvolume)

    def _number(self, snapshot: SnapshotId) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        inside = os.open(snapshot, flags, dir_fd=self._directory)
        try:
            return btrfs.subvolume_id(inside)
        finally:
            os.close(inside)

    async def list(self) -> tuple[SnapshotId, ...]:
        """See :class:`~dsec.ports.storage.Snapshots`."""
        return tuple(sorted(self._names))

    def _translated(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(
                    "the pool of writable layers is full",
                    hint="destroy sandboxes or snapshots, or make it larger (pool_bytes)",
                ) from error
            raise
