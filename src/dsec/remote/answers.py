"""What a server answers, read within bounds: bodies, and the errors that it told."""

from __future__ import annotations

import json
from typing import Final

import aiohttp

from dsec.errors import DsecError, ProtocolError
from dsec.wire.problems import from_body

MOST_OF_ERROR: Final = 1 << 20  # bytes


async def bounded(response: aiohttp.ClientResponse, most: int) -> bytes:
    """All of a body.  Raises: ProtocolError: it is too long, or packed."""
    if response.headers.get("Content-Encoding") is not None:
        raise ProtocolError("the server packed its answer, which nobody asked for")
    length = response.content_length
    if length is not None:
        if length > most:
            raise _too_long(response, most)
        return await response.read()
    pieces: list[bytes] = []
    size = 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise _too_long(response, most)
    return b"".join(pieces)


def _too_long(response: aiohttp.ClientResponse, most: int) -> ProtocolError:
    response.close()
    return ProtocolError(f"the server's answer is longer than {most} bytes", bytes=most)


async def problem(response: aiohttp.ClientResponse) -> DsecError:
    """The error that a server told."""
    status = response.status
    if 300 <= status < 400:
        response.close()
        return elsewhere(status)
    body = await bounded(response, MOST_OF_ERROR)
    try:
        return from_body(json.loads(body), status)
    except (ValueError, RecursionError):
        return from_body(None, status)


def elsewhere(status: int) -> ProtocolError:
    return ProtocolError(
        f"the server sends elsewhere ({status}), where this client does not go",
        hint="give the URL of the server itself",
        status=status,
    )
