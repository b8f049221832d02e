"""Lists that the engine gives whole, told a page at a time: stable however many come and go between two pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import Query
from starlette.responses import Response

from dsec.errors import BadRequest
from dsec.model.checks import shown
from dsec.model.paging import MOST_IN_PAGE, Page
from dsec.wire.values import encode

T = TypeVar("T")

Key = tuple[str | float, ...]
Limit = Annotated[int, Query(ge=1, le=MOST_IN_PAGE)]
Cursor = Annotated[str, Query(max_length=1024, description="`next` of the page before, empty for the first")]
_ORDER: Final[msgspec.json.Decoder[list[str | float]]] = msgspec.json.Decoder(list[str | float])


def page_of(items: Sequence[T], key: Callable[[T], Key], *, cursor: str, limit: int) -> Page[T]:
    """The first ``limit`` of those behind ``cursor``, in the order of ``key``, which no two of them share.

    Raises:
        BadRequest: the cursor is not from here.
    """
    found = sorted(items, key=key)
    if cursor:
        try:
            after = tuple(_ORDER.decode(base64.urlsafe_b64decode(cursor.encode())))
            found = [item for item in found if key(item) > after]
        except (ValueError, TypeError, binascii.Error, msgspec.MsgspecError):
            raise BadRequest(f"cursor: {shown(cursor)} is not from here", hint="leave it out") from None
    here = tuple(found[:limit])
    if len(found) <= limit:
        return Page(items=here)
    return Page(items=here, next=base64.urlsafe_b64encode(msgspec.json.encode(key(here[-1]))).decode())


MOST_BYTES: Final = 4 << 20
"""Of JSON in one answer with a list; an item more may go beyond it."""
_LEAST_PART: Final = 32  # items; one may take a megabyte here, however small its JSON is
_MOST_PART: Final = 128
_LITTLE: Final = 128 << 10

Fetch = Callable[[str, int], Awaitable[Page[T]]]


async def listed(fetch: Fetch[T], after: str, limit: int) -> Response:
    """The answer with so many items, or fewer of those that are large, and ``next`` where there are more behind them.

    Args:
        fetch: the next of them behind a cursor, at most so many, and the cursor behind these ("" = there are none).
    """
    pieces: list[bytes] = []
    size, part = 0, _LEAST_PART
    while True:
        found = await fetch(after, min(part, limit - len(pieces)))
        fresh = [encode(item) for item in found.items]
        pieces += fresh
        after = found.next
        gained = sum(map(len, fresh))
        size += gained
        if not after or len(pieces) >= limit or size >= MOST_BYTES:
            break
        part = _MOST_PART if gained < _LITTLE else _LEAST_PART
    body = b'{"items":[%b],"next":%b}' % (b",".join(pieces), encode(after))
    return Response(body, media_type="application/json")
