"""What is killed in a round, when, and how: a function of the seed and the number of the round, and of nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from dsec.failpoints import NAMES

FAILPOINT: Final = "failpoint"
MOMENT: Final = "moment"
RECOVERY: Final = "recovery"
SPAWNER: Final = "spawner"
STOP: Final = "stop"
KINDS: Final = {FAILPOINT: 10, MOMENT: 3, RECOVERY: 2, SPAWNER: 3, STOP: 1}
"""Weights: the server at a failpoint; at any moment; once more while it comes back; a spawner alone; an end in good order."""
LEVELS: Final = ("container", "process")
_SHARED: Final = ("pause", "resume", "exec", "upload", "journal", "create", "destroy")
"""First words of the failpoints that a level without layers reaches."""
_MOST: Final = {"journal": 150, "exec": 25, "upload": 8, "create": 6}
"""How often a failpoint is reached at most before it is the last one."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One round's.

    Attributes:
        kind: one of :data:`KINDS`. failpoint: ``NAME:n``, of that kind. spawners: they are killed at the same moment.
        after: seconds after the clients began; then a failpoint is set. again: seconds after its restart began, of ``recovery``.
    """

    kind: str
    failpoint: str = ""
    spawners: bool = False
    after: float = 0.0
    again: float = 0.0

    def __str__(self) -> str:
        words = [self.kind, self.failpoint, "with spawners" if self.spawners else ""]
        words += [
            f"after {self.after:.3f} s" if self.after else "",
            f"again {self.again:.3f} s" if self.again else "",
        ]
        return " ".join(word for word in words if word)


def chance(seed: int, *where: object) -> random.Random:
    """Numbers of one part of a run, that no other part disturbs."""
    return random.Random("/".join(map(str, (seed, *where))))  # noqa: S311 - it is to be the same again


def reached(levels: tuple[str, ...]) -> tuple[str, ...]:
    """Failpoints that sandboxes of those levels reach."""
    if "container" in levels:
        return NAMES
    return tuple(name for name in NAMES if name.partition(".")[0] in _SHARED)


def strike(seed: int, number: int, levels: tuple[str, ...]) -> Strike:
    """That of a round."""
    luck = chance(seed, number, "strike")
    kind = luck.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == FAILPOINT:
        name = luck.choice(reached(levels))
        times = luck.randint(1, _MOST.get(name.partition(".")[0], 3))
        together = luck.random() < 0.25
        return Strike(kind, f"{name}:{times}", spawners=together, after=luck.uniform(0.1, 1.5))
    after = luck.uniform(0.05, 2.0)
    if kind == RECOVERY:
        return Strike(kind, spawners=luck.random() < 0.25, after=after, again=luck.uniform(0.02, 2.0))
    return Strike(kind, spawners=kind == MOMENT and luck.random() < 0.25, after=after)
