"""What waits to be made, what is refused, and how much memory there is, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

AT_ONCE: Final = 8
"""Sandboxes that are made at the same time, unless something else is said."""
QUEUE: Final = 2000
"""Requests that may wait for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionInfo:
    """The queue of what is to be made or woken, now, and what became of it since the engine was opened.

    Attributes:
        most_waiting: bound of the queue, 0 = there is none. at_once: turns at the same time.
        waiting: now. projects: how many of each project wait. in_progress: being made now; slow: of those, what has given its place
            to others because it waits for something else than the processor.
        admitted: turns that were had. abandoned: of those who left the queue.
        refused: how often, by reason: ``queue``, ``memory``, and the name of each quota.
        turn_seconds: that a turn took lately.
        memory_bytes: of the machine, or what of it may be used here. available_bytes: of that, when it was looked at last, -1 = not yet.
        reserve_bytes: that are never given away. promised_bytes: expected of what was made so lately that it does not show yet.
    """

    most_waiting: int = 0
    at_once: int = 0
    waiting: int = 0
    projects: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    in_progress: int = 0
    slow: int = 0
    admitted: int = 0
    abandoned: int = 0
    refused: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    turn_seconds: float = 0.0
    memory_bytes: int = -1
    available_bytes: int = -1
    reserve_bytes: int = 0
    promised_bytes: int = 0
