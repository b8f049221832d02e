"""Bodies of requests: JSON, read strictly.

What could mean two things, or nothing, is refused with a word about where: unknown and repeated names, NaN and infinities, what is nested
deeper or is larger than anything we understand.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import lru_cache, partial
from typing import Any, Final, NoReturn, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from dsec.errors import BadRequest, TooLarge
from dsec.model.checks import shown

T = TypeVar("T")

MAX_JSON: Final = 1 << 20  # bytes
MAX_DEPTH: Final = 64
_TYPES: Final = ("application/json", "application/vnd.dsec+json")
_OPENING: Final = (b"[", b"{")
_LONG: Final = 1 << 16  # bytes
_MANY: Final = 10_000  # values: some milliseconds
_VALUES: Final = (b",", *_OPENING)

Check = Callable[[object, str], None]
"""Raises BadRequest when a value has what its type does not know; the second argument is where it stands."""


async def body_of(request: Request, kind: type[T], *, needed: bool = False) -> T:
    """The body as a value of that type; none at all is an empty object, unless it is needed.

    Raises:
        BadRequest: it is no such value. TooLarge.
    """
    raw = await json_of(request)
    if needed and not raw:
        raise BadRequest(
            "body: there is none", hint="send JSON; {} where every field is to be as it is by itself"
        )
    return await aside(request, raw, partial(read, kind, raw))


async def aside(request: Request, raw: bytes, work: Callable[[], T]) -> T:
    """What is made of a body; of one with very many values it takes long, so that it is done in a thread, one such body at a time."""
    if len(raw) < _LONG or sum(raw.count(mark) for mark in _VALUES) < _MANY:
        return work()
    async with request.app.state.aside:
        return await asyncio.to_thread(work)


async def json_of(request: Request) -> bytes:
    """The raw body of a call that takes JSON.  Raises: BadRequest: it says that it is something else. TooLarge."""
    raw = await collected(request, MAX_JSON)
    given = request.headers.get("content-type")
    if raw and given is not None and given.partition(";")[0].strip().lower() not in _TYPES:
        raise BadRequest(
            f"content-type: {shown(given)} is not JSON",
            hint="content-type: application/json",
            given=given[:99],
        )
    return raw


async def collected(request: Request, most: int) -> bytes:
    """All of a body.  Raises: TooLarge: more than ``most`` bytes. ClientDisconnect."""
    check_announced(request, most)
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    raw: bytes = message.get("body", b"")
    if not message.get("more_body", False) and len(raw) <= most:
        return raw
    pieces, size = [raw], len(raw)
    while size <= most and message.get("more_body", False):
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
    if size > most:
        raise _too_large(most)
    return b"".join(pieces)


async def pieces_of(request: Request, most: int = 0) -> AsyncIterator[bytes]:
    """A body as it comes, 0 = however long it is.  Raises: TooLarge. ClientDisconnect: it ended before its end."""
    if most:
        check_announced(request, most)
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if most and size > most:
            raise _too_large(most)
        if piece:
            yield piece
        more = message.get("more_body", False)


async def first_line(pieces: AsyncIterator[bytes], most: int) -> tuple[bytes, AsyncIterator[bytes]]:
    """The first line of a body, and what comes behind it.  Raises: BadRequest: there is none of at most ``most`` bytes."""
    begun = b""
    async for piece in pieces:
        begun += piece
        if b"\n" in piece or len(begun) > most:
            break
    line, ended, rest = begun.partition(b"\n")
    if not ended or len(line) > most:
        raise BadRequest(f"body: it does not begin with a line of at most {most} bytes")
    return line, _chained(rest, pieces)


async def _chained(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in pieces:
        yield piece


def check_announced(request: Request, most: int) -> None:
    """Raises: TooLarge: the headers say already that it is."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most:
        raise _too_large(most)


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"body: it is larger than {most} bytes", hint="send files by PUT, in streams", limit=most)


def read(kind: type[T], raw: bytes) -> T:
    """JSON as a value of that type.  Raises: BadRequest, and what the type's own checks raise."""
    value = parsed(raw) if raw else {}
    hashable: Any = kind
    _known(hashable)(value, "$")
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadRequest(f"body: {error}") from error


def parsed(raw: bytes) -> Any:
    """JSON as plain objects.  Raises: BadRequest."""
    try:
        value = _DECODER.decode(raw.decode())
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"body: it is no JSON: {str(error)[:200]}") from None
    if sum(raw.count(mark) for mark in _OPENING) > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise BadRequest(f"body: it is nested deeper than {MAX_DEPTH}")
    return value


def _deeper(value: object, most: int) -> bool:
    layer: list[object] = [value]
    for _ in range(most + 1):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(name for name, _ in pairs)  # each name once: a body may hold very many
        twice = next(name for name, count in counts.items() if count > 1)
        raise BadRequest(f"body: an object has the name {shown(twice)} twice")
    return made


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRequest(f"body: {shown(text)} is larger than any number that can be held")
    return value


def _constant(text: str) -> NoReturn:
    raise BadRequest(f"body: {text} is no JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_constant)


@lru_cache(maxsize=256)
def _known(kind: Any) -> Check:
    """The check for names that the type does not have: msgspec makes it for its own structures, and not for dataclasses."""
    return _checker(inspect.type_info(kind)) or _nothing


def _nothing(value: object, where: str) -> None:
    del value, where


def _checker(kind: inspect.Type) -> Check | None:
    """None: there is nothing to check."""
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        fields = {field.encode_name: _checker(field.type) for field in kind.fields}
        checks = {name: check for name, check in fields.items() if check is not None}
        closed = isinstance(kind, inspect.DataclassType)
        return _object_check(frozenset(fields) if closed else None, checks) if closed or checks else None
    if isinstance(kind, inspect.CollectionType):
        return _each(_checker(kind.item_type))
    if isinstance(kind, inspect.DictType):
        return _each(_checker(kind.value_type))
    if isinstance(kind, inspect.UnionType):
        found = [check for each in kind.types if (check := _checker(each)) is not None]
        return found[0] if len(found) == 1 else None
    return None


def _object_check(names: frozenset[str] | None, checks: dict[str, Check]) -> Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, dict):
            return  # told by the conversion
        unknown = next((name for name in value if names is not None and name not in names), None)
        if unknown is not None:
            raise BadRequest(f"body: Object contains unknown field {shown(unknown)} - at `{where}`")
        for name, inner in checks.items():
            if name in value:
                inner(value[name], f"{where}.{name}")

    return check


def _each(inner: Check | None) -> Check | None:
    if inner is None:
        return None

    def check(value: object, where: str) -> None:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in items:
            inner(item, f"{where}[...]")

    return check
