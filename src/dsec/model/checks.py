"""Checks of single arguments, made once at the edge; each names the field."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from dsec.errors import BadRequest

TEN_YEARS = 10 * 365 * 86400.0
MAX_PATH_BYTES = 4095


def check_seconds(field: str, value: object) -> None:
    """Raises: BadRequest: not a finite number of seconds from 0 to ten years."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and isfinite(value)
        and 0 <= value <= TEN_YEARS
    ):
        return
    raise BadRequest(f"{field}: {value!r} is not a number of seconds from 0 to ten years")


def check_path(field: str, path: object) -> None:
    """Raises: BadRequest: empty, too long, or with a NUL."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadRequest(f"{field}: {path!r} is not a path (a non-empty str without NUL)")
    try:
        size = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as exc:
        raise BadRequest(f"{field}: {path!r} is not a path: {exc.reason}") from None
    if size > MAX_PATH_BYTES:
        raise BadRequest(f"{field}: the path is longer than {MAX_PATH_BYTES} bytes")


def check_count(field: str, value: object, low: int, high: int) -> None:
    """Raises: BadRequest: not a whole number from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{field}: {value!r} is not a whole number from {low} to {high}")


def check_text(field: str, *values: object) -> None:
    """Raises: BadRequest: something else than str."""
    for value in values:
        if not isinstance(value, str):
            raise BadRequest(f"{field}: {value!r} is not a str")


def check_mapping(field: str, value: object) -> None:
    """Raises: BadRequest: neither None nor a mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise BadRequest(f"{field}: {value!r} is not a mapping of names to values")
