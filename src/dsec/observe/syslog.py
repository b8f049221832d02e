"""Events as syslog messages (RFC 5424): over UDP (RFC 5426), over TCP with octet counting (RFC 6587), over TLS (RFC 5425)."""

from __future__ import annotations

import asyncio
import fcntl
import ssl
import struct
import termios
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from dsec.observe.sink import Line, Refused, Sink
from dsec.observe.text import ascii_only

_AUDIT: Final = 13  # the facility "log audit"
_APP: Final = "dsec"
_MOST_SEQUENCE: Final = 2**31 - 1
_CONNECT: Final = 10.0
_SECONDS: Final = 30.0
_PIECE: Final = 1 << 16  # bytes
_HEARD: Final = 16  # pieces of what a receiver says, which nobody asked it, that are passed over at a time
_BURST: Final = 32  # datagrams after which receivers get a moment
_MOMENT: Final = 0.001


class Messages:
    """Lines as messages of one sender; ``sequenceId`` counts them from 1, so that a receiver sees which are missing."""

    def __init__(self, host: str) -> None:
        self._host = _word(host, 255)
        self._sequence = 0

    def of(self, line: Line) -> bytes:
        """One message."""
        self._sequence = self._sequence % _MOST_SEQUENCE + 1
        at = datetime.fromtimestamp(line.at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        head = (
            f"<{_AUDIT * 8 + line.severity}>1 {at} {self._host} {_APP} - {_word(line.act, 32)} "
            f'[meta sequenceId="{self._sequence}"] '
        )
        return head.encode("ascii") + line.data


def _word(text: str, limit: int) -> str:
    return ascii_only(text, limit).replace(" ", "_") or "-"


class UdpSink(Sink):
    """One datagram a message. Nobody tells whether it arrived: for what must not get lost there is TCP."""

    def __init__(self, host: str, port: int, messages: Messages) -> None:
        self._address = (host, port)
        self._messages = messages
        self._transport: asyncio.DatagramTransport | None = None
        self._heard = _Heard()

    async def send(self, lines: Sequence[Line]) -> None:
        try:
            transport = self._transport or await self._open()
            for number, line in enumerate(lines, 1):
                transport.sendto(self._messages.of(line))
                if number % _BURST == 0:
                    await asyncio.sleep(_MOMENT)
            await asyncio.sleep(_MOMENT)
        except (OSError, TimeoutError) as error:
            await self.close()
            raise Refused(f"{self._address[0]}:{self._address[1]}: {_told(error)}") from error
        if self._heard.error is not None:
            heard, self._heard.error = self._heard.error, None
            await self.close()
            raise Refused(f"{self._address[0]}:{self._address[1]}: {_told(heard)}")

    async def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    async def _open(self) -> asyncio.DatagramTransport:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT):
            self._transport, _ = await loop.create_datagram_endpoint(
                lambda: self._heard, remote_addr=self._address
            )
        return self._transport


class _Heard(asyncio.DatagramProtocol):
    """What the network says of datagrams that were sent: that nobody listens, at best."""

    error: Exception | None = None

    def error_received(self, exc: Exception) -> None:
        self.error = exc


class TcpSink(Sink):
    """A connection, kept. Lines count when the receiver's machine has confirmed every byte and the connection still stands.

    Args:
        tls: verify the receiver by it; None = plain TCP.
        seconds: for which a receiver may take nothing.
    """

    def __init__(
        self,
        host: str,
        port: int,
        messages: Messages,
        *,
        tls: ssl.SSLContext | None = None,
        seconds: float = _SECONDS,
    ) -> None:
        self._address = (host, port)
        self._messages = messages
        self._tls = tls
        self._seconds = seconds
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, lines: Sequence[Line]) -> None:
        frames = [self._messages.of(line) for line in lines]
        data = b"".join([b"%d %b" % (len(frame), frame) for frame in frames])
        try:
            reader, writer = self._streams or await self._open()
            async with asyncio.timeout(self._seconds):
                await _still_there(reader)
                writer.write(data)
                await writer.drain()
                await _confirmed(reader, writer)
                await _still_there(reader)
        except (OSError, TimeoutError) as error:
            self._drop()
            raise Refused(f"{self._address[0]}:{self._address[1]}: {_told(error)}") from error
        except BaseException:
            self._drop()  # half a message may be on its way
            raise

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await streams[1].wait_closed()

    def _drop(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_CONNECT):
            self._streams = await asyncio.open_connection(*self._address, ssl=self._tls)
        return self._streams


async def _still_there(reader: asyncio.StreamReader) -> None:
    """What it says is passed over, so that its end is seen.  Raises: ConnectionResetError: the receiver closed the connection."""
    await asyncio.sleep(0)
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            for _ in range(_HEARD):
                if not await reader.read(_PIECE):
                    raise ConnectionResetError("the receiver closed the connection")
    if reader.exception() is not None:
        raise ConnectionResetError("the connection broke")


async def _confirmed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the other machine has every byte that was written."""
    transport: Any = writer.transport
    wait = 0.0005
    while transport.get_write_buffer_size() or _unconfirmed(writer):
        if transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        await _still_there(reader)  # nobody confirms what a closed connection was sent
        await asyncio.sleep(wait)
        wait = min(wait * 2, 0.05)


def _unconfirmed(writer: asyncio.StreamWriter) -> int:
    sock = writer.get_extra_info("socket")
    held: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    return held


def _told(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it takes nothing within the time it has"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
