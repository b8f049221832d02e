"""Snapshots of an engine. Generated from `aio/snapshots.py` by `scripts/sync_client.py`: do not edit."""

from __future__ import annotations

from pathlib import Path

from dsec.client.sync_link import Link
from dsec.client.transfers import file_pieces, saved
from dsec.model.ids import parse_sandbox_id, parse_snapshot_id
from dsec.model.snapshots import SnapshotInfo


class Snapshots:
    """The snapshots of an engine. Those of a private engine end with it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def get(self, id: str) -> SnapshotInfo:
        """The snapshot of that ``id``.  Raises: NotFound: there is none. BadRequest: not the form of an id."""
        return self._link.call(self._link.services.snapshots.get(parse_snapshot_id(id)))

    def list(self, sandbox: str = "") -> tuple[SnapshotInfo, ...]:
        """Those of the ``sandbox`` with that id (it may have ended), or all; oldest first.  Raises: BadRequest: not the form of an id."""
        of = parse_sandbox_id(sandbox) if sandbox else None
        return self._link.call(self._link.services.snapshots.list(of))

    def export(self, snapshot: SnapshotInfo, path: str | Path) -> None:
        """Write a ``snapshot``, with all that its files lie over, to one file: :meth:`import_` takes it in, in another engine or on another machine.

        Not part of it: volumes, what of the host was shown inside, and for how long its sandbox was to live.

        Args:
            snapshot: what is written. path: of the file; it is there when it is whole, and one that was there is replaced.

        Raises:
            NotFound: there is no such snapshot. BadRequest: the path. Unsupported: it holds a file that cannot be kept.
            TooLarge, StorageFull, StoreDamaged, Denied, Busy.
        """
        self._link.call(saved(self._link.services.sharing.export_snapshot(snapshot.id), path))

    def import_(self, path: str | Path) -> SnapshotInfo:
        """Take in a snapshot that :meth:`export` wrote to the file ``path``, as a new one with an id of its own. Nothing in the file is believed.

        Raises:
            NotFound: the file. BadRequest: it is no snapshot, was damaged, or was made to do harm.
            Unsupported: no level here has snapshots. TooLarge, StorageFull, Denied, Busy.
        """
        return self._link.call(self._link.services.sharing.import_snapshot(file_pieces("path", path)))

    def remove(self, id: str) -> None:
        """Remove the snapshot of that ``id``; sandboxes that began with it keep their files. Twice is no error.  Raises: BadRequest: not the form of an id."""
        self._link.call(self._link.services.snapshots.remove(parse_snapshot_id(id)))
