"""Hash chaining of records: pure functions from fields to digests.

A record's digest covers every field, the digest of its payload (not the payload, so that a payload can be erased and
the chain still be checked) and the digest of the record before it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dsec.errors import BadRequest, StoreDamaged, TooLarge
from dsec.model.journal import Draft, Json

VERSION: Final = 1
GENESIS: Final = bytes(32)
MAX_PAYLOAD: Final = 64 * 1024
MAX_NAME: Final = 256

_CHAIN: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# ASCII only: lone surrogates (undecodable bytes of a path or an argument) survive as escapes.
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A draft that was checked, with its payload as it will be stored."""

    draft: Draft
    payload: bytes
    payload_digest: bytes


def prepare(draft: Draft) -> Prepared:
    """Check a draft and encode its payload.

    Raises:
        BadRequest: a field cannot be stored.
        TooLarge: the payload is over 64 KiB.
    """
    if not _CHAIN.fullmatch(draft.chain):
        raise BadRequest(f"chain: {draft.chain[:150]!r} is not 1 to 128 letters, digits or any of ._:-")
    for name, text in (("act", draft.act), ("ref", draft.ref), ("actor", draft.actor)):
        _check_name(name, text)
    payload = encode(draft.payload)
    return Prepared(draft, payload, hashlib.sha256(payload).digest())


def encode(payload: Mapping[str, Json]) -> bytes:
    """The canonical JSON of a payload: sorted keys, no spaces, ASCII.

    Raises:
        BadRequest: a value is not JSON (NaN and infinities are not).
        TooLarge: over 64 KiB.
    """
    try:
        data = _ENCODER.encode(dict(payload)).encode("ascii")
    except (TypeError, ValueError, RecursionError) as exc:
        raise BadRequest(f"payload: not JSON: {exc}") from exc
    if len(data) > MAX_PAYLOAD:
        raise TooLarge(
            f"payload: {len(data)} bytes, the bound is {MAX_PAYLOAD}",
            hint="record a digest instead of the value",
            size=len(data),
            limit=MAX_PAYLOAD,
        )
    return data


def decode(payload: bytes) -> dict[str, Json]:
    """The payload that was encoded.  Raises: StoreDamaged: it is not an object of JSON."""
    try:
        value = json.loads(payload)
    except ValueError as exc:
        raise StoreDamaged(f"a stored payload is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise StoreDamaged(f"a stored payload is {type(value).__name__}, not an object")
    return value


def link(prepared: Prepared, *, seq: int, at: int, previous: bytes) -> bytes:
    """The digest of a record. ``at``: microseconds since the epoch."""
    draft = prepared.draft
    return link_fields(
        (draft.chain, seq, at, draft.act, str(draft.phase), draft.ref, draft.actor),
        payload_digest=prepared.payload_digest,
        previous=previous,
    )


def link_fields(
    fields: tuple[str, int, int, str, str, str, str], *, payload_digest: bytes, previous: bytes
) -> bytes:
    """As :func:`link`, from stored fields: chain, seq, at, act, phase, ref, actor."""
    # JSON keeps fields apart whatever they hold; joining them with a separator would not.
    head = _ENCODER.encode([VERSION, *fields, payload_digest.hex(), previous.hex()])
    return hashlib.sha256(head.encode("ascii")).digest()


def _check_name(name: str, text: str) -> None:
    if len(text) > MAX_NAME:
        raise TooLarge(f"{name}: {len(text)} characters, the bound is {MAX_NAME}")
    if "\0" in text or _has_surrogate(text):
        raise BadRequest(f"{name}: {text!r} holds NUL or undecodable characters")


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)
