"""How many sandboxes are in each state, by project, as of the last commit: asking costs nothing, however many there are."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from dsec.model.sandbox import State

ALL = ""  # no project has this name


class Tally:
    """Staged and settled by one thread at a time, as the ledger is; read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[State, int]] = {}
        self._staged: list[tuple[str, State | None, State | None, int]] = []

    def load(self, rows: Iterable[tuple[str, str, int]]) -> None:
        """Project, state and number, as stored.  Raises: ValueError: one of the states is none."""
        for project, state, number in rows:
            self._add(project, State(state), number)

    def stage(self, project: str, before: State | None, after: State | None, number: int = 1) -> None:
        """So many go from one state to another in this transaction; None: were not there, or go. The last thing that a job does."""
        if before is not after:
            self._staged.append((project, before, after, number))

    def settle(self) -> None:
        """The transaction was committed."""
        if not self._staged:
            return
        with self._lock:
            for project, before, after, number in self._staged:
                if before is not None:
                    self._add(project, before, -number)
                if after is not None:
                    self._add(project, after, number)
        self._staged.clear()

    def forget(self) -> None:
        """The transaction was rolled back."""
        self._staged.clear()

    def count(self, project: str = ALL) -> Mapping[State, int]:
        """States that none is in are left out."""
        with self._lock:
            return dict(self._counts.get(project, ()))

    def _add(self, project: str, state: State, number: int) -> None:
        for name in (project, ALL):
            counts = self._counts.setdefault(name, {})
            left = counts.get(state, 0) + number
            if left:
                counts[state] = left
            else:
                counts.pop(state, None)
            if not counts:
                del self._counts[name]
