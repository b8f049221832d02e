"""Errors across HTTP: one shape, one status for each code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dsec.errors import DsecError, all_errors

STATUS: Final[Mapping[str, int]] = {
    "bad_request": 400,
    "unauthenticated": 401,
    "denied": 403,
    "not_found": 404,
    "file_not_found": 404,
    "conflict": 409,
    "unknown_outcome": 409,
    "sandbox_failed": 410,
    "too_large": 413,
    "unsupported": 422,
    "isolation_unavailable": 422,
    "build_failed": 422,
    "file_error": 422,
    "file_denied": 403,
    "file_is_directory": 422,
    "file_kind": 422,
    "busy": 429,
    "over_quota": 429,
    "internal": 500,
    "protocol_error": 502,
    "cleanup_failed": 500,
    "store_damaged": 500,
    "runtime_unavailable": 503,
    "timed_out": 504,
    "storage_full": 507,
    "quota_exceeded": 507,
}
"""Of every code of the tree."""

_PLAIN: Final = str | int | float | bool | None
_CLASSES: Final = {kind.code: kind for kind in reversed(all_errors())}


def to_body(error: DsecError) -> dict[str, Any]:
    """What a client reads: ``{"error": {"code", "message", "hint", "retryable", "facts"}}``."""
    facts = {name: _fact(value) for name, value in error.facts.items()}
    return {
        "error": {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "retryable": error.retryable,
            "facts": facts,
        }
    }


def from_body(body: object, status: int) -> DsecError:
    """The error that a server told, as its own class; what is no such body is told by its status."""
    said = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(said.get("message"), str):
        kind = next((_CLASSES[code] for code, number in STATUS.items() if number == status), DsecError)
        return kind(f"the server answered {status}")
    kind = _CLASSES.get(str(said.get("code")), DsecError)
    facts = said.get("facts")
    hint = said.get("hint")
    named = {str(name): value for name, value in facts.items()} if isinstance(facts, Mapping) else {}
    for taken in ("self", "message", "hint"):  # parameters, and so no facts
        named.pop(taken, None)
    return kind(said["message"], hint=hint if isinstance(hint, str) else "", **named)


def _fact(value: object) -> Any:
    """As it is where JSON has it, lists of such things too; else as text."""
    if isinstance(value, list | tuple):
        return [each if isinstance(each, _PLAIN) else str(each) for each in value]
    return value if isinstance(value, _PLAIN) else str(value)
