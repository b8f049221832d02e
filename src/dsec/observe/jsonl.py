"""Records as they are, one JSON document a line, ASCII only.

A strict reader must be able to read every line, whatever a sandbox wrote: undecodable bytes, which the journal keeps as lone
surrogates, are escapes in ``payload``, and ``payload_base64`` then holds the exact bytes.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Final

from dsec.model.journal import Json
from dsec.observe.events import Event, Origin
from dsec.observe.text import has_surrogates

_LONE: Final = ("\\ud8", "\\ud9", "\\uda", "\\udb", "\\udc", "\\udd", "\\ude", "\\udf")


def jsonl(event: Event, origin: Origin) -> bytes:
    """One line, without its end."""
    record = event.record
    line: dict[str, object] = {
        "id": event.uid,
        "position": event.position,
        "host": origin.host,
        "chain": record.chain,
        "seq": record.seq,
        "at": record.at,
        "act": _text(record.act),
        "phase": record.phase.value,
        "ref": _text(record.ref),
        "actor": _text(record.actor),
        "payload": record.payload,
        "digest": record.digest,
    }
    if any(one in event.data for one in _LONE):  # pairs of them are characters; alone they are none
        payload = _decodable(dict(record.payload))
        if payload != record.payload:
            line["payload"] = payload
            line["payload_base64"] = b64encode(event.data.encode("ascii")).decode("ascii")
    return json.dumps(line, separators=(",", ":")).encode("ascii")


def _decodable(value: Json) -> Json:
    """The same with escapes for lone surrogates, in keys too."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return [_decodable(one) for one in value]
    if isinstance(value, dict):
        return {_text(key): _decodable(one) for key, one in value.items()}
    return value


def _text(text: str) -> str:
    if not has_surrogates(text):
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
