"""Events to a collector over HTTP: each batch is one POST, taken when the answer is 2xx."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import sha256
from typing import Final

import aiohttp

from dsec.errors import DsecError
from dsec.observe.sink import Line, Refused, Sink

_LONGEST: Final = 300.0
_ANSWER: Final = 64 << 10  # bytes of an answer that are read
_TOO_LARGE: Final = 413
_LATER: Final = frozenset({408, 425, 429})
_TOLD_APART: Final = {
    400: "it does not understand what it gets: is the format the right one?",
    401: "it wants another key",
    403: "the key may not do that",
    404: "there is no such address",
    405: "it takes no POST there",
    415: "it does not take this format",
}


class HttpSink(Sink):
    """POSTs lines. Redirects are not followed: a key is for one address only.

    Args:
        headers: what is secret about requests, asked for anew after a refusal, so that a changed key is found.
        tls: verify the collector by it.
        seconds: for a request and its answer.
    """

    def __init__(
        self,
        url: str,
        content_type: str,
        headers: Callable[[], Mapping[str, str]],
        *,
        tls: ssl.SSLContext | None = None,
        seconds: float = 30.0,
    ) -> None:
        self._url = url
        self._type = content_type
        self._headers = headers
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(10.0, seconds))
        self._session: aiohttp.ClientSession | None = None

    async def send(self, lines: Sequence[Line]) -> None:
        body = b"".join([line.data + b"\n" for line in lines])
        about = {
            "Content-Type": self._type,
            "Idempotency-Key": sha256("".join([line.uid for line in lines]).encode("ascii")).hexdigest()[:32],
        }
        try:
            session = self._session or self._open()
            async with session.post(self._url, data=body, headers=about, allow_redirects=False) as answer:
                status, after = answer.status, answer.headers.get("Retry-After", "")
                if 200 <= status < 300:
                    await _read_up(answer)
                    return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self.close()
            raise Refused(_told(error)) from error
        await self.close()
        raise _refusal(status, after)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        try:
            headers = self._headers()
        except DsecError as error:
            raise Refused(error.message, lasting=True) from error
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, limit=1)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={**headers, "User-Agent": "dsec"},
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            loop=asyncio.get_running_loop(),
        )
        return self._session


async def _read_up(answer: aiohttp.ClientResponse) -> None:
    """What it has to say beside that it has them, unread: the connection can be used again. One that says much, or breaks off, is given up."""
    left = _ANSWER
    try:
        async for piece in answer.content.iter_any():
            left -= len(piece)
            if left < 0:
                return answer.close()
    except (aiohttp.ClientError, TimeoutError, OSError):
        answer.close()


def _refusal(status: int, after: str) -> Refused:
    reason = f"it answers {status}"
    if status in _TOLD_APART:
        reason = f"{reason}: {_TOLD_APART[status]}"
    elif 300 <= status < 400:
        reason = f"{reason}: redirects are not followed"
    lasting = 300 <= status < 500 and status not in _LATER and status != _TOO_LARGE
    return Refused(reason, after=_seconds(after), lasting=lasting, too_large=status == _TOO_LARGE)


def _seconds(text: str) -> float:
    """What ``Retry-After`` says, within reason."""
    if text.isascii() and text.isdigit() and len(text) < 10:
        return min(float(text), _LONGEST)
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return 0.0
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return min(max(0.0, (at - datetime.now(UTC)).total_seconds()), _LONGEST)


def _told(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer within the time it has"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not good: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "it cannot be reached"
    return type(error).__name__
