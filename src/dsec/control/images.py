"""What people do with stored images: look, get, verify, remove, make room."""

from __future__ import annotations

from functools import partial

from anyio import to_thread

from dsec.images.catalogue import find, stored
from dsec.images.store import ImageStore
from dsec.model.images import Freed, ImageInfo
from dsec.ports.engine import ImageService


class ImageKeeping(ImageService):
    """Over one store."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._root = store.root

    async def list(self) -> tuple[ImageInfo, ...]:
        return await to_thread.run_sync(stored, self._root)

    async def get(self, name: str) -> ImageInfo:
        return await self._told((await self._store.get(name)).digest)

    async def refresh(self, name: str) -> ImageInfo:
        return await self._told((await self._store.refresh(name)).digest)

    async def verify(self, name: str) -> ImageInfo:
        return await self._told((await self._store.verify(name)).digest)

    async def remove(self, name: str) -> ImageInfo:
        return await self._store.remove(name)

    async def collect(self, budget: int | None) -> Freed:
        before = sum(each.size for each in await self.list())
        paths = await to_thread.run_sync(partial(self._store.collect, budget))
        after = sum(each.size for each in await self.list())
        return Freed(paths=tuple(map(str, paths)), bytes=max(0, before - after))

    async def _told(self, digest: str) -> ImageInfo:
        return await to_thread.run_sync(find, self._root, digest)
