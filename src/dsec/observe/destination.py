"""Where events go, as people write it, and the secrets that belong to it, which people must not write there."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dsec.errors import BadRequest, Denied

ENVIRONMENT: Final = "DSEC_EXPORT_HEADERS"
"""Lines ``Name: value`` of what is secret about requests."""
STREAM: Final = "-"
_PORTS: Final = {"syslog": 514, "syslog+tcp": 514, "syslog+tls": 6514, "http": 80, "https": 443}
_HEADER: Final = re.compile(
    r"(?P<name>[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}):[ \t]*(?P<value>[\x21-\x7e](?:[\x20-\x7e]{0,8190}[\x21-\x7e])?)"
)
_OURS: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "idempotency-key"})
_HEADERS: Final = 16
_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Attributes:
    scheme: ``file``, ``-``, ``syslog`` (UDP), ``syslog+tcp``, ``syslog+tls``, ``http``, ``https``. host, port: of a receiver.
    url: of a collector. path: of a file.
    """

    scheme: str
    host: str = ""
    port: int = 0
    url: str = ""
    path: Path = Path()

    @property
    def shown(self) -> str:
        """For messages: without what may be secret."""
        if self.scheme == STREAM:
            return "standard output"
        if self.scheme == "file":
            return str(self.path)
        return f"{self.scheme}://{self.host}:{self.port}"


def parse_destination(text: str) -> Destination:
    """Raises: BadRequest: it is neither a file nor an address that events can go to."""
    if text == STREAM:
        return Destination(scheme=STREAM)
    if "://" not in text:
        if not text or "\0" in text:
            raise BadRequest(f"to: {text[:80]!r} is no name of a file", hint="--to FILE, or an address")
        return Destination(scheme="file", path=Path(text).absolute())
    scheme = text.split("://", 1)[0].lower()
    if scheme not in _PORTS:
        raise BadRequest(
            f"to: there is no way to {scheme[:40]!r}",
            hint=f"a file, -, or one of {', '.join(f'{one}://' for one in sorted(_PORTS))}",
        )
    if not text.isascii() or not text.isprintable() or " " in text:
        raise BadRequest("to: an address has printable ASCII characters only")
    return _address(scheme, text)


def _address(scheme: str, text: str) -> Destination:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port or _PORTS[scheme]
    except ValueError:
        raise BadRequest(f"to: this is no address of {scheme}", hint=f"{scheme}://host:port") from None
    if (
        parts.username is not None or parts.password is not None
    ):  # it is in the list of processes already: do not repeat it
        raise BadRequest(
            "to: an address must not hold a user or a password: others see it",
            hint=f"put a header into ${ENVIRONMENT} or a --header-file",
        )
    if not host:
        raise BadRequest("to: the address names no host", hint=f"{scheme}://host:port")
    if parts.fragment or (scheme.startswith("syslog") and (parts.path.strip("/") or parts.query)):
        raise BadRequest("to: the address has parts that mean nothing", hint=f"{scheme}://host:port")
    return Destination(scheme=scheme, host=host, port=port, url=text)


class Headers:
    """Headers of requests, read from a file or the environment each time they are wanted.

    Raises (when called too):
        BadRequest: it does not hold headers. Denied: others can read the file.
    """

    def __init__(self, path: Path | None, environment: Mapping[str, str]) -> None:
        self._path = path
        self._text = environment.get(ENVIRONMENT, "")

    def __call__(self) -> dict[str, str]:
        headers = _parse(self._text, f"${ENVIRONMENT}")
        if self._path is not None:
            headers.update(_parse(_read(self._path), str(self._path)))
        return headers


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            data = file.read(_BYTES)
    except OSError as error:
        raise BadRequest(f"header-file: {path}: {error.strerror}") from error
    if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077:
        raise Denied(f"header-file: others can read {path}", hint=f"chmod 600 {path}")
    return data.decode("latin-1")


def _parse(text: str, where: str) -> dict[str, str]:
    """Names and values. What is wrong is told by its line, never by its text."""
    headers: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = _HEADER.fullmatch(line.strip())
        if found is None or found["name"].lower() in _OURS or len(headers) >= _HEADERS:
            raise BadRequest(
                f"{where}: line {number} is no header that can be added", hint="one `Name: value` a line"
            )
        headers[found["name"]] = found["value"]
    return headers


def check_secret(destination: Destination, headers: Mapping[str, str]) -> None:
    """Raises: Denied: a secret would cross a network in the clear."""
    if headers and destination.scheme == "http" and not _loopback(destination.host):
        raise Denied(
            "to: headers that may be secret would go over a network unencrypted",
            hint="use https://, or a proxy on this machine",
        )


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tls_context(ca: Path | None, certificate: Path | None) -> ssl.SSLContext:
    """What verifies a receiver, and shows it our certificate where there is one (PEM, with its key).  Raises: BadRequest."""
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate is not None:
            context.load_cert_chain(certificate, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise BadRequest(
            f"tls: the certificates cannot be used: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("a key with a password")
