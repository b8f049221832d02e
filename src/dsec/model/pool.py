"""What the pool of ready sandboxes holds and did, as values."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.model.sandbox import Level, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKind:
    """Sandboxes that can stand in for one another: made of the same, with the same limits.

    Attributes:
        level, base, template, limits, read_only: what sandboxes of this kind are, as the last create of them said.
        hits: creates that found one ready. misses: creates that did not.
        wasted: made and never used: ended unused, too old, or found dead.
        ready: now. target: how many shall be.
        rate: creates a second, lately. make_seconds: that making one takes.
        memory_bytes: that one of them takes while nobody uses it.
    """

    level: Level
    base: str
    template: str
    limits: Limits
    read_only: bool
    hits: int
    misses: int
    wasted: int
    ready: int
    target: int
    rate: float
    make_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """The pool of ready sandboxes of an engine since it was opened, and now.

    Attributes:
        most: ready sandboxes that it may keep, 0 = it keeps none. memory_most: bytes that they may take together.
        ready: now. target: how many shall be. memory_bytes: that the ready ones take.
        hits, misses, wasted: as of a kind, kinds that are no longer followed included. Creates that nothing can be made ahead
            for (with volumes, of a snapshot, forks) are neither.
        short: the machine is short of memory: nothing is made ahead until it is not.
        kinds: those that are followed, the one that was asked for last first.
    """

    most: int = 0
    memory_most: int = 0
    ready: int = 0
    target: int = 0
    memory_bytes: int = 0
    hits: int = 0
    misses: int = 0
    wasted: int = 0
    short: bool = False
    kinds: tuple[PoolKind, ...] = ()
