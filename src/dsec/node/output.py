"""Output of one command: the first bytes are kept, all bytes are counted and digested, readers get what comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from typing import Final, Protocol

from dsec.model.execs import Chunk, Stream

WINDOW_BYTES: Final = 1 << 20  # what a reader may lag behind before the command waits for it
WINDOW_CHUNKS: Final = 1024
PIECE: Final = 1 << 16
SMALL: Final = 1 << 12


class Hash(Protocol):
    """A running digest."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class Side:
    """One stream. ``seen``: bytes so far, gaps included; ``kept``: how many of the first are held; ``whole``: there was no gap."""

    __slots__ = ("_digest", "_held", "kept", "seen", "whole")

    def __init__(self) -> None:
        self._held: list[
            bytes | bytearray
        ] = []  # large pieces as they came: one buffer would be copied as it grows
        self.kept = 0
        self.seen = 0
        self.whole = True
        self._digest: Hash | None = None  # many commands write nothing

    def take(self, chunk: Chunk, limit: int) -> Chunk | None:
        """Account for ``chunk``; what of it is new, or None."""
        behind = self.seen - chunk.offset
        if behind > 0:  # seen before a re-attachment
            if behind >= len(chunk.data):
                return None
            chunk = Chunk(chunk.stream, self.seen, chunk.data[behind:])
        elif behind < 0:
            self.whole = False
        data = chunk.data
        if self._digest is None:
            self._digest = sha256()
        self._digest.update(data)
        self.seen = chunk.offset + len(data)
        if self.whole and self.kept < limit:
            room = limit - self.kept
            self._keep(data if len(data) <= room else data[:room])
        return chunk

    def _keep(self, data: bytes) -> None:
        """Small pieces share one buffer: each alone would take more memory than its bytes."""
        self.kept += len(data)
        last = self._held[-1] if self._held else b""
        if len(data) >= SMALL:
            self._held.append(data)
        elif isinstance(last, bytearray) and len(last) < PIECE:
            last += data
        else:
            self._held.append(bytearray(data))

    def first(self) -> bytes:
        """All that is kept."""
        return b"".join(self._held)

    def pieces(self, floor: int, end: int) -> Iterator[tuple[int, bytes]]:
        """What is kept from ``floor`` to ``end``, with offsets."""
        start = 0
        for held in tuple(self._held):
            if start >= end:
                return
            size = min(len(held), end - start)
            if start + size > floor:
                skip = max(floor - start, 0)
                yield start + skip, bytes(held[skip:size])
            start += size

    def digest(self) -> str:
        """Of all that was taken, in hexadecimal."""
        return (self._digest or sha256()).hexdigest()


class Reader:
    """One who follows: a bounded queue of what came since he began."""

    __slots__ = ("chunks", "size", "wake")

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.size = 0
        self.wake = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.size += len(chunk.data)
        self.wake.set()

    @property
    def full(self) -> bool:
        return self.size >= WINDOW_BYTES or len(self.chunks) >= WINDOW_CHUNKS


class Output:
    """Both streams of one command, and those who read them."""

    __slots__ = ("_closed", "_limit", "_readers", "_room", "stderr", "stdout")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._readers: set[Reader] = set()
        self._room: asyncio.Event | None = None
        self._closed = False
        self.stdout = Side()
        self.stderr = Side()

    @property
    def kept(self) -> int:
        """Bytes held in memory."""
        return self.stdout.kept + self.stderr.kept

    @property
    def dropped(self) -> int:
        """Bytes that were produced and are not kept, so far."""
        return self.stdout.seen + self.stderr.seen - self.kept

    def take(self, chunk: Chunk) -> bool:
        """Account for a chunk and hand it to the readers. True: one of them is full, wait for ``room`` before the next."""
        side = self.stdout if chunk.stream is Stream.STDOUT else self.stderr
        fresh = side.take(chunk, self._limit)
        if fresh is None or not self._readers:
            return False
        for reader in self._readers:
            reader.put(fresh)
        return self._full()

    def _full(self) -> bool:
        return any(reader.full for reader in self._readers)

    async def room(self) -> None:
        """Wait until no reader is full."""
        while self._full():
            self._room = self._room or asyncio.Event()
            self._room.clear()
            await self._room.wait()

    def finish(self) -> None:
        """No more will come."""
        self._closed = True
        for reader in self._readers:
            reader.wake.set()

    async def read(self, stdout: int = 0, stderr: int = 0) -> AsyncIterator[Chunk]:
        """From these offsets on: first what is kept, then what comes."""
        reader = Reader()
        floor = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        replay = ((Stream.STDOUT, self.stdout.kept), (Stream.STDERR, self.stderr.kept))
        self._readers.add(reader)
        try:
            for stream, end in replay:
                for chunk in self._replayed(stream, floor[stream], end):
                    yield chunk
            async for chunk in self._live(reader):
                for piece in _above(chunk, floor[chunk.stream]):
                    yield piece
        finally:
            self._readers.discard(reader)
            self._release()

    def _replayed(self, stream: Stream, floor: int, end: int) -> Iterator[Chunk]:
        """What is kept from ``floor`` to ``end``: what comes meanwhile waits for the reader."""
        side = self.stdout if stream is Stream.STDOUT else self.stderr
        for start, data in side.pieces(floor, end):
            yield Chunk(stream, start, data)

    async def _live(self, reader: Reader) -> AsyncIterator[Chunk]:
        while True:
            while reader.chunks:
                chunk = reader.chunks.popleft()
                reader.size -= len(chunk.data)
                if self._room is not None and not reader.full:
                    self._release()
                yield chunk
            if self._closed:
                return
            reader.wake.clear()
            await reader.wake.wait()

    def _release(self) -> None:
        if self._room is not None:
            self._room.set()


def _above(chunk: Chunk, floor: int) -> Iterator[Chunk]:
    """What of ``chunk`` lies at or above ``floor``."""
    if chunk.offset >= floor:
        yield chunk
    elif chunk.offset + len(chunk.data) > floor:
        yield Chunk(chunk.stream, floor, chunk.data[floor - chunk.offset :])
