"""What an interrupted try made: found by the mark that it carries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from starlette.responses import Response

from dsec.errors import NotFound, UnknownOutcome
from dsec.model.ids import SandboxId
from dsec.model.journal import Phase, Record
from dsec.model.paging import PAGE
from dsec.model.sandbox import SandboxInfo, State
from dsec.model.tenants import Principal
from dsec.ports.engine import Services
from dsec.ports.idempotency import Begun
from dsec.server.context import answer
from dsec.server.specs import REQUEST_LABEL

PIECE: Final = 100  # records that are in memory at once: one may take a megabyte there
SLACK: Final = 5.0  # seconds by which clocks of records may differ
_LIVING: Final = tuple(state for state in State if state is not State.GONE)


async def sandboxes_of(services: Services, mark: str, since: float) -> AsyncIterator[SandboxInfo]:
    """Those that carry that mark, of all that are not gone and were made ``since``."""
    after = ""
    while True:
        page = await services.sandboxes.page(states=_LIVING, after=after, limit=PAGE)
        for info in page.items:
            if info.created_at >= since - SLACK and info.spec.labels.get(REQUEST_LABEL) == mark:
                yield info
        after = page.next
        if not after:
            return


async def created(
    services: Services, caller: Principal, mark: str, begun: Begun, **arguments: Any
) -> Response | None:
    """The sandbox that an interrupted create made."""
    del caller, arguments
    async for info in sandboxes_of(services, mark, begun.at):
        if info.state not in (State.PENDING, State.STOPPING, State.FAILED, State.LOST):
            return answer(info, 201)
    return None


async def intent_of(services: Services, sandbox: SandboxId, mark: str) -> Record | None:
    """That of the command which carries that mark."""
    async for record in _execs(services, sandbox, 0):
        if record.phase is Phase.INTENT and record.payload.get("request") == mark:
            return record
    return None


async def is_unknown(services: Services, intent: Record) -> bool:
    """Whether it is recorded that nobody can know what became of a command, or whether it began."""
    async for record in _execs(services, SandboxId(intent.chain), intent.seq):
        if record.ref == intent.ref:
            return record.payload.get("outcome") == UnknownOutcome.code
    return False


async def _execs(services: Services, sandbox: SandboxId, after: int) -> AsyncIterator[Record]:
    """Records of commands behind that number."""
    while records := await services.observe.events(sandbox, after=after, limit=PIECE):
        for record in records:
            if record.act == "exec":
                yield record
        after = records[-1].seq


async def batch(
    services: Services, caller: Principal, mark: str, begun: Begun, **arguments: Any
) -> Response | None:
    """A batch is made in one transaction: all of it, or nothing."""
    del caller, arguments
    found = [info.id async for info in sandboxes_of(services, mark, begun.at)]
    return answer({"ids": found}, 201) if found else None


async def nothing_since(services: Services, sandbox: SandboxId, begun: Begun, acts: frozenset[str]) -> bool:
    """For what carries no mark: whether none of these acts began in the sandbox since the request was first asked."""
    after = 0
    with suppress(NotFound):
        while records := await services.observe.events(sandbox, after=after, limit=PIECE):
            if any(each.act in acts and each.at >= begun.at - SLACK for each in records):
                return False
            after = records[-1].seq
    return True
