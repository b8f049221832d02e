"""One command: what is known of it, and what whoever drives it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from dsec.errors import DsecError
from dsec.model.execs import Command, ExecRequest, ExecResult, Exit
from dsec.model.ids import ExecId
from dsec.node.handles import Handle
from dsec.node.output import Hash, Output
from dsec.ports.guest import GuestExec


@dataclass(slots=True, eq=False)
class Run:
    """One command.

    ``command`` is None for one that an earlier engine started. ``started`` is set (or fails) when the guest has it.
    ``task``: of those that are not driven by whoever waits for them; ``driven``: it has begun.
    ``verdict``: why it is no longer followed. ``result`` or ``error``: what whoever drove it was told.
    ``intended``, ``recording``: the append of its intent, of its end, has begun.
    ``leaving`` is called with it just before its sandbox forgets it.
    """

    id: ExecId
    handle: Handle
    request: ExecRequest
    command: Command | None
    output: Output
    stdin: AsyncIterator[bytes] | None = None
    intended: bool = False
    oom_before: int = 0
    followed: GuestExec | None = None
    started: asyncio.Future[None] | None = None
    task: asyncio.Task[ExecResult] | None = None
    driven: bool = False
    exit: Exit | None = None
    result: ExecResult | None = None
    error: BaseException | None = None
    verdict: DsecError | None = None
    record: bool = True
    recording: bool = False
    fed: Hash | None = None
    stdin_closed: bool = False
    unwanted: bool = False
    over: bool = False
    leaving: Callable[[Run], None] | None = None
    _settled: asyncio.Future[None] | None = None

    @property
    def attended(self) -> bool:
        """Somebody waits for its end, or reads its output."""
        return self.output.attended

    @property
    def settled(self) -> asyncio.Future[None]:
        """Done when its outcome is recorded, or it is known that there will be none."""
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
            if self.over:
                self._settled.set_result(None)
        return self._settled

    def finish(self) -> None:
        """Nothing more will be done for it."""
        self.over = True
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def abandon(self, error: DsecError, *, record: bool = True) -> None:
        """``error`` is its outcome, unless it has ended; whoever drives it learns that now."""
        if self.verdict is not None or self.exit is not None or self.over:
            return
        self.verdict, self.record = error, record
        if self.task is not None and self.driven:
            self.task.cancel()
        elif self.followed is not None:
            self.followed.detach()
