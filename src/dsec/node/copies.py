"""Copies of the files of sandboxes as they are at one moment: what all acts on snapshots share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from dsec.errors import Conflict, DsecError, Unsupported
from dsec.model.ids import SnapshotId
from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import HOST_BASE, Flag, SandboxInfo, State
from dsec.node import drafts
from dsec.node.handles import Handle
from dsec.node.kit import Kit
from dsec.ports.storage import Snapshots


class Copies:
    """See the module.

    Args:
        store: where layers are kept; None: no level here has layers.
    """

    def __init__(self, store: Snapshots | None, kit: Kit) -> None:
        self._store = store
        self._kit = kit

    async def copy(self, handle: Handle, store: Snapshots, snapshot: SnapshotId) -> float:
        """How long the sandbox stood still for it, in seconds."""
        await store.settle()
        async with self._still(handle):
            begun = self._kit.clock.boot()
            await store.take(handle.id, snapshot)
            stood = self._kit.clock.boot() - begun
        return stood if handle.info.state is State.RUNNING else 0.0

    @asynccontextmanager
    async def _still(self, handle: Handle) -> AsyncIterator[None]:
        """No process of it runs within; one that was paused stays so.  Raises: Conflict: it does not live any more."""
        _check_resident(handle)  # who wakes it has its lock, and may wait for a turn
        async with handle.lock:
            _check_resident(handle)
            if handle.info.state is State.PAUSED:
                yield
                return
            try:
                await handle.runtime.freeze(handle.id, True)
                yield
            finally:
                await handle.runtime.freeze(handle.id, False)

    def stored(self, info: SandboxInfo) -> Snapshots:
        """Raises: Unsupported: the level has no snapshots."""
        if self._store is None or Flag.SNAPSHOTS not in info.flags:
            raise Unsupported(
                f"snapshots: level {info.spec.level} cannot keep the files of a sandbox",
                hint="use level='container'",
                level=info.spec.level.value,
            )
        if info.spec.base == HOST_BASE:
            raise Unsupported(
                f"snapshots: base {HOST_BASE!r} shows programs of this machine, which change under what would be kept",
                hint="use a base that does not change: system, debian:SUITE, an image",
                base=info.spec.base,
            )
        return self._store

    async def say(self, chain: str, act: str, phase: Phase, ref: SnapshotId, **facts: Json) -> None:
        """A record of what is done with a snapshot."""
        await self._kit.journal.append(Draft(chain=chain, act=act, phase=phase, ref=ref, payload=facts))

    async def failed(self, chain: str, act: str, ref: SnapshotId, error: BaseException) -> None:
        """A record of what came of it."""
        said = error if isinstance(error, DsecError) else Conflict(f"{type(error).__name__}: {error}")
        with suppress(DsecError):  # whoever asked hears of what failed first
            draft = Draft(chain=chain, act=act, phase=Phase.RESULT, ref=ref, payload=drafts.failure(said))
            await self._kit.journal.append(draft)


def _check_resident(handle: Handle) -> None:
    """Raises: Conflict: it has no processes."""
    if handle.info.state not in (State.RUNNING, State.PAUSED):
        raise Conflict(f"{handle.id} is {handle.info.state}", state=handle.info.state.value)
