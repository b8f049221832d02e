"""Where a server is: the URLs that a client takes, and the key that opens it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from dsec.errors import BadRequest
from dsec.model.checks import shown

_EXAMPLE: Final = "http://127.0.0.1:7070, or unix:///var/lib/dsec/dsec.sock"
_LONGEST_SOCKET: Final = 107  # bytes of the name of a socket, as the kernel has it
_KEY: Final = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server.

    Attributes:
        base: what every path is added to, without a slash at its end. socket: path of the unix socket to reach it by, "" = none.
        shown: as messages name it.
    """

    base: str
    socket: str
    shown: str

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        return bool(self.socket) or urlsplit(self.base).hostname in ("127.0.0.1", "localhost", "::1")


def parse_endpoint(url: str) -> Endpoint:
    """Raises: BadRequest: not the URL of a server; passwords in it are not repeated."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _refused(url, str(error)) from None
    if parts.username is not None or parts.password is not None:
        raise BadRequest("url: it holds a user or a password", hint="api_key=..., or $DSEC_API_KEY")
    if parts.query or parts.fragment or any(character.isspace() for character in url):
        raise _refused(url, "it has a query, a fragment or a space")
    if parts.scheme == "unix":
        return _socket(url, parts.netloc, unquote(parts.path))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _refused(url, "it is not http, https or unix")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    base = f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")
    base += quote(parts.path.rstrip("/"), safe="/%")
    return Endpoint(base, "", base)


def _socket(url: str, netloc: str, path: str) -> Endpoint:
    if netloc or not path.startswith("/") or "\0" in path:
        raise _refused(url, "a socket has an absolute path")
    if len(path.encode("utf-8", "surrogateescape")) > _LONGEST_SOCKET:
        raise _refused(url, f"the path of a socket has at most {_LONGEST_SOCKET} bytes")
    return Endpoint("http://dsec", path, f"unix://{path}")


def _refused(url: str, why: str) -> BadRequest:
    return BadRequest(f"url: {shown(url)} is not the URL of a server: {why}", hint=_EXAMPLE)


def check_key(key: object) -> str:
    """A key that can be a header.  Raises: BadRequest: it cannot; the message does not repeat it."""
    if isinstance(key, str) and (not key or _KEY.fullmatch(key)):
        return key
    raise BadRequest(
        "api_key: it is not a key", hint="what `dsec key create` printed, without spaces or line ends"
    )
