"""An engine, and the way to each of its services. Generated from `aio/engine.py` by `scripts/sync_client.py`: do not edit."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from dsec.client.sync.images import Images
from dsec.client.sync.pool import Pool
from dsec.client.sync.sandboxes import Sandboxes
from dsec.client.sync.snapshots import Snapshots
from dsec.client.sync.templates import Templates
from dsec.client.sync.tenants import Keys, Projects
from dsec.client.sync.volumes import Volumes
from dsec.client.sync_link import Connect, Link
from dsec.model.sandbox import Problem


class Dsec:
    """An engine, opened by ``with`` (or :meth:`open` and :meth:`close`).

    Args:
        connect: makes or finds the engine.
    """

    def __init__(self, connect: Connect) -> None:
        self._link = Link(connect)
        self.sandboxes = Sandboxes(self._link)
        self.snapshots = Snapshots(self._link)
        self.volumes = Volumes(self._link)
        self.templates = Templates(self._link)
        self.images = Images(self._link)
        self.pool = Pool(self._link)
        self.keys = Keys(self._link)
        self.projects = Projects(self._link)

    def open(self) -> Self:
        """Open it; twice is no error.  Raises: RuntimeUnavailable, StoreDamaged, Conflict: it cannot be opened."""
        self._link.open()
        return self

    def close(self) -> None:
        """Close it; a private engine destroys its sandboxes first. Twice is no error."""
        self._link.close()

    def problems(self) -> tuple[Problem, ...]:
        """Clean-ups that failed and are being retried, oldest first."""
        return self._link.call(self._link.services.observe.problems())

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
