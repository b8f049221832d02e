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
from dsec.model.tenants import KEY_MARKS

Headers = list[tuple[bytes, bytes]]

OWN_HOST: Final = "dsec.own_host"
"""In the scope of a request: the port has a host, and so an origin, to itself."""
TOKEN: Final = b"dsec_token"
TOKEN_HEADER: Final = b"x-dsec-token"
_PORT_PATH: Final = re.compile(r"/v1/sandboxes/[^/]+/ports/[^/]+(/.*)?", re.DOTALL)
_SEGMENTS: Final = (
    6  # of a path before the part that is the sandbox's own: "", v1, sandboxes, id, ports, port
)
_OUR_KEY: Final = re.compile(rb"(?:%b)_[0-9A-Za-z]{20,}" % "|".join(KEY_MARKS).encode())
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


_SITE: Final[Headers] = _PAGE[1:]


def token_of(scope: Scope) -> str | None:
    """The token of a sandbox in the query, the header or the cookie of a request to one of its ports; None: there is none, or it is another request."""
    if not _PORT_PATH.fullmatch(scope["path"]):
        return None
    given = [*_in_query(scope), *(value for name, value in scope["headers"] if name == TOKEN_HEADER)]
    if scope.get(OWN_HOST):
        pairs = (cookie.partition(b"=") for cookie in _cookies(scope["headers"]))
        given += [value for name, _, value in pairs if name == TOKEN]
    return given[0].decode("latin-1") if given else None


def token_in_query(scope: Scope) -> bool:
    """Whether the token stands in the address, where it should not stay."""
    return bool(_in_query(scope))


def _in_query(scope: Scope) -> list[bytes]:
    pairs = (part.partition(b"=") for part in scope["query_string"].split(b"&"))
    return [unquote_to_bytes(value.replace(b"+", b" ")) for name, _, value in pairs if _named(name) == TOKEN]


def _cookies(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    given = (cookie.strip() for name, value in headers if name == b"cookie" for cookie in value.split(b";"))
    return [cookie for cookie in given if cookie]


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
    """The headers that go in, without those about the body's length; the first is ``Host``.

    Args:
        prefix: the path of the port, "" where it has a host of its own.
        by_token: it was let in by a sandbox's token beside its other headers: keys among these are for the program, unless they are ours.
    """
    given = list(headers)
    named = _connection(given)
    kept: Headers = [(b"host", b"localhost:%d" % port)]
    kept += [(b"x-forwarded-prefix", prefix.encode())] if prefix else []
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
    theirs = [cookie for cookie in _cookies(given) if not cookie.lower().startswith(b"dsec")]
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
        return not _OUR_KEY.search(base64.b64decode(value.partition(b" ")[2].strip(), validate=True))
    except binascii.Error:
        return True


def outward(headers: Iterable[tuple[bytes, bytes]], prefix: str, target: bytes) -> Headers:
    """The headers that come out. ``prefix``: the path of the port, "" where it has a host of its own."""
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
    return kept + (_PAGE if prefix else _SITE)


def _cookie(value: bytes, prefix: str) -> Headers:
    """A cookie for this port of this sandbox, and for nothing else here."""
    pair, *attributes = [part.strip() for part in value.split(b";")]
    name = pair.partition(b"=")[0].strip().lower()
    if not name or name.startswith((b"dsec", b"__host-", b"__secure-")):
        return []
    dropped = (b"domain", b"path", b"") if prefix else (b"domain", b"")
    kept = [part for part in attributes if part.partition(b"=")[0].strip().lower() not in dropped]
    return [(b"set-cookie", b"; ".join([pair, *kept, *([b"Path=%s/" % prefix.encode()] if prefix else [])]))]


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
