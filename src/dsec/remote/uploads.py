"""Bodies that are sent piece by piece: what their source raises is what the caller is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Final, TypeVar

from dsec.errors import RuntimeUnavailable, UnknownOutcome

T = TypeVar("T")

PIECE: Final = 256 * 1024


class Upload:
    """One source on its way to a server, once."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._failed: BaseException | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The source, in pieces of at most 256 KiB."""
        try:
            async for data in self._source:
                view = memoryview(data)
                for start in range(0, len(view), PIECE):
                    yield bytes(view[start : start + PIECE]) if len(view) > PIECE else data
        except BaseException as error:
            self._failed = error
            raise
        finally:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()

    async def told(self, work: Awaitable[T]) -> T:
        """What the server answered.  Raises: what the source raised, before what that did to the request."""
        try:
            return await work
        except (RuntimeUnavailable, UnknownOutcome):
            if isinstance(self._failed, Exception):
                raise self._failed from None
            raise


async def sliced(content: bytes) -> AsyncIterator[bytes]:
    """Bytes in pieces."""
    view = memoryview(content)
    for start in range(0, len(view), PIECE):
        yield bytes(view[start : start + PIECE])
