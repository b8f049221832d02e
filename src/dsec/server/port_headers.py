"""What of a request goes into a sandbox, and what of its answer comes out. Pure.

Whoever answers is hostile, and answers under the address of this server. So nothing of ours goes in (keys, tokens, our cookies, where
somebody came from), and nothing comes out that speaks for this address as a whole. Pages get an origin of their own (``sandbox`` of CSP):
their scripts run, and are strangers to everything else here.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote_to_bytes, urljoin, urlsplit, urlunsplit

from starlette.types import Scope

from dsec.errors import BadRequest

Headers = list[tuple[bytes, bytes]]

TOKEN: Final = b"dsec_token"
TOKEN_HEADER: Final = b"x-dsec-token"
_PORT_PATH: Final = re.compile(r"/v1/sandboxes/[^/]+/ports/[^/]+(/.*)?", re.DOTALL)
_SEGMENTS: Final = (
    6  # of a path before the part that is the sandbox's own: "", v1, sandboxes, id, ports, port
)
_OUR_KEY: Final = re.compile(rb"(dsec|e2b)_[0-9A-Za-z]{20,}")
_HOP: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization proxy-authentication-info te trailer"
    b" transfer-encoding upgrade http2-settings".split()
)
_KEYS: Final = frozenset((b"authorization", b"x-api-key"))
_NOT_IN: Final = _HOP | frozenset(
    b"host expect origin referer forwarded via x-real-ip content-length x-dsec-token cookie early-data".split()
)
_NOT_OUT: Final = _HOP | frozenset(
    b"accept-ch access-control-allow-credentials alt-svc clear-site-data critical-ch date expect-ct idempotent-replay nel"
    b" no-vary-search origin-agent-cluster origin-trial public-key-pins public-key-pins-report-only referrer-policy report-to"
    b" reporting-endpoints server service-worker-allowed set-login speculation-rules strict-transport-security"
    b" supports-loading-mode use-as-dictionary www-authenticate x-content-type-options".split()
)
_LOCATIONS: Final = (b"location", b"content-location")
_INSIDE: Final = ("127.0.0.1", "localhost", "0.0.0.0", "::1")  # noqa: S104 - a name that programs give themselves
_PAGE: Final[Headers] = [
    (
        b"content-security-policy",
        b"sandbox allow-downloads allow-forms allow-modals allow-pointer-lock allow-popups allow-scripts",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


def token_of(scope: Scope) -> str | None:
    """The token of a sandbox in the query or the header of a request to one of its ports; None: there is none, or it is another request."""
    if not _PORT_PATH.fullmatch(scope["path"]):
        return None
    given = [value for name, value in scope["headers"] if name == TOKEN_HEADER]
    given += [
        unquote_to_bytes(value.replace(b"+", b" "))
        for name, _, value in (part.partition(b"=") for part in scope["query_string"].split(b"&"))
        if _named(name) == TOKEN
    ]
    return given[0].decode("latin-1") if given else None


def _named(name: bytes) -> bytes:
    return unquote_to_bytes(name.replace(b"+", b" "))


def target_of(scope: Scope) -> bytes:
    """Path and query as the program inside is asked for them, byte for byte but for the token.

    Raises:
        BadRequest: the path is written in a way that could mean two things.
    """
    parts = scope["raw_path"].split(b"/", _SEGMENTS)
    seen = scope["path"].split("/", _SEGMENTS)
    if [unquote_to_bytes(part) for part in parts[:_SEGMENTS]] != [part.encode() for part in seen[:_SEGMENTS]]:
        raise BadRequest("path: a slash of it is written as %2F", hint="write it as /")
    path = b"/" + (parts[_SEGMENTS] if len(parts) > _SEGMENTS else b"")
    kept = [part for part in scope["query_string"].split(b"&") if _named(part.partition(b"=")[0]) != TOKEN]
    query = b"&".join(kept)
    return path + b"?" + query if query else path


def inward(headers: Iterable[tuple[bytes, bytes]], port: int, prefix: str, *, by_token: bool) -> Headers:
    """The headers that go in, without those about the body's length.

    Args:
        by_token: it was let in by a sandbox's token beside its other headers: keys among these are for the program, unless they are ours.
    """
    given = list(headers)
    named = _connection(given)
    kept: Headers = [(b"host", b"localhost:%d" % port), (b"x-forwarded-prefix", prefix.encode())]
    for name, value in given:
        if (
            name in _NOT_IN
            or name in named
            or name.startswith((b"x-forwarded-", b"sec-websocket-", b"sec-fetch-"))
        ):
            continue
        if name in _KEYS and not (by_token and _theirs(value)):
            continue
        kept.append((name, value))
    cookies = [
        cookie.strip()
        for name, value in given
        if name == b"cookie"
        for cookie in value.split(b";")
        if cookie.strip()
    ]
    theirs = [cookie for cookie in cookies if not cookie.lower().startswith(b"dsec")]
    return [*kept, (b"cookie", b"; ".join(theirs))] if theirs else kept


def _connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers that ``Connection`` names: of this hop too."""
    return frozenset(
        word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")
    )


def _theirs(value: bytes) -> bool:
    """Nothing that could be a key of ours, also within a password."""
    if _OUR_KEY.search(value):
        return False
    try:
        return not _OUR_KEY.search(base64.b64decode(value.partition(b" ")[2], validate=True))
    except binascii.Error:
        return True


def outward(headers: Iterable[tuple[bytes, bytes]], prefix: str, target: bytes) -> Headers:
    """The headers that come out."""
    given = [(name.lower(), value) for name, value in headers]
    named = _connection(given)
    kept: Headers = []
    for name, value in given:
        if name in _NOT_OUT or name in named or name.startswith((b"dsec-", b"x-dsec-")):
            continue
        if name == b"set-cookie":
            kept += _cookie(value, prefix)
        elif name in _LOCATIONS:
            kept.append((name, _location(value, prefix, target)))
        else:
            kept.append((name, value))
    return kept + _PAGE


def _cookie(value: bytes, prefix: str) -> Headers:
    """A cookie for this port of this sandbox, and for nothing else here."""
    pair, *attributes = [part.strip() for part in value.split(b";")]
    name = pair.partition(b"=")[0].strip().lower()
    if not name or name.startswith((b"dsec", b"__host-", b"__secure-")):
        return []
    kept = [
        part
        for part in attributes
        if part.partition(b"=")[0].strip().lower() not in (b"domain", b"path", b"")
    ]
    return [(b"set-cookie", b"; ".join([pair, *kept, b"Path=%s/" % prefix.encode()]))]


def _location(value: bytes, prefix: str, target: bytes) -> bytes:
    """An address inside as it is seen from outside; one elsewhere as it is."""
    try:
        given = urlsplit(value.decode("latin-1"))
        if (given.scheme not in ("", "http", "https")) or (given.netloc and given.hostname not in _INSIDE):
            return value
    except ValueError:
        return prefix.encode() + b"/"
    own = given._replace(scheme="", netloc="")
    here = urlsplit(urljoin(target.decode("latin-1").partition("?")[0], urlunsplit(own)))
    path = posixpath.normpath("/" + here.path.replace("\\", "/").lstrip("/"))
    if here.path.endswith("/") and path != "/":
        path += "/"
    return urlunsplit(("", "", prefix + path, here.query, here.fragment)).encode("latin-1")
