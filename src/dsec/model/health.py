"""What a machine can isolate, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dsec.model.sandbox import Flag, Level


class Status(StrEnum):
    """Of one layer of isolation here."""

    ACTIVE = "active"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of isolation. ``detail``: what there is, or why not; ``hint``: how to enable what is missing."""

    name: str
    status: Status
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a trial of one level: a sandbox made, one command run in it, destroyed.

    Attributes:
        reason, hint: why it is not available, and what to do; "" when it is.
        flags: what it guarantees here. missing: what it does not.
        seconds: the trial took, a first build of the base image included.
    """

    level: Level
    available: bool
    reason: str = ""
    hint: str = ""
    flags: frozenset[Flag] = frozenset()
    missing: frozenset[Flag] = frozenset()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All layers and all levels of a machine."""

    kernel: str
    layers: tuple[Layer, ...]
    levels: tuple[Verdict, ...]
