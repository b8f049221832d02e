"""Room in a pool: quotas may add up to more than it, so who comes last must not take the room of those who run."""

from __future__ import annotations

from typing import Final

from dsec.errors import StorageFull
from dsec.model.sandbox import MIB
from dsec.stores import btrfs

# With less free in the pool no layer is given out: what is left is for the sandboxes that run.
_RESERVE_SHARE: Final = 8  # an eighth of the pool
_RESERVE_LEAST: Final = 64 * MIB


class Room:
    """What is free in a pool. Its methods ask the kernel what it has in memory, and may be called on the event loop.

    Args:
        directory, unwritten: descriptors, as in :class:`~dsec.stores.pool.Pool`.
    """

    def __init__(self, directory: int, unwritten: int) -> None:
        self._directory = directory
        self._unwritten = unwritten

    def need(self, asked: int) -> None:
        """For something new, that may take ``asked`` bytes.  Raises: StorageFull: the reserve is touched."""
        free, size = self._space()
        reserve = max(_RESERVE_LEAST, size // _RESERVE_SHARE)
        if free < reserve:
            raise StorageFull(
                f"the pool of writable layers is nearly full: {free:,} of {size:,} bytes are free, and the last "
                f"{reserve:,} are kept for sandboxes that run",
                hint="destroy sandboxes, or make the pool larger (pool_bytes)",
                free=free,
                size=size,
                reserve=reserve,
                asked=asked,
            )

    def need_all(self, asked: int) -> None:
        """For something that takes ``asked`` bytes for certain.  Raises: StorageFull: the reserve would be touched."""
        free, size = self._space()
        reserve = max(_RESERVE_LEAST, size // _RESERVE_SHARE)
        if free - asked < reserve:
            raise StorageFull(
                f"the pool of writable layers has no room for {asked:,} bytes: {free:,} of {size:,} are free, and the last "
                f"{reserve:,} are kept for sandboxes that run",
                hint="destroy sandboxes or snapshots, or make the pool larger (pool_bytes)",
                free=free,
                size=size,
                reserve=reserve,
                asked=asked,
            )

    def need_least(self) -> None:
        """For what takes the place of something, which is free only when the new is there.  Raises: StorageFull."""
        free, size = self._space()
        if free < _RESERVE_LEAST:
            raise StorageFull(
                f"the pool of writable layers is full: {free:,} of {size:,} bytes are free, and {_RESERVE_LEAST:,} are needed",
                hint="remove files, sandboxes or snapshots, or make the pool larger (pool_bytes)",
                free=free,
                size=size,
            )

    def _space(self) -> tuple[int, int]:
        """Bytes free, and in all."""
        return btrfs.free_bytes(self._directory, self._unwritten)
