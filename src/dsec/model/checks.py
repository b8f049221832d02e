"""Checks of single arguments, made once at the edge; each names the field."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest

TEN_YEARS = 10 * 365 * 86400.0
MAX_PATH_BYTES = 4095
MAX_MODE: Final = 0o7777
_LONGEST_NAME: Final = 255
_SHOWN: Final = 200  # characters of a wrong value in a message
_NUMBER: Final = "a number, not text"
_PATHS: Final = {"bytes": "os.fsdecode(path)", "PosixPath": "str(path)", "PurePosixPath": "str(path)"}


def shown(value: object) -> str:
    """A wrong value for a message: shortened, and never itself the cause of another error."""
    if isinstance(value, str | bytes | bytearray) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}…"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a whole number of more than 4,300 digits has none, and an object's may do anything
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def check_seconds(field: str, value: object) -> None:
    """Raises: BadRequest: not a finite number of seconds from 0 to ten years."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= TEN_YEARS:
        return
    raise BadRequest(
        f"{field}: {shown(value)} is not a number of seconds from 0 to ten years",
        hint=_NUMBER if isinstance(value, str) else "",
        field=field,
    )


def check_path(field: str, path: object) -> None:
    """Raises: BadRequest: empty, too long, or with a NUL."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadRequest(
            f"{field}: {shown(path)} is not a path (a non-empty str without NUL)",
            hint=_PATHS.get(type(path).__name__, ""),
            field=field,
        )
    size = len(path) if path.isascii() else len(encoded(field, path))
    if size > MAX_PATH_BYTES:
        raise BadRequest(f"{field}: the path is longer than {MAX_PATH_BYTES} bytes", field=field, bytes=size)


def check_count(field: str, value: object, low: int, high: int) -> None:
    """Raises: BadRequest: not a whole number from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(
            f"{field}: {shown(value)} is not a whole number from {low} to {high}",
            hint=_NUMBER if isinstance(value, str) else "",
            field=field,
        )


def check_mode(field: str, value: object) -> None:
    """Raises: BadRequest: not the permission bits of a file."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_MODE:
        raise BadRequest(
            f"{field}: {shown(value)} is not permission bits from 0 to 0o7777",
            hint="an octal number, such as 0o755",
            field=field,
        )


def check_flag(field: str, value: object) -> None:
    """Raises: BadRequest: neither True nor False."""
    if value is not True and value is not False:
        raise BadRequest(f"{field}: {shown(value)} is not True or False", field=field)


def check_text(field: str, *values: object) -> None:
    """Raises: BadRequest: something else than str, or one that no bytes stand for."""
    for value in values:
        if not isinstance(value, str):
            raise BadRequest(
                f"{field}: {shown(value)} is not a str",
                hint="decode it first" if isinstance(value, bytes) else "",
                field=field,
            )
        if not value.isascii():
            encoded(field, value)


def check_user(user: object) -> None:
    """Raises: BadRequest: nothing that a user can be called."""
    check_text("user", user)
    if len(str(user)) > _LONGEST_NAME:
        raise BadRequest(f"user: {shown(user)} is longer than {_LONGEST_NAME} characters", field="user")


def check_mapping(field: str, value: object) -> None:
    """Raises: BadRequest: neither None nor a mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise BadRequest(
            f"{field}: {shown(value)} is not a mapping of names to values",
            hint='{"NAME": "value"}',
            field=field,
        )


def local_path(field: str, value: object) -> Path:
    """A path of this machine.  Raises: BadRequest: neither a str nor a path, or empty, too long, or with a NUL."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    check_path(field, path)
    return Path(str(path))


def encoded(field: str, text: str) -> bytes:
    """UTF-8, undecodable bytes as surrogate escapes.  Raises: BadRequest."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise BadRequest(
            f"{field}: {shown(text)} cannot be encoded: {exc.reason}",
            hint="text from undecodable bytes needs errors='surrogateescape'",
            field=field,
        ) from None
