"""Hash chaining of records: pure functions from fields to digests.

A record's digest covers every field, the digest of its payload (not the payload, so that a payload can be erased and
the chain still be checked) and the digest of the record before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

from dsec.errors import BadRequest, StoreDamaged, TooLarge
from dsec.model.journal import Draft, Json

VERSION: Final = 1
GENESIS: Final = bytes(32)
MAX_PAYLOAD: Final = 64 * 1024
MAX_NAME: Final = 256

_CHAIN: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNFIT: Final = re.compile("[\0\ud800-\udfff]")


def _encoder() -> Callable[[object], str]:
    """Canonical JSON: sorted keys, no spaces, ASCII only: lone surrogates (undecodable bytes of a path) stay as escapes."""
    slow = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return slow.encode
    # What `slow.encode` would set up anew for every value.
    escape = json.encoder.encode_basestring_ascii
    parts = make(None, slow.default, escape, None, ":", ",", True, False, False)
    return lambda value: "".join(parts(value, 0))


canonical: Final = _encoder()


class Prepared(NamedTuple):
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
    names = f"{draft.act}{draft.ref}{draft.actor}"
    if len(names) > MAX_NAME or _UNFIT.search(names):  # else each of them fits as well
        for name, text in (("act", draft.act), ("ref", draft.ref), ("actor", draft.actor)):
            _check_name(name, text)
    payload = encode(draft.payload)
    return tuple.__new__(Prepared, (draft, payload, sha256(payload).digest()))


def encode(payload: Mapping[str, Json]) -> bytes:
    """The canonical JSON of a payload: sorted keys, no spaces, ASCII.

    Raises:
        BadRequest: a value is not JSON (NaN and infinities are not).
        TooLarge: over 64 KiB.
    """
    try:
        data = canonical(payload if type(payload) is dict else dict(payload)).encode("ascii")
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
    fields = (draft.chain, seq, at, draft.act, str(draft.phase), draft.ref, draft.actor)
    return link_fields(fields, payload_digest=prepared.payload_digest, previous=previous)


def link_fields(
    fields: tuple[str, int, int, str, str, str, str], *, payload_digest: bytes, previous: bytes
) -> bytes:
    """As :func:`link`, from stored fields: chain, seq, at, act, phase, ref, actor."""
    chain, seq, at, act, phase, ref, actor = fields
    # The length of every text comes first: no two lists of fields give the same bytes. The digests have 32 bytes each.
    text = (
        f"{VERSION},{seq},{at},{len(chain)},{len(act)},{len(phase)},{len(ref)},{len(actor)};"
        f"{chain}{act}{phase}{ref}{actor}"
    )
    return sha256(text.encode("utf-8", "surrogateescape") + payload_digest + previous).digest()


def _check_name(name: str, text: str) -> None:
    if len(text) > MAX_NAME:
        raise TooLarge(f"{name}: {len(text)} characters, the bound is {MAX_NAME}")
    if _UNFIT.search(text):
        raise BadRequest(f"{name}: {text!r} holds NUL or undecodable characters")
