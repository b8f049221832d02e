"""Bundles made by a dishonest hand, with a correct sum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from dsec.images.bundle import MAGIC, SUM_BYTES, head

_LENGTH: Final = 8


def manifest_of(bundle: bytes) -> dict[str, Any]:
    """What it says of itself."""
    begin = len(MAGIC) + _LENGTH
    value: dict[str, Any] = json.loads(
        bundle[begin : begin + int.from_bytes(bundle[len(MAGIC) : begin], "big")]
    )
    return value


def forged(bundle: bytes, facts: Mapping[str, object]) -> bytes:
    """The same trees, with some facts exchanged."""
    manifest = manifest_of(bundle)
    begin = len(MAGIC) + _LENGTH + int.from_bytes(bundle[len(MAGIC) : len(MAGIC) + _LENGTH], "big")
    trees = [(each["digest"], each["size"]) for each in manifest["trees"]]
    whole = head(manifest["kind"], {**manifest["about"], **facts}, trees) + bundle[begin:-SUM_BYTES]
    return whole + hashlib.sha256(whole).digest()
