"""Images in memory, for tests of clients and engines."""

from __future__ import annotations

from dsec.errors import Conflict, NotFound
from dsec.model.images import Freed, ImageInfo
from dsec.ports.engine import ImageService


class FakeImageService(ImageService):
    """Those that a test put into ``stored``; nothing is ever built."""

    def __init__(self) -> None:
        self.stored: list[ImageInfo] = []

    async def list(self) -> tuple[ImageInfo, ...]:
        return tuple(self.stored)

    async def get(self, name: str) -> ImageInfo:
        for each in self.stored:
            if name == each.digest or name in each.names:
                return each
        raise NotFound(f"no image {name!r} is stored", hint="put it into `stored`", name=name)

    async def refresh(self, name: str) -> ImageInfo:
        return await self.get(name)

    async def verify(self, name: str) -> ImageInfo:
        return await self.get(name)

    async def remove(self, name: str) -> ImageInfo:
        found = await self.get(name)
        if found.held_by:
            raise Conflict(f"image {name} is needed by {', '.join(found.held_by)}", hint="remove them first")
        self.stored.remove(found)
        return found

    async def collect(self, budget: int | None) -> Freed:
        del budget
        return Freed(paths=(), bytes=0)
