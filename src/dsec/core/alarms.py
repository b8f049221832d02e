"""Which problems are news: compared with what was told. Level-triggered: a problem that is seen twice is told once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsec.model.alerts import Alarm, Turn
from dsec.model.sandbox import Problem


@dataclass(slots=True)
class _Known:
    problem: Problem
    seen: float
    reminded: bool = False


class Alarms:
    """Args: persists: seconds after which one that is still there is told once more."""

    def __init__(self, persists: float) -> None:
        self._persists = persists
        self._known: dict[tuple[str, str], _Known] = {}

    def look(self, problems: Iterable[Problem], now: float) -> list[Alarm]:
        """What is to be told, given all problems that there are ``now``."""
        there = {(one.sandbox, one.what): one for one in problems}
        told: list[Alarm] = []
        for key, known in tuple(self._known.items()):
            if key not in there:
                del self._known[key]
                told.append(Alarm(turn=Turn.SOLVED, at=now, problem=known.problem))
        for key, problem in there.items():
            seen = self._known.get(key)
            if seen is None:
                self._known[key] = _Known(problem, now)
                told.append(Alarm(turn=Turn.APPEARED, at=now, problem=problem))
                continue
            seen.problem = problem
            if not seen.reminded and now - seen.seen >= self._persists:
                seen.reminded = True
                told.append(Alarm(turn=Turn.PERSISTS, at=now, problem=problem))
        return told
