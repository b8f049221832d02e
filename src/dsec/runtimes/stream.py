"""A connected stream socket on an event loop.

A transport of asyncio does the same, but it takes two turns of the loop and a dozen objects until it is ready, which a
connection that lives for a few milliseconds feels. This one is ready when it is made, and writes at once.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections import deque


class Receiver(ABC):
    """Who is told what comes. None of these may raise."""

    @abstractmethod
    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""

    @abstractmethod
    def received(self, count: int) -> None:
        """So many bytes were put there."""

    @abstractmethod
    def full(self, is_full: bool) -> None:
        """More than ``high`` bytes wait to be sent, or fewer than ``low`` again."""

    @abstractmethod
    def ended(self, error: OSError | None) -> None:
        """Once, at the end: the peer closed (None), or what went wrong."""


class Stream:
    """Owns the socket.

    Args:
        high, low: bytes waiting to be sent at which the receiver is told.
    """

    __slots__ = (
        "_backlog",
        "_closing",
        "_fd",
        "_full",
        "_high",
        "_loop",
        "_low",
        "_receiver",
        "_sock",
        "waiting",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        receiver: Receiver,
        *,
        high: int,
        low: int,
    ) -> None:
        sock.setblocking(False)
        self.waiting = 0
        """Bytes that wait to be sent."""
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._receiver = receiver
        self._high = high
        self._low = low
        self._full = False
        self._closing = False
        self._backlog: deque[memoryview] = deque()
        loop.add_reader(self._fd, self._readable)

    @property
    def open(self) -> bool:
        """Its end has not been told."""
        return self._fd >= 0

    def write(self, data: bytes) -> None:
        """Send now what the socket takes, the rest as soon as it can be. After the end: nothing."""
        if self._fd < 0 or self._closing:
            return
        sent = 0
        if not self._backlog:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._loop.call_soon(self._end, error)  # whoever writes is not told in the middle of it
                return
            if sent == len(data):
                return
            self._loop.add_writer(self._fd, self._writable)
        self._backlog.append(memoryview(data)[sent:])
        self.waiting += len(data) - sent
        if self.waiting > self._high and not self._full:
            self._full = True
            self._receiver.full(True)

    def close(self) -> None:
        """End it when everything has been sent; read nothing more."""
        if self._fd < 0 or self._closing:
            return
        self._closing = True
        self._loop.remove_reader(self._fd)
        if not self._backlog:
            self._end(None)

    def abort(self) -> None:
        """End it now."""
        self._end(None)

    def _readable(self) -> None:
        try:
            count = self._sock.recv_into(self._receiver.space())
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if count:
            self._receiver.received(count)
        else:
            self._end(None)

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._backlog[0])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        self.waiting -= sent
        first = self._backlog.popleft()
        if sent < len(first):
            self._backlog.appendleft(first[sent:])
        if self._full and self.waiting < self._low:
            self._full = False
            self._receiver.full(False)
        if self._backlog or self._fd < 0:
            return
        self._loop.remove_writer(self._fd)
        if self._closing:
            self._end(None)

    def _end(self, error: OSError | None) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        self._sock.close()
        self._backlog.clear()
        self.waiting = 0
        self._receiver.ended(error)
