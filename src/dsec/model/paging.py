"""Long lists, a page at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from dsec.errors import BadRequest
from dsec.model.checks import check_count, shown

T = TypeVar("T")

PAGE: Final = 100
MOST_IN_PAGE: Final = 1000
_DIGITS: Final = 18  # fits 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A part of a list.

    Attributes:
        items: in the order of the list. next: where the next page begins, opaque; "" = this was the last one.
    """

    items: tuple[T, ...]
    next: str = ""


def check_limit(limit: int) -> None:
    """Raises: BadRequest: no number of items that a page may have."""
    check_count("limit", limit, 1, MOST_IN_PAGE)


def check_place(after: str) -> int:
    """The place in a list, a number, that a cursor stands for; "" = its beginning.  Raises: BadRequest: it is none of ours."""
    if not after:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) <= _DIGITS):
        raise BadRequest(f"cursor: {shown(after)} is not from an earlier page", hint="begin without one")
    return int(after)
