"""Server-sent events, read from a stream that may stop anywhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from dsec.errors import ProtocolError

MOST: Final = 1 << 20  # bytes of one event


@dataclass(slots=True)
class Event:
    """One event: its kind ("message" when it has none), and the lines of its data."""

    kind: str = "message"
    lines: list[bytes] = field(default_factory=list)
    size: int = 0

    @property
    def data(self) -> bytes:
        """All of it."""
        return b"\n".join(self.lines)

    def take(self, line: bytes) -> None:
        """One line of it; comments and fields that nobody here needs are passed over.  Raises: ProtocolError: it is too long."""
        name, _, text = line.partition(b":")
        text = text.removeprefix(b" ")
        if name == b"event":
            self.kind = text.decode("utf-8", "replace")
        elif name == b"data":
            self.lines.append(text)
            self.size += len(text) + 1
        if self.size > MOST:
            raise _too_long()


async def events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Event, None]:
    """Whole events.  Raises: ProtocolError: one is too long. What ``pieces`` raises."""
    event = Event()
    async with aclosing(_lines(pieces)) as lines:
        async for line in lines:
            if line:
                event.take(line)
                continue
            if event.lines:
                yield event
            event = Event()


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
        if len(rest) > MOST:
            raise _too_long()


def _too_long() -> ProtocolError:
    return ProtocolError(f"the server sent an event of more than {MOST} bytes")
