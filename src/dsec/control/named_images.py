"""Images as those may ask for them who do not run the machine: by names."""

from __future__ import annotations

from dsec.control.scoped_sandboxes import check_base
from dsec.ports.storage import Image, Images


class NamedImages(Images):
    """Neither by a digest alone, which may be that of somebody else's layer, nor by a path of the machine."""

    def __init__(self, inner: Images) -> None:
        self._inner = inner

    async def get(self, name: str) -> Image:
        """See :class:`~dsec.ports.storage.Images`.  Raises: Denied."""
        check_base(name)
        return await self._inner.get(name)

    async def list(self) -> tuple[Image, ...]:
        """See :class:`~dsec.ports.storage.Images`."""
        return await self._inner.list()
