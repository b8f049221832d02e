"""Volumes: btrfs subvolumes named by their id, beside the slots of the pool, each with a quota that the kernel holds."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from dsec.errors import CleanupFailed, Conflict, NotFound, StorageFull
from dsec.model.ids import VolumeId, parse_volume_id
from dsec.model.sandbox import MIB, USER_UID
from dsec.ports.storage import Volumes
from dsec.stores import btrfs
from dsec.stores.snapshots import Threads

PREFIX: Final = "vo-"
Mount = Callable[[int], int]
"""A detached mount whose root is the subvolume of that number.  Raises: OSError."""


class BtrfsVolumes(Volumes):
    """Made by :class:`~dsec.stores.layers.BtrfsLayers`, whose pool it shares.

    A subvolume that is mounted by its own number shows nothing else of the pool, whatever is asked of it inside.

    Args:
        directory: of the pool. file_system: UUID of it.
        mount: see :data:`Mount`.
        run: see :class:`~dsec.stores.snapshots.Threads`.
        retire: told of every subvolume that was destroyed.
        need_room: asked before one is made.  Raises: StorageFull.
    """

    def __init__(
        self,
        directory: int,
        file_system: str,
        *,
        mount: Mount,
        run: Threads,
        retire: Callable[[int], None],
        need_room: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._file_system = file_system
        self._mount = mount
        self._run = run
        self._retire = retire
        self._need_room = need_room
        self._numbers: dict[VolumeId, int] = {}  # of their subvolumes

    def found(self, name: str) -> None:
        """One of an earlier run.  Raises: BadRequest: its name is none of ours. OSError."""
        volume = parse_volume_id(name)
        self._numbers[volume] = self._number_of(volume)

    def _number_of(self, volume: VolumeId) -> int:
        inside = self._open(volume)
        try:
            return btrfs.subvolume_id(inside)
        finally:
            os.close(inside)

    def _open(self, volume: VolumeId) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(volume, flags, dir_fd=self._directory)

    async def make(self, volume: VolumeId, size_mib: int) -> None:
        """See :class:`~dsec.ports.storage.Volumes`."""
        if volume in self._numbers:
            raise Conflict(f"volume {volume} exists already", volume=volume)
        self._need_room()
        self._numbers[volume] = await self._run(partial(self._make, parse_volume_id(volume), size_mib * MIB))

    def _make(self, volume: VolumeId, limit: int) -> int:
        try:
            btrfs.create_subvolume(self._directory, volume)
            try:
                number = self._fit(volume, limit)
                btrfs.sync(self._directory)
            except OSError:
                with suppress(OSError):  # the next engine finds what is left
                    btrfs.destroy_subvolume(self._directory, volume)
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(
                    "the pool of writable layers is full",
                    hint="destroy sandboxes, snapshots or volumes, or make it larger (pool_bytes)",
                ) from error
            if error.errno == errno.EEXIST:
                raise Conflict(f"volume {volume} exists already", volume=volume) from error
            raise
        return number

    def _fit(self, volume: VolumeId, limit: int) -> int:
        """Its quota and its owner; the number of its subvolume.  Raises: OSError."""
        inside = self._open(volume)
        try:
            number = btrfs.subvolume_id(inside)
            btrfs.limit_qgroup(self._directory, number, limit)
            os.fchown(inside, USER_UID, USER_UID)
            os.fchmod(inside, 0o755)  # whatever the umask
        finally:
            os.close(inside)
        return number

    def open(self, volume: VolumeId) -> int:
        """See :class:`~dsec.ports.storage.Volumes`."""
        return self._mount(self._number(volume))

    def _number(self, volume: VolumeId) -> int:
        number = self._numbers.get(volume)
        if number is None:
            raise NotFound(f"there is no volume {volume}", volume=volume)
        return number

    async def used(self, volume: VolumeId) -> int:
        """See :class:`~dsec.ports.storage.Volumes`. Metadata counts: an empty file takes some hundred bytes."""
        number = self._number(volume)
        return await self._run(partial(btrfs.qgroup_bytes, self._file_system, number))

    async def drop(self, volume: VolumeId) -> None:
        """See :class:`~dsec.ports.storage.Volumes`."""
        if volume in self._numbers:
            await self._run(partial(self._drop, volume))
            self._numbers.pop(volume, None)

    def _drop(self, volume: VolumeId) -> None:
        try:
            btrfs.destroy_subvolume(self._directory, volume)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CleanupFailed(
                f"volume {volume} cannot be removed: {error.strerror}", hint="try again", errno=error.errno
            ) from error
        self._retire(self._numbers[volume])

    async def list(self) -> tuple[VolumeId, ...]:
        """See :class:`~dsec.ports.storage.Volumes`."""
        return tuple(sorted(self._numbers))
