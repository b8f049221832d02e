"""The formats, by name; each line within a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from dsec.observe.cef import cef
from dsec.observe.events import Event, Origin, abridged
from dsec.observe.jsonl import jsonl
from dsec.observe.ocsf import ocsf

LEAST_BYTES: Final = 4096
"""An abridged event fits into so many."""


class Format(NamedTuple):
    """How events become lines.

    Attributes:
        render: one line without its end. opening: how every line begins. content_type: of many lines.
    """

    name: str
    render: Callable[[Event, Origin], bytes]
    opening: bytes
    content_type: str


FORMATS: Final = {
    one.name: one
    for one in (
        Format("jsonl", jsonl, b'{"id":"', "application/x-ndjson"),
        Format("ocsf", ocsf, b'{"activity_id":', "application/x-ndjson"),
        Format("cef", cef, b"CEF:0|DSec|dsec|", "text/plain; charset=utf-8"),
    )
}


def line_of(form: Format, event: Event, origin: Origin, limit: int = 0) -> bytes:
    """One line; longer than ``limit`` bytes (0 = any length), its payload is left out and its digest told instead."""
    line = form.render(event, origin)
    if limit and len(line) > limit:
        line = form.render(abridged(event), origin)
    return line
