"""Templates in memory, for tests of clients and engines."""

from __future__ import annotations

from dsec.errors import NotFound, Unsupported
from dsec.model.built import Built, Tagged
from dsec.model.ids import SnapshotId
from dsec.ports.engine import TemplateService


class FakeTemplates(TemplateService):
    """Those that a test put into ``built``, by reference; nothing is ever built."""

    def __init__(self) -> None:
        self.built: dict[str, Built] = {}

    async def build(self, text: bytes, *, source: str, tag: str, strict: bool, update: bool) -> Built:
        raise Unsupported(f"{source}: nothing is built here", hint="put it into `built`")

    async def promote(self, snapshot: SnapshotId, *, name: str, tag: str) -> Built:
        raise Unsupported(f"{snapshot}: nothing is built here", hint="put it into `built`")

    async def find(self, reference: str) -> Built:
        if reference not in self.built:
            raise NotFound(f"there is no template {reference!r}", hint="'base' always exists")
        return self.built[reference]

    async def list(self) -> tuple[Tagged, ...]:
        return ()

    async def history(self, name: str) -> tuple[Tagged, ...]:
        return ()

    async def tag(self, reference: str, tag: str) -> Built:
        built = await self.find(reference)
        self.built[f"{built.template.name}:{tag}"] = built
        return built

    async def rollback(self, reference: str) -> Built:
        return await self.find(reference)

    async def remove(self, reference: str) -> None:
        self.built.pop(reference, None)
