"""Whether a sandbox that nobody uses stays running, is frozen, or is hibernated: facts in, a decision and its reason out. Nothing is done here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dsec.errors import BadRequest
from dsec.model.checks import check_seconds
from dsec.model.sandbox import Hibernate

PRESSED: Final = 0.15  # of the machine's memory available: below it, what nobody uses goes sooner
HASTE: Final = 4.0  # how much sooner
PATIENCE: Final = 2.0  # average gaps between acts that are waited before files alone are kept
PATIENCE_MOST: Final = 4.0  # at most this many times the threshold
WORKING: Final = 0.02  # of a CPU: processes that use more are at work
SHORTEST: Final = 2.0  # seconds: what helps init to start commands is still there for one after the last
SOON: Final = 1.0  # seconds until the next look, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """After how many seconds without any act a sandbox is frozen or hibernated; 0 = never.

    Attributes:
        freeze: its processes stand still, and go on with the next act. hibernate: only its files are kept, if it has no processes of its own.

    Raises:
        BadRequest: the message names the field.
    """

    freeze: float = 0.0
    hibernate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("freeze", "hibernate"):
            seconds = getattr(self, name)
            check_seconds(f"residence.{name}", seconds)
            if 0 < seconds < SHORTEST:
                raise BadRequest(
                    f"residence.{name}: {seconds:g} s is less than {SHORTEST:g} s",
                    hint="0 means never",
                )
        if self.freeze and self.hibernate and self.hibernate < self.freeze:
            raise BadRequest(
                f"residence.hibernate: {self.hibernate:g} s is less than residence.freeze, {self.freeze:g} s",
                hint="what is frozen first is hibernated later",
            )

    @property
    def on(self) -> bool:
        """Whether anything is ever decided."""
        return bool(self.freeze or self.hibernate)


ALL_STAY: Final = Residence()
"""Every sandbox stays where it is."""
SERVED: Final = Residence(freeze=300.0, hibernate=1800.0)
"""What a server decides by when nothing else is said: agents wait for models for seconds, for people for minutes."""


class Stay(StrEnum):
    """Where a sandbox should be."""

    RUNNING = "running"
    FROZEN = "frozen"
    HIBERNATED = "hibernated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a sandbox that runs, or was frozen for its idleness.

    Attributes:
        quiet: seconds since its last act. gap: seconds between two of its acts, on average.
        acts: in progress, commands included that somebody waits for or reads. commands: in progress, all of them.
        processes: beyond init, -1 = not known. cpu: of one CPU that they used since the last look, -1 = not known.
        memory_left: the share of the machine's memory that is available.
        frozen: it is. can_freeze, can_hibernate: its level is able to. hibernate: what it says of itself. ends_idle: it ends when it is idle.
    """

    quiet: float
    gap: float
    acts: int
    commands: int
    processes: int
    cpu: float
    memory_left: float
    frozen: bool
    can_freeze: bool
    can_hibernate: bool
    hibernate: Hibernate
    ends_idle: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Where it should be, why in words, and in how many seconds something else may be decided."""

    stay: Stay
    reason: str
    again: float = SOON


def decide(facts: Facts, residence: Residence) -> Decision:
    """Where a sandbox with these ``facts`` should be."""
    if not residence.on:
        return Decision(Stay.RUNNING, "this engine lets every sandbox run", 3600.0)
    here = Stay.FROZEN if facts.frozen else Stay.RUNNING
    if facts.acts:
        return Decision(Stay.RUNNING, f"in use: {facts.acts} acts in progress")
    haste = HASTE if facts.memory_left < PRESSED else 1.0
    quiet = _words(facts, haste)
    freeze, hibernate = residence.freeze / haste, _rest_after(facts, residence) / haste
    wakes = facts.cpu > WORKING and not facts.frozen
    keep, kept = _kept_from_rest(facts)
    if hibernate and facts.quiet >= hibernate and not keep and not wakes:
        return Decision(Stay.HIBERNATED, quiet)
    if facts.frozen:
        why = kept if keep else f"hibernated after {hibernate:g} s" if hibernate else "not hibernated here"
        return Decision(Stay.FROZEN, f"{quiet}; {why}", _until(hibernate, facts.quiet))
    if wakes:
        return Decision(here, f"its processes are at work ({facts.cpu:.0%} of a CPU); {quiet}")
    if residence.freeze and facts.quiet >= freeze and facts.can_freeze:
        return Decision(Stay.FROZEN, f"{quiet}; {kept}" if keep and kept else quiet)
    first = min((each for each in (freeze, hibernate) if each), default=0.0)
    return Decision(Stay.RUNNING, f"{quiet}; it may rest after {first:g} s", _until(first, facts.quiet))


def _rest_after(facts: Facts, residence: Residence) -> float:
    """Seconds without an act after which files alone are kept: one that is used rarely, but again and again, is waited for."""
    if not residence.hibernate:
        return 0.0
    return max(residence.hibernate, min(facts.gap * PATIENCE, residence.hibernate * PATIENCE_MOST))


def _kept_from_rest(facts: Facts) -> tuple[bool, str]:
    """Whether it must not be hibernated, and why."""
    if not facts.can_hibernate:
        return True, "its level keeps no files without a sandbox"
    if facts.hibernate is Hibernate.NEVER:
        return True, "it says hibernate: never"
    if facts.ends_idle:
        return True, "it ends by itself when it is idle"
    if facts.hibernate is Hibernate.FILES:
        return False, ""
    if facts.commands:
        return True, f"{facts.commands} commands of it have not ended"
    if facts.processes:
        count = (
            f"{facts.processes} processes" if facts.processes > 0 else "it is not known how many processes"
        )
        return True, f"{count} would end"
    return False, ""


def _words(facts: Facts, haste: float) -> str:
    pressed = f"; {facts.memory_left:.0%} of memory is left" if haste > 1 else ""
    usual = f" (one in {facts.gap:.0f} s on average)" if facts.gap >= 1 else ""
    return f"no act for {facts.quiet:.0f} s{usual}{pressed}"


def _until(threshold: float, quiet: float) -> float:
    return max(threshold - quiet, SOON) if threshold else 60.0
