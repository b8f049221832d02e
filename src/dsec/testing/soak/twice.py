"""The same request twice at once, with one key, until it is answered: bare HTTP, as a client of another maker asks."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from dsec.errors import DsecError, UnknownOutcome
from dsec.wire.problems import from_body

_PATIENCE: Final = 30.0
_PAUSE: Final = 0.1
_AGAIN: Final = (409, 429, 503)  # it is being made, or the server comes back


def made_twice(url: str, key: str, body: Mapping[str, Any], token: str) -> str:
    """The id of the one sandbox that was made.  Raises: UnknownOutcome: nobody knows. DsecError: they were told different things."""
    told: list[tuple[int, Mapping[str, Any]]] = []

    def ask() -> None:
        told.append(_asked(url, key, body, token))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = {str(answer["id"]) for status, answer in told if status < 300}
    if len(ids) > 1:
        raise DsecError(f"one key made {len(ids)} sandboxes: {sorted(ids)}")
    if not ids:
        for status, answer in told:
            error = from_body(answer, status)
            if error.code not in ("unknown_outcome", "runtime_unavailable"):
                raise error
        raise UnknownOutcome(f"asked twice: {told}")
    return ids.pop()


def _asked(url: str, key: str, body: Mapping[str, Any], token: str) -> tuple[int, Mapping[str, Any]]:
    place = urlsplit(url)
    headers = {"X-API-Key": key, "Content-Type": "application/json", "Idempotency-Key": f"soak-{token}"}
    deadline = time.monotonic() + _PATIENCE
    last: tuple[int, Mapping[str, Any]] = (
        503,
        {"error": {"code": "unknown_outcome", "message": "nobody answered"}},
    )
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_PATIENCE)
        try:
            connection.request("POST", "/v1/sandboxes", json.dumps(body), headers)
            answer = connection.getresponse()
            last = answer.status, json.loads(answer.read() or b"{}")
            if last[0] not in _AGAIN:
                return last
        except (OSError, http.client.HTTPException, ValueError):
            pass  # its server died
        finally:
            connection.close()
        time.sleep(_PAUSE)
    return last
