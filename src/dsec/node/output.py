"""Output of one command: the first bytes are kept, all bytes are counted and digested, readers get what comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Final, Protocol

from dsec.model.execs import Chunk, Stream

WINDOW_BYTES: Final = 1 << 20  # what a reader may lag behind before the command waits for it
WINDOW_CHUNKS: Final = 1024
STALLED_AFTER: Final = 5.0  # seconds in which a full reader takes nothing, while somebody waits for the end
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
    """One who follows: a bounded queue of what came since he began.

    ``at``: the offset of each stream up to which he was handed everything; ``taken``: how often he took something.
    ``behind``: nothing is put into his queue any more. When that is empty he goes on with what is kept.
    """

    __slots__ = ("at", "behind", "chunks", "size", "taken", "wake")

    def __init__(self, at: dict[Stream, int]) -> None:
        self.chunks: deque[Chunk] = deque()
        self.size = 0
        self.wake = asyncio.Event()
        self.at = at
        self.taken = 0
        self.behind = False

    def put(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.size += len(chunk.data)
        self.wake.set()

    def pop(self) -> Chunk:
        chunk = self.chunks.popleft()
        self.size -= len(chunk.data)
        self.taken += 1
        self.at[chunk.stream] = chunk.offset + len(chunk.data)
        return chunk

    @property
    def full(self) -> bool:
        """The command has to wait for him."""
        return not self.behind and (self.size >= WINDOW_BYTES or len(self.chunks) >= WINDOW_CHUNKS)


class Output:
    """Both streams of one command, and those who read them."""

    __slots__ = ("_awaited", "_closed", "_limit", "_readers", "_room", "stderr", "stdout")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._readers: set[Reader] = set()
        self._room: asyncio.Event | None = None
        self._closed = False
        self._awaited = 0
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

    @property
    def attended(self) -> bool:
        """Somebody waits for the command's end, or reads."""
        return self._awaited > 0 or bool(self._readers)

    def take(self, chunk: Chunk) -> bool:
        """Account for a chunk and hand it to the readers. True: one of them is full, wait for ``room`` before the next."""
        fresh = self._side(chunk.stream).take(chunk, self._limit)
        if fresh is None or not self._readers:
            return False
        for reader in self._readers:
            if not reader.behind:
                reader.put(fresh)
        return any(reader.full for reader in self._readers)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Meanwhile somebody waits for the command's end, so a reader who takes nothing cannot hold it up for ever."""
        self._awaited += 1
        self._release()
        try:
            yield
        finally:
            self._awaited -= 1

    async def room(self) -> None:
        """Wait until the command need not wait for a reader.

        While its end is awaited, one who takes nothing for a while is left behind: perhaps he who waits is the one
        who should read. He loses nothing of what is kept.
        """
        while full := {reader: reader.taken for reader in self._readers if reader.full}:
            self._room = self._room or asyncio.Event()
            self._room.clear()
            try:
                async with asyncio.timeout(STALLED_AFTER if self._awaited else None):
                    await self._room.wait()
            except TimeoutError:
                for reader, taken in full.items():
                    reader.behind = self._awaited > 0 and reader.taken == taken

    def finish(self) -> None:
        """No more will come."""
        self._closed = True
        for reader in self._readers:
            reader.wake.set()

    async def read(self, stdout: int = 0, stderr: int = 0) -> AsyncIterator[Chunk]:
        """From these offsets on: first what is kept, then what comes."""
        floor = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        replay = ((Stream.STDOUT, self.stdout.kept), (Stream.STDERR, self.stderr.kept))
        reader = Reader({stream: max(end, floor[stream]) for stream, end in replay})
        self._readers.add(reader)
        try:
            for stream, end in replay:
                for chunk in self._replayed(stream, floor[stream], end):
                    reader.taken += 1
                    yield chunk
            async for chunk in self._live(reader):
                for piece in _above(chunk, floor[chunk.stream]):
                    yield piece
        finally:
            self._readers.discard(reader)
            self._release()

    def _side(self, stream: Stream) -> Side:
        return self.stdout if stream is Stream.STDOUT else self.stderr

    def _replayed(self, stream: Stream, floor: int, end: int) -> Iterator[Chunk]:
        """What is kept from ``floor`` to ``end``: what comes meanwhile waits for the reader."""
        for start, data in self._side(stream).pieces(floor, end):
            yield Chunk(stream, start, data)

    def _missed(self, reader: Reader) -> Iterator[Chunk]:
        """What is kept of what he was not handed, also of what comes meanwhile. Then he is handed everything again."""
        while missing := [stream for stream, at in reader.at.items() if at < self._side(stream).kept]:
            for stream in missing:
                for chunk in self._replayed(stream, reader.at[stream], self._side(stream).kept):
                    reader.at[stream] = chunk.offset + len(chunk.data)
                    yield chunk
        reader.behind = False

    async def _live(self, reader: Reader) -> AsyncIterator[Chunk]:
        while True:
            while reader.chunks:
                chunk = reader.pop()
                if self._room is not None and not reader.full:
                    self._release()
                yield chunk
            if reader.behind:
                for chunk in self._missed(reader):
                    yield chunk
                continue
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
