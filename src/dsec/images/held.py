"""The images that a durable engine needs stay, whatever is collected: its sandboxes and snapshots mean nothing without them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from anyio import to_thread

from dsec.images.shelf import Shelf
from dsec.images.store import ImageStore
from dsec.ports.storage import Image, Images


class HeldImages(Images):
    """The store of ``images``, every image of which that is asked for is held for one engine.

    Args:
        root: of the store.
        owner: the engine's name among those that hold. home: its state directory; when that is gone, so is the hold.
    """

    def __init__(self, images: ImageStore, root: Path, *, owner: str, home: Path) -> None:
        self._images = images
        self._shelf = Shelf(root)
        self._owner = owner
        self._home = home

    async def get(self, name: str) -> Image:
        """See :class:`~dsec.ports.storage.Images`."""
        image = await self._images.get(name)
        await to_thread.run_sync(self._hold, image.digest)
        return image

    async def list(self) -> tuple[Image, ...]:
        """See :class:`~dsec.ports.storage.Images`."""
        return await self._images.list()

    async def keep_only(self, digests: Iterable[str]) -> None:
        """Let go of all others.  Raises: Denied, StoreDamaged."""
        await to_thread.run_sync(self._let_go, frozenset(digests))

    def _hold(self, digest: str) -> None:
        self._shelf.hold(digest, self._owner, home=self._home)

    def _let_go(self, needed: frozenset[str]) -> None:
        for path in self._shelf.root.glob(f"held/*.{self._owner}"):
            digest = f"sha256:{path.name.split('.')[0]}"
            if digest not in needed:
                self._shelf.release(digest, self._owner)
