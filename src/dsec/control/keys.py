"""Whose key that is: asked with every request, so the answers are remembered until something changes them.

A look-up in the database takes a millisecond, a remembered one a few microseconds. The control database has one owner, so that what changes goes through here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from dsec.control.coins import digest_of, is_key
from dsec.control.refusals import Refusals
from dsec.core.machine import ENDED
from dsec.errors import Busy, NotFound, Unauthenticated
from dsec.model.ids import KeyId, SandboxId
from dsec.model.sandbox import SandboxInfo, State
from dsec.model.tenants import KeyInfo, Principal
from dsec.ports.tenants import KeyRecords

REMEMBERED: Final = 10_000  # keys, those that were used last
LOOKUPS: Final = 4  # in the database at once, of keys that are not remembered
MOST_ASKING: Final = 256  # of them that may wait
COARSE: Final = 60.0  # seconds between two notes of when a key was used
_OVER: Final = frozenset({*ENDED, State.STOPPING})
_SWEPT: Final = 200  # sandboxes that are looked at in one sweep
_KEPT: Final = 30 * 86400.0  # seconds for which what is no good any more is listed

Look = Callable[[SandboxId], Awaitable[SandboxInfo]]


@dataclass(slots=True)
class _Known:
    info: KeyInfo
    principal: Principal
    noted: float


class Keyring:
    """Keys as they come in.

    Args:
        look: what is known of a sandbox. clock: seconds since the epoch.

    Attributes:
        refusals: what was refused.
    """

    def __init__(
        self, records: KeyRecords, look: Look, refusals: Refusals, *, clock: Callable[[], float]
    ) -> None:
        self.refusals = refusals
        self._records = records
        self._look = look
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._digests: dict[KeyId, bytes] = {}
        self._changes = 0  # what was read before the latest of them is not remembered
        self._used: dict[KeyId, float] = {}
        self._asking = 0
        self._looking_up = asyncio.Semaphore(LOOKUPS)
        self._swept = ""

    async def principal(self, key: str) -> Principal:
        """Raises: Unauthenticated. Busy: very many are asked about. As :class:`~dsec.ports.tenants.KeyRecords`."""
        if not is_key(key):
            raise self._refused("form", "that is no key")
        digest = digest_of(key)
        known = self._known.get(digest)
        if known is None:
            known = await self._read(digest)
        else:
            self._known.move_to_end(digest)
        await self._check(known.info)
        self._note(known)
        return known.principal

    async def check(self, principal: Principal) -> None:
        """Whether whoever came in by that key may still be here.  Raises: Unauthenticated. As :class:`~dsec.ports.tenants.KeyRecords`."""
        key = KeyId(principal.id)
        known = self._known.get(self._digests.get(key, b""))
        info = known.info if known is not None else await self._records.get(key)
        if info is None:
            raise self._refused("unknown", "that key is not good any more")
        if info.revoked_at:
            raise self._refused("revoked", "that key was revoked")
        await self._check(info)

    async def _read(self, digest: bytes) -> _Known:
        while True:
            before = self._changes
            info = await self._find(digest)
            if info is None:
                raise self._refused("unknown", "that key is not good")
            if info.revoked_at:
                raise self._refused("revoked", "that key was revoked")
            if before == self._changes:
                return self._remember(digest, info)

    async def _find(self, digest: bytes) -> KeyInfo | None:
        """Few at a time: whoever tries keys keeps nobody else's questions waiting.  Raises: Busy."""
        if self._asking >= MOST_ASKING:
            raise Busy(
                f"{self._asking} keys are being looked up", hint="try again", reason="keys", retry_after=1
            )
        self._asking += 1
        try:
            async with self._looking_up:
                return await self._records.find(digest)
        finally:
            self._asking -= 1

    def _remember(self, digest: bytes, info: KeyInfo) -> _Known:
        principal = Principal(id=info.id, scope=info.scope, project=info.project, sandbox=info.sandbox)
        known = self._known[digest] = _Known(info, principal, info.used_at)
        self._digests[info.id] = digest
        if len(self._known) > REMEMBERED:
            _, oldest = self._known.popitem(last=False)
            self._digests.pop(oldest.info.id, None)
        return known

    async def _check(self, info: KeyInfo) -> None:
        """Raises: Unauthenticated."""
        if info.expires_at and self._clock() >= info.expires_at:
            raise self._refused("expired", "that key has expired")
        if info.sandbox is None:
            return
        if await self._is_over(info.sandbox):
            self.forget(info.id)
            raise self._refused("ended", "the sandbox of that key has ended", hint="")

    async def _is_over(self, sandbox: SandboxId) -> bool:
        try:
            return (await self._look(sandbox)).state in _OVER
        except NotFound:
            return True

    def _refused(
        self, reason: str, message: str, hint: str = "`dsec key create` makes one"
    ) -> Unauthenticated:
        self.refusals.count(reason)
        return Unauthenticated(message, hint=hint)

    def forget(self, key: KeyId) -> None:
        """From now on it is looked up again, also by whoever is looking it up."""
        self._changes += 1
        digest = self._digests.pop(key, None)
        if digest is not None:
            self._known.pop(digest, None)

    # When it was used

    def _note(self, known: _Known) -> None:
        now = self._clock()
        if abs(now - known.noted) >= COARSE:
            known.noted = now
            self._used[known.info.id] = now

    async def write(self) -> None:
        """When keys were used, once a minute each; what is no good any more by the database is forgotten here.  Raises: as the records."""
        used, self._used = self._used, {}
        if not used:
            return
        try:
            gone = await self._records.used(used)
        except BaseException:
            self._used = {**used, **self._used}
            raise
        for key in gone:
            self.forget(key)

    async def sweep(self) -> None:
        """Remove tokens whose sandbox has ended, a part of them at a time, and keys that nobody needs to see any more.  Raises: as the records."""
        sandboxes = await self._records.with_tokens(self._swept, _SWEPT)
        self._swept = sandboxes[-1] if len(sandboxes) == _SWEPT else ""
        over = [sandbox for sandbox in sandboxes if await self._is_over(sandbox)]
        await self._records.drop(before=self._clock() - _KEPT, sandboxes=over)
