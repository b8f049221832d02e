"""Values of the model as JSON and back: what crosses HTTP is what the dataclasses say, field by field.

Bytes are base64, mappings objects, tuples and sets arrays, enumerations their values. Reading checks as making does: a value that its
class refuses is a bad request. Bytes of names that are no UTF-8 are lone surrogates in a text, here as inside: ``"odd-\\udcff"``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsec.errors import BadRequest

T = TypeVar("T")


def encode(value: object) -> bytes:
    """JSON of any value of the model."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:  # rare, and only this encoder writes them
        return json.dumps(plain(value), separators=(",", ":")).encode("ascii")


def plain(value: object) -> Any:
    """The same as objects that any JSON library takes."""
    return msgspec.to_builtins(value, enc_hook=_out)


def decode(kind: type[T], data: bytes) -> T:
    """A value of that type.  Raises: BadRequest: the JSON, or what its class refuses; the message names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"body: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "surrogate" not in str(error):
            raise BadRequest(f"body: {error}") from error
    return _decode_escaped(kind, data)


def _decode_escaped(kind: type[T], data: bytes) -> T:
    """As :func:`decode`, of JSON with lone surrogates.  Raises: BadRequest."""
    try:
        return msgspec.convert(json.loads(data, parse_constant=_no_number), type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors, too
        raise BadRequest(f"body: {error}") from error


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")


def _out(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no value of the wire")


_ENCODER = msgspec.json.Encoder(enc_hook=_out)
