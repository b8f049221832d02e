"""The gate: a key becomes a principal, and a principal sees the engine as it may."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dsec.control.keys import Keyring
from dsec.control.rates import Rates
from dsec.errors import DsecError
from dsec.model.tenants import Principal, Scope
from dsec.ports.admission import QuotaSource
from dsec.ports.engine import Services
from dsec.ports.gate import Gate
from dsec.ports.idempotency import IdempotencyStore

log: Final = logging.getLogger("dsec.gate")
TEND_SECONDS: Final = 10.0
SWEEP_EACH: Final = 6  # times
REMEMBERED: Final = 86_400.0  # seconds for which a request is known again by its key
_SWEPT: Final = 20_000  # of those in one sweep: more than a minute brings
_MOST: Final = 4096  # views of the engine that are kept, those that were used last

Scoped = Callable[[Principal], Services]


class TenantGate(Gate):
    """See the module.

    Args:
        scoped: makes a principal's view of the engine. calls: of which those that are a day old are forgotten.
    """

    def __init__(
        self, ring: Keyring, rates: Rates, quotas: QuotaSource, scoped: Scoped, calls: IdempotencyStore
    ) -> None:
        self.ring = ring
        self._rates = rates
        self._quotas = quotas
        self._scoped = scoped
        self._calls = calls
        self._views: OrderedDict[Principal, Services] = OrderedDict()

    async def principal(self, key: str) -> Principal:
        principal = await self.ring.principal(key)
        if principal.scope is not Scope.ADMIN:
            self._rates.take(principal.project, self._quotas.quota(principal.project).rate)
        return principal

    async def check(self, principal: Principal) -> None:
        await self.ring.check(principal)

    def services(self, principal: Principal) -> Services:
        view = self._views.get(principal)
        if view is not None:
            self._views.move_to_end(principal)
            return view
        view = self._views[principal] = self._scoped(principal)
        if len(self._views) > _MOST:
            self._views.popitem(last=False)
        return view

    async def tend(self) -> None:
        """Write down uses and refusals, and sweep, until cancelled."""
        turn = 0
        while True:
            await asyncio.sleep(TEND_SECONDS)
            turn = (turn + 1) % SWEEP_EACH
            try:
                await self.ring.refusals.tell()
                await self.ring.write()
                if not turn:
                    await self.ring.sweep()
                    await self._calls.sweep(time.time() - REMEMBERED, _SWEPT)
            except DsecError as error:  # it is tried again, and whoever asks for something is told himself
                log.warning("keys: %s", error)

    async def close(self) -> None:
        """Write down what is not written yet, as far as that can be done."""
        with suppress(DsecError):
            await self.ring.refusals.tell(last=True)
        with suppress(DsecError):
            await self.ring.write()
