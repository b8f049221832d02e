"""Alarms to a URL."""

from __future__ import annotations

import aiohttp

from dsec.control.alerts import Sender


class WebhookSender(Sender):
    """Posts each batch as JSON. What is not answered with 2xx was not taken; redirections are not followed."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def send(self, body: bytes) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, trust_env=False)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                self._url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                status = answer.status
        except aiohttp.ClientError as error:  # without the URL, which may hold a secret
            raise RuntimeError(f"the alert's URL cannot be reached: {type(error).__name__}") from error
        if not 200 <= status < 300:
            raise RuntimeError(f"the alert's URL answered {status}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
