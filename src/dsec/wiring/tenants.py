"""Keys, projects and the gate of an engine that others may reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dsec.control.gate import TenantGate
from dsec.control.keys import Keyring, Look
from dsec.control.rates import Rates
from dsec.control.refusals import Refusals
from dsec.control.tenancy import Make, Tenancy
from dsec.control.tenants import Tenants, begun, was_used
from dsec.ports.engine import Services, Workplace
from dsec.ports.idempotency import IdempotencyStore
from dsec.ports.journal import Journal
from dsec.ports.tenants import Cursors, KeyRecords
from dsec.wiring.admission import Reception
from dsec.wiring.engines import Inside, open_engine, open_journal
from dsec.wiring.figures import bytes_of, meters_of
from dsec.wiring.journals import remembered
from dsec.wiring.serving import Behind
from dsec.wiring.settings import Settings
from dsec.wiring.state import JOURNAL, durable_state

CONTROL: Final = "control"
"""The directory of the control database in a state directory."""


@dataclass(frozen=True, slots=True)
class Control:
    """What is kept in the control database.

    Attributes:
        tenants: keys and projects; also the quotas, for admission. ring: keys as they come in. refusals: those that were not let in.
        calls: requests that must not be done twice. cursors: of readers of the journal.
    """

    tenants: Tenants
    ring: Keyring
    refusals: Refusals
    calls: IdempotencyStore
    cursors: Cursors


@asynccontextmanager
async def control_of(
    where: Path | str, journal: Journal, look: Look, *, synced: bool = False
) -> AsyncIterator[Control]:
    """The control database while it is open; it is opened before the engine, which asks it for quotas.

    Args:
        where: a directory of the state directory's, or the URL of a PostgreSQL database.
        look: what the engine knows of a sandbox; asked when somebody comes in, and not before.
        synced: as for the journal: a loss of power loses nothing.

    Raises:
        StoreDamaged: it is broken, of a later version, or not there although keys were made. StorageFull, Denied, Unsupported, RuntimeUnavailable.
    """
    from dsec.stores.control.calls import Calls  # what they stand on is slow to load
    from dsec.stores.control.store import open_control

    store = await open_control(where, was_used=partial(was_used, journal), synced=synced)
    try:
        records: KeyRecords = store
        refusals = Refusals(journal, time.monotonic)
        ring = Keyring(records, look, refusals, clock=time.time)
        tenants = Tenants(records, journal, ring, look, clock=time.time)
        await tenants.open()
        yield Control(tenants, ring, refusals, Calls(store.database), store)
    finally:
        await store.close()


@asynccontextmanager
async def gate_over(
    control: Control, services: Services, place: Workplace, room: Make
) -> AsyncIterator[TenantGate]:
    """The gate of an open engine, tended while this is open.

    Args:
        place: what the engine gave its own templates. room: makes the templates of a project; see :class:`~dsec.wiring.engines.Inside`.
    """
    tenancy = Tenancy(services, place, control.tenants, room)
    gate = TenantGate(control.ring, Rates(time.monotonic), control.tenants, tenancy.services, control.calls)
    tending = asyncio.get_running_loop().create_task(gate.tend())
    try:
        yield gate
    finally:
        tending.cancel()
        with suppress(asyncio.CancelledError):
            await tending
        await gate.close()


async def begin_anew(where: Path | str, journal: Journal) -> None:
    """Make an empty control database where the old one is lost, and say so in the journal: old keys are no good, and quotas are none.

    Raises: as :func:`control_of`; StoreDamaged: there is one, and it is broken.
    """
    from dsec.stores.control.store import open_control

    async def wanted() -> bool:
        await journal.append(begun())
        return False

    await (await open_control(where, was_used=wanted)).close()


async def go_on_without(home: Path) -> None:
    """:func:`begin_anew` in the state directory of an engine that is not open.  Raises: Conflict: it is open."""
    settings = Settings(home=home)
    state = await durable_state(home, settings.wait)
    try:
        journal = await open_journal(state, settings)
        try:
            url = await asyncio.to_thread(lambda: remembered(state.part(JOURNAL)))
            await begin_anew(url or await asyncio.to_thread(state.part, CONTROL), journal)
        finally:
            await journal.close()
    finally:
        await asyncio.to_thread(state.release)


async def _where(inside: Inside, settings: Settings) -> Path | str:
    """Where the control database of an engine is: where its journal is, if that is in PostgreSQL."""
    url = settings.database or await asyncio.to_thread(lambda: remembered(inside.state.part(JOURNAL)))
    return url or await asyncio.to_thread(inside.state.part, CONTROL)


@asynccontextmanager
async def shared(settings: Settings) -> AsyncIterator[Behind]:
    """The durable engine of a home for all who have keys: turns, quotas, and the gate before it.

    Raises: as :func:`~dsec.wiring.engines.open_engine` and :func:`control_of`.
    """
    reception = Reception(settings)
    inside = Inside(allowance=reception.allowance)
    async with AsyncExitStack() as stack:
        services = await open_engine(settings, reception, inside)
        stack.push_async_callback(services.close)
        where = await _where(inside, settings)
        synced = settings.durability == "disk"
        opening = control_of(where, inside.journal, services.sandboxes.get, synced=synced)
        control = await stack.enter_async_context(opening)
        reception.quotas.source = control.tenants
        gate = await stack.enter_async_context(gate_over(control, services, inside.place, inside.room))
        journal_bytes = bytes_of(inside.journal, await asyncio.to_thread(inside.state.part, JOURNAL))
        meters = meters_of(
            services,
            inside.journal,
            inside.sandboxes,
            journal_bytes,
            reception.turns.info,
            lambda: control.refusals.counts,
        )
        await meters.begin()
        yield Behind(services=services, gate=gate, parts={"idempotency": control.calls, "meters": meters})
