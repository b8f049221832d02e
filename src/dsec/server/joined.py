"""One write to the kernel for what an answer writes in one turn of the loop.

Head and body of a short answer come in two pieces: sent as they come, they are two segments, and wake the client twice.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

_MOST: Final = 16 << 10
"""Bytes that wait for the end of a turn: beyond it whoever writes is to hear how fast they are taken."""


class Joined(asyncio.Transport):
    """A transport whose writes of one turn of the loop are one write; all else is the other transport's."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._held: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(bytes(data))
        self._size += len(data)
        if self._size >= _MOST:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            held, self._held, self._size = self._held, [], 0
            if not self._inner.is_closing():
                self._inner.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        self._held, self._size = [], 0
        self._inner.abort()

    def write_eof(self) -> None:
        self._flush()
        self._inner.write_eof()

    def can_write_eof(self) -> bool:
        return self._inner.can_write_eof()

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size() + self._size

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def is_reading(self) -> bool:
        return self._inner.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._inner.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._inner.get_protocol()
