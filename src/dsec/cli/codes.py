"""Exit codes: what each code of an error becomes."""

from __future__ import annotations

from typing import Final

OTHER: Final = 1
USAGE: Final = 2
DENIED: Final = 77
TIMEOUT: Final = 124
SIGNALLED: Final = 128  # and the number of the signal
BROKEN_PIPE: Final = 141

EXIT_CODES: Final[dict[str, int]] = {
    "bad_request": USAGE,
    "not_found": 4,
    "file_not_found": 4,
    "conflict": 5,
    "unsupported": 69,
    "isolation_unavailable": 69,
    "busy": 75,
    "denied": DENIED,
    "file_denied": DENIED,
    "timed_out": TIMEOUT,
}
"""By the ``code`` of an error; every other error is 1."""


def exit_code(code: str) -> int:
    """The exit code for the ``code`` of an error."""
    return EXIT_CODES.get(code, OTHER)
