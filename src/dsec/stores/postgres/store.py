"""The journal and the table of sandboxes in a database of PostgreSQL. Its key and its signed checkpoints stay in the engine's own directory."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dsec.errors import BadRequest, Conflict, TooLarge
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Finding, Json, Phase, Record
from dsec.model.paging import PAGE, Page, check_limit, check_place
from dsec.model.sandbox import SandboxInfo, State
from dsec.ports.journal import Journal, Receipt, Sandboxes, Standing, check_many
from dsec.stores.batch import prepared
from dsec.stores.chain import prepare
from dsec.stores.keeper import Pace
from dsec.stores.listing import chosen, classes_of, page_of, standing_of
from dsec.stores.living import ENDED
from dsec.stores.postgres import sql
from dsec.stores.postgres.book import Sheet
from dsec.stores.postgres.keeper import drop_specs
from dsec.stores.postgres.look import verify
from dsec.stores.postgres.parts import Parts
from dsec.stores.postgres.records import PostgresSnapshots, PostgresVolumes
from dsec.stores.postgres.tables import TABLES
from dsec.stores.postgres.writer import Job
from dsec.stores.rows import check_read, no_sandbox, of_chain, receipt, record_of
from dsec.stores.sandbox_codec import changed, clean_reason, from_row, to_row
from dsec.stores.schema import SEQ_MAX, Durability

MAX_DRAFTS: Final = 256
_PRUNE_STEP: Final = 500


class PostgresStore(Journal, Sandboxes):
    """One open journal, used from the event loop that opened it. Made by :meth:`open`; nobody else has the database meanwhile."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._writer = parts.writer
        self._book = parts.book
        self._closed = False
        self.snapshots = PostgresSnapshots(parts.writer, self._query)
        self.volumes = PostgresVolumes(parts.writer, self._query)

    @classmethod
    async def open(
        cls,
        url: str,
        directory: Path,
        *,
        key: Path,
        engine_id: str,
        durability: Durability = "process",
        pace: Pace | None = None,
        now: Callable[[], float] = time.time,
        patience: float = 30.0,
        lock_patience: float = 5.0,
    ) -> PostgresStore:
        """Open the journal in a database, or make an empty one where there never was one.

        Args:
            directory: of the signed checkpoints. key: file of the signing key; both are made together with the tables.
            durability: ``process``: the server acknowledges before it has written; what it may lose is kept here and stored again.
                ``disk``: it has written.
            patience: seconds for which a lost server is waited for. lock_patience: and another engine that has the database.

        Raises:
            Conflict: another engine has it. StoreDamaged: it is not ours, or not what it was. Denied, RuntimeUnavailable, StorageFull.
        """
        return cls(
            await Parts.open(
                url,
                directory,
                key,
                engine_id=engine_id,
                durability=durability,
                pace=pace or Pace(),
                now=now,
                patience=patience,
                lock_patience=lock_patience,
            )
        )

    async def close(self) -> None:
        """Store what is queued, sign every head, and let go. Closing twice is not an error."""
        if not self._closed:
            self._closed = True
            await self._parts.close()

    # Journal

    async def append(self, *drafts: Draft) -> tuple[Receipt, ...]:
        if len(drafts) > MAX_DRAFTS:
            raise TooLarge(f"{len(drafts)} records at once, the bound is {MAX_DRAFTS}")
        prepared = [prepare(draft) for draft in drafts]
        if not prepared:
            return ()
        names = tuple(dict.fromkeys(draft.chain for draft in drafts))
        size = sum(len(one.payload) for one in prepared)

        def apply(sheet: Sheet, rows: list[Any]) -> tuple[Receipt, ...]:
            del rows
            return tuple([receipt(sheet.append(one)) for one in prepared])

        return await self._writer.run(Job(apply, names=names, size=size))

    async def read(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        check_read(limit)
        rows = await self._query(sql.READ, min(max(after, 0), SEQ_MAX), chain, limit)
        return tuple([record_of(chain, tuple(row)) for row in rows])

    async def latest(
        self, chain: str, act: str, *, ref: str | None = None, limit: int = 1000
    ) -> tuple[Record, ...]:
        check_read(limit)
        if ref is None:
            rows = await self._query(sql.LATEST, chain, act, limit)
        else:
            rows = await self._query(sql.LATEST_OF_REF, chain, act, ref, limit)
        return tuple([record_of(chain, tuple(row)) for row in rows])

    async def unanswered(self, chain: str) -> tuple[Record, ...]:
        return tuple([record_of(chain, tuple(row)) for row in await self._query(sql.UNANSWERED, chain)])

    async def tail(self, after: int, limit: int = 1000) -> tuple[tuple[int, Record], ...]:
        check_read(limit)
        rows = await self._query(sql.TAIL, min(max(after, 0), 2**63 - 1), limit)
        return tuple([(row[0], record_of(row[1], tuple(row[2:]))) for row in rows])

    async def verify(self) -> tuple[Finding, ...]:
        parts = self._parts
        return await asyncio.to_thread(verify, parts.url, parts.file_path, parts.public)

    async def bytes(self) -> int:
        """That its tables take on the server's disk, with their indexes."""
        return int((await self._query(sql.BYTES, list(TABLES)))[0][0])

    # Sandboxes

    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        row, prepared = to_row(info), of_chain(info.id, draft)

        def apply(sheet: Sheet, rows: list[Any]) -> None:
            del rows
            sheet.add(info, row, prepared)

        size = len(prepared.payload) + len(row[-1])
        await self._writer.run(Job(apply, names=(info.id,), new=True, specs=(row[-1],), size=size))

    async def add_many(self, infos: Sequence[SandboxInfo], drafts: Sequence[Draft]) -> None:
        check_many(infos, drafts)
        batch = await asyncio.to_thread(prepared, infos, drafts)
        keeper = self._parts.keeper

        def apply(sheet: Sheet, rows: list[Any]) -> None:
            del rows
            for one in batch:
                sheet.add(*one)

        names = tuple([info.id for info in infos])
        specs = tuple({one.row[-1] for one in batch})
        size = sum(len(one.prepared.payload) for one in batch)
        promised = await keeper.take_room(len(batch))
        try:
            await self._writer.run(Job(apply, names=names, new=True, specs=specs, size=size))
        finally:
            keeper.give_room(promised)

    async def move(
        self, sandbox: SandboxId, *, seen: State, to: State, draft: Draft, reason: str = ""
    ) -> SandboxInfo:
        prepared, words = of_chain(sandbox, draft), clean_reason(reason)

        def apply(sheet: Sheet, rows: list[Any]) -> SandboxInfo:
            del rows
            before = sheet.row(sandbox)[1]
            if before.state is not seen:
                raise Conflict(
                    f"sandbox {sandbox} is {before.state}, not {seen}", id=sandbox, state=str(before.state)
                )
            after = changed(
                before,
                state=to,
                ended_at=(before.ended_at or self._book.now()) if to in ENDED else 0.0,
                expires_at=before.expires_at,
                reason=words or before.reason,
            )
            sheet.change(after, prepared)
            return after

        return await self._writer.run(Job(apply, names=(sandbox,), rows=True, size=len(prepared.payload)))

    async def expire_at(self, sandbox: SandboxId, at: float, draft: Draft) -> SandboxInfo:
        prepared = of_chain(sandbox, draft)
        if not math.isfinite(at):
            raise BadRequest(f"expires_at: {at!r} is not a time")

        def apply(sheet: Sheet, rows: list[Any]) -> SandboxInfo:
            del rows
            after = replace(sheet.row(sandbox)[1], expires_at=float(at))
            sheet.change(after, prepared)
            return after

        return await self._writer.run(Job(apply, names=(sandbox,), rows=True, size=len(prepared.payload)))

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        rows = await self._query(sql.GET, sandbox)
        if not rows:
            raise no_sandbox(sandbox)
        return self._info(rows[0])

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        classes, wanted = classes_of(states or tuple(State))
        return tuple([self._info(row) for row in await self._query(sql.LIST, classes, wanted)])

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        check_limit(limit)
        classes, wanted = classes_of(chosen(states))
        text, values = sql.page(classes, wanted, project, check_place(after), limit + 1)
        return page_of(await self._query(text, *values), limit, self._info)

    async def count(self, project: str = "") -> Mapping[State, int]:
        return self._book.tally.count(project)

    async def expiring(self, before: float, limit: int = 1000) -> tuple[SandboxInfo, ...]:
        check_read(limit)
        return tuple([self._info(row) for row in await self._query(sql.EXPIRING, float(before), limit)])

    async def standing(self) -> frozenset[Standing]:
        return standing_of(await self._query(sql.STANDING))

    async def prune(self, keep: int = 10_000) -> int:
        if keep < 0:
            raise BadRequest(f"keep: {keep} is less than 0")
        surplus = [row[0] for row in await self._query(sql.SURPLUS, keep)]
        for start in range(0, len(surplus), _PRUNE_STEP):
            await self._prune(surplus[start : start + _PRUNE_STEP], keep)
        return len(surplus)

    async def _prune(self, numbers: Sequence[int], keep: int) -> None:
        def apply(sheet: Sheet, rows: Sequence[Any]) -> Sequence[Any]:
            payload: dict[str, Json] = {"dropped": len(rows), "keep": keep}
            draft = Draft(chain="engine", act="sandbox.prune", phase=Phase.NOTE, payload=payload)
            sheet.append(prepare(draft))
            sheet.extra.append((sql.DROP, ([row[0] for row in rows],), len(rows)))
            sheet.tally += [(row[2], State(row[3]), None) for row in rows]
            for row in rows:
                self._book.drop(row[1])
            return rows

        rows = await self._writer.run(Job(apply, names=("engine",), probe=(sql.DROPPING, (list(numbers),))))
        await self._writer.run(drop_specs(self._book, {row[4] for row in rows}))

    def _info(self, row: Any) -> SandboxInfo:
        return from_row(tuple(row[1:]), self._book.decode)

    async def _query(self, text: str, *values: Any) -> Any:
        if self._closed:
            raise Conflict("the journal is closed")
        return await self._parts.query(text, *values)
