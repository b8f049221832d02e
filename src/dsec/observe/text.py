"""Texts that sandboxes chose, made fit for one line of ASCII."""

from __future__ import annotations

from typing import Final

_SURROGATES: Final = range(0xD800, 0xE000)


def visible(text: str, limit: int) -> str:
    """Printable characters as they are, all others (control characters, separators, lone surrogates) as escapes; at most ``limit`` characters."""
    text = text[:limit]
    if not text.isprintable():
        text = "".join([one if one.isprintable() else _escape(one) for one in text])
    return text if len(text) <= limit else text[:limit]


def ascii_only(text: str, limit: int) -> str:
    """As :func:`visible`, and what is not ASCII as escapes too."""
    text = visible(text, limit)
    if not text.isascii():
        text = "".join([one if one.isascii() else _escape(one) for one in text])
    return text if len(text) <= limit else text[:limit]


def has_surrogates(text: str) -> bool:
    """Whether it holds what is no Unicode: undecodable bytes."""
    if text.isascii():
        return False
    return any(ord(one) in _SURROGATES for one in text)


def _escape(one: str) -> str:
    code = ord(one)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
