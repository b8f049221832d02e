"""Living sandboxes in memory, as of the last commit: one need not be read and decoded for each of its moves."""

from __future__ import annotations

from typing import Final

from dsec.model.ids import SandboxId
from dsec.model.sandbox import SandboxInfo, State

ENDED: Final = (State.GONE, State.FAILED)  # a tuple: no member of an enumeration need be hashed

Row = tuple[int, SandboxInfo]
"""The number of its chain, and the sandbox."""


class Living:
    """Used by one thread at a time, as the ledger is; only this process changes the rows.

    Args:
        most: how many are kept, the latest.
    """

    def __init__(self, most: int = 16_384) -> None:
        self._most = most
        self._rows: dict[SandboxId, Row] = {}
        self._staged: dict[SandboxId, Row] = {}

    def find(self, sandbox: SandboxId) -> Row | None:
        """As the transaction under way sees it; None where it is not in memory."""
        return self._staged.get(sandbox) or self._rows.get(sandbox)

    def stage(self, number: int, info: SandboxInfo) -> None:
        """It was written in this transaction: the last thing that a job does, as nothing may fail after it."""
        self._staged[info.id] = (number, info)

    def settle(self) -> None:
        """The transaction was committed."""
        if not self._staged:
            return
        for sandbox, row in self._staged.items():
            if row[1].state in ENDED:
                self._rows.pop(sandbox, None)
            else:
                self._rows[sandbox] = row
        while len(self._rows) > self._most:
            del self._rows[next(iter(self._rows))]
        self._staged.clear()

    def forget(self) -> None:
        """The transaction was rolled back, or its fate is unknown: what it touched is read again."""
        for sandbox in self._staged:
            self._rows.pop(sandbox, None)
        self._staged.clear()
