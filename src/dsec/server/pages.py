"""Lists that the engine gives whole, told a page at a time: stable however many come and go between two pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import Query

from dsec.errors import BadRequest
from dsec.model.checks import shown
from dsec.model.paging import MOST_IN_PAGE, Page

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
