"""How a record ended, in few words: what severities and states of other formats follow from."""

from __future__ import annotations

from enum import Enum
from typing import Final

from dsec.model.journal import Phase, Record
from dsec.observe.events import GAP, REWOUND


class Verdict(Enum):
    """What somebody who watches should make of it."""

    ASKED = "asked"  # an intent: nothing is done yet
    DONE = "done"
    FAILED = "failed"  # what was asked for did not come about
    ALERT = "alert"  # somebody should look


ALERTS: Final = frozenset(
    {GAP, REWOUND, "sandbox.failed", "sandbox.cleanup", "sandbox.stray", "journal.checkpoint_cut"}
)
"""Acts that nobody asked for."""
REFUSALS: Final = frozenset({"key.refused"})
"""Acts that say by their name that something was not done."""
_GOOD: Final = frozenset({"ok", ""})


def verdict_of(record: Record) -> Verdict:
    """Of one record."""
    if record.act in ALERTS:
        return Verdict.ALERT
    if record.act in REFUSALS:
        return Verdict.FAILED
    if record.phase is Phase.INTENT:
        return Verdict.ASKED
    outcome = record.payload.get("outcome", "")
    return Verdict.DONE if isinstance(outcome, str) and outcome in _GOOD else Verdict.FAILED
