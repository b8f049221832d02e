"""One question over the socket of a server, with the standard library alone."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

PATIENCE: Final = 60.0  # seconds


class Unix(HTTPConnection):
    """HTTP over the socket of a server."""

    def __init__(self, path: Path) -> None:
        super().__init__("dsec", timeout=PATIENCE)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


def ask(home: Path, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of the answer of whoever serves that home.  Raises: OSError, HTTPException."""
    connection = Unix(home / "dsec.sock")
    try:
        given = {"content-type": "application/json", **headers}
        connection.request(method, path, None if body is None else json.dumps(body), given)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    finally:
        connection.close()
