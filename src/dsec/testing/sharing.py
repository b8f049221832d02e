"""Sharing where there is nothing to share, for tests of clients and engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dsec.errors import Unsupported
from dsec.model.built import Built
from dsec.model.ids import SnapshotId
from dsec.model.snapshots import SnapshotInfo
from dsec.ports.engine import SharingService


class NoSharing(SharingService):
    """Refuses all."""

    def export_template(self, reference: str) -> AsyncIterator[bytes]:
        raise Unsupported(f"{reference}: nothing is shared here")

    async def import_template(self, file: AsyncIterator[bytes], *, tag: str) -> Built:
        raise Unsupported("nothing is shared here")

    def export_snapshot(self, snapshot: SnapshotId) -> AsyncIterator[bytes]:
        raise Unsupported(f"{snapshot}: nothing is shared here")

    async def import_snapshot(self, file: AsyncIterator[bytes]) -> SnapshotInfo:
        raise Unsupported("nothing is shared here")
