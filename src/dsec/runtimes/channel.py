"""What one operation on a connection to init is to the connection, and what wakes those who wait for it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Final

from dsec.errors import DsecError, ProtocolError
from dsec.wire import guest as wire

SEND_PIECE: Final = 131_072
"""Bytes of a stream that go to init in one frame, at most."""


class Notice:
    """Wakes everybody who waits now. Cheap enough to have one per operation."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Wake all."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def __await__(self) -> Generator[object, None, None]:
        future = self._loop.create_future()
        self._waiting.append(future)
        try:
            yield from future
        finally:
            if future.cancelled() and future in self._waiting:
                self._waiting.remove(future)


class Channel(ABC):
    """One operation. ``number`` is 0 while it is not open."""

    number: int = 0
    window: int = 0

    @abstractmethod
    def on_frame(self, frame: wire.Frame) -> None:
        """A frame for this operation.  Raises: ProtocolError: before anything has changed."""

    @abstractmethod
    def on_lost(self, reason: DsecError) -> None:
        """The connection ended; the channel is closed already."""


def unexpected(frame: wire.Frame, when: str) -> ProtocolError:
    """A frame of a known or unknown kind that may not come now."""
    return ProtocolError(
        f"init sent a frame of kind {frame.kind:#x} {when}", kind=frame.kind, channel=frame.channel
    )
