"""Long lists, a page at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

PAGE: Final = 100
MOST_IN_PAGE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A part of a list.

    Attributes:
        items: in the order of the list. next: where the next page begins, opaque; "" = this was the last one.
    """

    items: tuple[T, ...]
    next: str = ""
