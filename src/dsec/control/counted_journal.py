"""A journal in which a project may have so much: what acts of its sandboxes say, until those end or lie dormant.

New acts are refused beyond it. How one that has begun ended is recorded all the same, and so is whatever ends or removes something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from secrets import token_hex
from typing import Final

from dsec.control.accounts import Accounts
from dsec.control.changes import Changes
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Finding, Json, Phase, Record
from dsec.ports.admission import QuotaSource
from dsec.ports.journal import Journal, Receipt
from dsec.wire.values import encode

DECISION: Final = "decision"
_ALWAYS: Final = ("destroy", "remove", "cleanup", "failed")
_PAGE: Final = 100  # records in memory at once, of which one may take a megabyte


class CountedJournal(Journal):
    """The journal ``inner``. Where a project has no such quota nothing is counted."""

    def __init__(self, inner: Journal, accounts: Accounts, quotas: QuotaSource) -> None:
        self._inner = inner
        self._accounts = accounts
        self._quotas = quotas
        self._changes = Changes()

    async def append(self, *drafts: Draft) -> tuple[Receipt, ...]:
        """See :class:`Journal`.  Raises: OverQuota: an act would begin whose project has written all that it may."""
        sizes: Counter[SandboxId] = Counter()
        begins: set[SandboxId] = set()
        for draft in drafts:
            sandbox = SandboxId(draft.chain)
            project = self._accounts.active.get(sandbox)
            if project is None or not self._quotas.quota(project).journal_mib:
                continue
            sizes[sandbox] += size_of(draft.payload)
            if _begins(draft):
                begins.add(sandbox)
        for sandbox in sizes:
            await self._know(sandbox)
        for sandbox in begins:
            self._accounts.check_written(sandbox, sizes[sandbox])
        appending = self._inner.append(*drafts)
        if not sizes:
            return await appending

        def stored(_: object) -> None:
            for sandbox, size in sizes.items():
                self._accounts.wrote(sandbox, size)

        return await self._changes.make(token_hex(8), appending, stored, _nothing)

    async def _know(self, sandbox: SandboxId) -> None:
        """Count what it had written before we came, or before it had a quota."""
        if sandbox in self._accounts.written:
            return
        size, after = 0, 0
        while True:
            found = await self._inner.read(sandbox, after=after, limit=_PAGE)
            size += sum(size_of(record.payload) for record in found)
            if len(found) < _PAGE:
                break
            after = found[-1].seq
        if sandbox not in self._accounts.written:
            self._accounts.wrote(sandbox, size)

    async def read(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        return await self._inner.read(chain, after=after, limit=limit)

    async def latest(
        self, chain: str, act: str, *, ref: str | None = None, limit: int = 1000
    ) -> tuple[Record, ...]:
        return await self._inner.latest(chain, act, ref=ref, limit=limit)

    async def unanswered(self, chain: str) -> tuple[Record, ...]:
        return await self._inner.unanswered(chain)

    async def tail(self, after: int, limit: int = 1000) -> tuple[tuple[int, Record], ...]:
        return await self._inner.tail(after, limit)

    async def verify(self) -> tuple[Finding, ...]:
        return await self._inner.verify()


def _begins(draft: Draft) -> bool:
    asked = draft.phase is Phase.INTENT or draft.act.rsplit(".", 1)[-1] == DECISION
    return asked and not draft.act.endswith(_ALWAYS)


def size_of(payload: Mapping[str, Json]) -> int:
    """Bytes of a payload."""
    return len(encode(dict(payload)))


def _nothing() -> None:
    """Nothing was written."""
