"""The journal and the table of sandboxes in one SQLite file."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from anyio import to_thread

from dsec.errors import BadRequest, Conflict, StoreDamaged, TooLarge
from dsec.handover import handed
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Finding, Json, Phase, Record
from dsec.model.paging import PAGE, Page
from dsec.model.sandbox import SandboxInfo, State
from dsec.ports.journal import Journal, Receipt, Sandboxes, Standing, check_many
from dsec.stores import journal_sql as sql
from dsec.stores import schema
from dsec.stores.audit import audit
from dsec.stores.batch import Batch, prepared
from dsec.stores.chain import Prepared, prepare
from dsec.stores.keeper import PATIENCE, Pace
from dsec.stores.listing import classes_of, page_of, query_of, standing_of
from dsec.stores.living import ENDED
from dsec.stores.living import Row as LivingRow
from dsec.stores.parts import CHECKPOINTS, Files, Parts
from dsec.stores.rows import check_read, no_sandbox, of_chain, receipt, record_of
from dsec.stores.sandbox_codec import Row, changed, class_of, clean_reason, from_row, to_row
from dsec.stores.schema import Durability, translated
from dsec.stores.snapshot_records import SqliteSnapshots
from dsec.stores.volume_records import SqliteVolumes

Arguments = tuple[Any, ...] | dict[str, Any]
Rows = list[tuple[Any, ...]]  # before the class, in which `list` is a method

MAX_DRAFTS: Final = 256
_PRUNE_STEP: Final = 500
_ROW_BYTES: Final = 3000  # what a sandbox of a batch writes to the log, roughly
_TAKERS: Final = 2  # batches that wait in threads until heads are signed


class SqliteStore(Journal, Sandboxes):
    """One open journal. Made by :meth:`open`; the caller makes sure that it is the directory's only owner.

    Appends of a ``durability="process"`` store run on the caller's thread when nothing waits (some 40 µs, no sync);
    so does the look-up of a single row. All else happens on threads.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._writer = parts.writer
        self._ledger = parts.ledger
        self._memory = parts.memory
        self._now = parts.now
        self._batch = Batch(parts.db, parts.ledger, parts.memory)
        self._read_lock = threading.Lock()
        self._find_lock = threading.Lock()
        self._takers = asyncio.Semaphore(_TAKERS)
        self._closed = False
        self.snapshots = SqliteSnapshots(parts.db, parts.writer, parts.ledger, self._query)
        self.volumes = SqliteVolumes(parts.db, parts.writer, parts.ledger, self._query)

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        key: Path,
        engine_id: str,
        durability: Durability = "process",
        checkpoint_file: Path | None = None,
        pace: Pace | None = None,
        now: Callable[[], float] = time.time,
    ) -> SqliteStore:
        """Open the journal of ``directory``, or make an empty one where there never was one.

        Args:
            key: file of the signing key, best outside ``directory``; made (0600) together with the journal.
            checkpoint_file: where signed heads go, ``directory/checkpoints.jsonl`` unless told; safest on another disk.

        Raises:
            StoreDamaged: the file is not ours, is of a newer version or broken, or a part of it is missing.
            StorageFull.
        """
        sources = Files(directory, key, checkpoint_file or directory / CHECKPOINTS)
        return await handed(
            lambda: cls(Parts(sources, engine_id, durability, pace or Pace(), now)),
            lambda store: store._parts.close(),
        )

    async def close(self) -> None:
        """Store what is queued, sign every head, and release the files. Closing twice is not an error."""
        if not self._closed:
            self._closed = True
            await to_thread.run_sync(self._parts.close)

    async def append(self, *drafts: Draft) -> tuple[Receipt, ...]:
        if len(drafts) == 1:
            return (receipt(await self._writer.append(prepare(drafts[0]))),)
        if len(drafts) > MAX_DRAFTS:
            raise TooLarge(f"{len(drafts)} records at once, the bound is {MAX_DRAFTS}")
        prepared = [prepare(draft) for draft in drafts]
        if not prepared:
            return ()
        size = sum(len(one.payload) for one in prepared)
        heads = await self._writer.run(lambda: list(map(self._ledger.append, prepared)), size=size)
        return tuple(map(receipt, heads))

    async def read(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        check_read(limit)
        rows = await self._query(sql.READ, (min(max(after, 0), schema.SEQ_MAX), chain, limit))
        return tuple(record_of(chain, row) for row in rows)

    async def latest(
        self, chain: str, act: str, *, ref: str | None = None, limit: int = 1000
    ) -> tuple[Record, ...]:
        check_read(limit)
        if ref is None:
            rows = await self._query(sql.LATEST, (chain, act, limit))
        else:
            rows = await self._query(sql.LATEST_OF_REF, (chain, act, ref, limit))
        return tuple(record_of(chain, row) for row in rows)

    async def unanswered(self, chain: str) -> tuple[Record, ...]:
        rows = await self._query(sql.UNANSWERED, (chain,))
        return tuple(record_of(chain, row) for row in rows)

    async def tail(self, after: int, limit: int = 1000) -> tuple[tuple[int, Record], ...]:
        check_read(limit)
        rows = await self._query(sql.TAIL, (max(after, 0), limit))
        return tuple((row[0], record_of(row[1], row[2:])) for row in rows)

    async def verify(self) -> tuple[Finding, ...]:
        return await to_thread.run_sync(audit, self._parts.sources)

    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        row, prepared = to_row(info), of_chain(info.id, draft)

        def job() -> None:
            number = self._insert(info, row, prepared)
            self._memory.stage(number, None, info)

        await self._writer.run(job, size=len(prepared.payload) + len(row[-1]))

    async def add_many(self, infos: Sequence[SandboxInfo], drafts: Sequence[Draft]) -> None:
        check_many(infos, drafts)
        many = await to_thread.run_sync(prepared, infos, drafts)
        keeper = self._parts.keeper

        def job() -> None:
            self._batch.add(many)
            self._ledger.bytes += _ROW_BYTES * len(many)

        promised = await self._room(len(many))
        try:
            await self._writer.run(job, size=sum(len(one.prepared.payload) for one in many), long=True)
        finally:
            keeper.give_room(promised)

    async def _room(self, chains: int) -> int:
        """What to give back of room among the unsigned. Few wait for it in threads, which are for everybody; the others not for ever."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._takers.acquire()
        except TimeoutError:
            return 0  # whether there is any is told when they are appended
        keeper = self._parts.keeper
        try:
            return await handed(partial(keeper.take_room, chains), keeper.give_room)
        finally:
            self._takers.release()

    def _insert(self, info: SandboxInfo, row: Row, prepared: Prepared) -> int:
        """Its row and its first record, in the transaction under way; the number of its chain.  Raises: Conflict."""
        spec = self._memory.specs.number(row[-1])
        added = self._parts.db.execute(sql.ADD, (*row[:-1], class_of(info.state), info.spec.project, spec))
        number = added.lastrowid
        if added.rowcount != 1 or number is None:
            raise Conflict(f"sandbox {info.id} exists already", id=info.id)
        self._ledger.born(info.id, number)
        self._ledger.append(prepared)
        return number

    async def move(
        self, sandbox: SandboxId, *, seen: State, to: State, draft: Draft, reason: str = ""
    ) -> SandboxInfo:
        prepared, words = of_chain(sandbox, draft), clean_reason(reason)

        def job() -> SandboxInfo:
            row = self._row(sandbox)
            before = row[1]
            if before.state is not seen:
                raise Conflict(
                    f"sandbox {sandbox} is {before.state}, not {seen}", id=sandbox, state=str(before.state)
                )
            ended = (before.ended_at or self._now()) if to in ENDED else 0.0
            after = changed(
                before,
                state=to,
                ended_at=ended,
                expires_at=before.expires_at,
                reason=words or before.reason,
            )
            return self._change(row, after, prepared)

        return await self._writer.run(job, size=len(prepared.payload))

    async def expire_at(self, sandbox: SandboxId, at: float, draft: Draft) -> SandboxInfo:
        prepared = of_chain(sandbox, draft)
        if not math.isfinite(at):
            raise BadRequest(f"expires_at: {at!r} is not a time")

        def job() -> SandboxInfo:
            row = self._row(sandbox)
            return self._change(row, replace(row[1], expires_at=float(at)), prepared)

        return await self._writer.run(job, size=len(prepared.payload))

    def _change(self, row: LivingRow, info: SandboxInfo, prepared: Prepared) -> SandboxInfo:
        """Write what can change of a sandbox, and the record of it."""
        number, before = row
        text, values = sql.CHANGE, [info.state.value, info.ended_at, info.reason]
        class_ = class_of(info.state)
        if class_ != class_of(before.state) or info.expires_at != before.expires_at:
            text = sql.CHANGE_ALL
            values += [class_, info.expires_at]
        if self._parts.db.execute(text, (*values, number, before.state.value)).rowcount != 1:
            raise StoreDamaged(f"the row of sandbox {info.id} was changed by somebody else")
        self._ledger.append(prepared)
        self._memory.stage(number, before.state, info)
        return info

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        rows = await self._look_up(sql.GET, (sandbox,))
        if not rows:
            raise no_sandbox(sandbox)
        return self._info(rows[0])

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        classes, wanted = classes_of(states or tuple(State))
        rows = await self._query(sql.LIST, (json.dumps(classes), json.dumps(wanted)))
        return await to_thread.run_sync(lambda: tuple([self._info(row) for row in rows]))

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        text, values = query_of(states, project, after, limit)

        def look() -> Page[SandboxInfo]:
            return page_of(self._locked_select(text, values), limit, self._info)

        return await to_thread.run_sync(look)

    async def count(self, project: str = "") -> Mapping[State, int]:
        return self._memory.tally.count(project)

    async def expiring(self, before: float, limit: int = 1000) -> tuple[SandboxInfo, ...]:
        check_read(limit)
        rows = await self._query(sql.EXPIRING, (before, limit))
        return tuple([self._info(row) for row in rows])

    async def standing(self) -> frozenset[Standing]:
        rows = await self._query(sql.STANDING, ())
        return standing_of(rows)

    def _info(self, row: tuple[Any, ...]) -> SandboxInfo:
        return from_row(row[1:], self._memory.decode)

    async def prune(self, keep: int = 10_000) -> int:
        if keep < 0:
            raise BadRequest(f"keep: {keep} is less than 0")
        surplus = [number for (number,) in await self._query(sql.SURPLUS, (keep,))]
        for start in range(0, len(surplus), _PRUNE_STEP):
            numbers = surplus[start : start + _PRUNE_STEP]
            await self._writer.run(partial(self._prune, numbers, keep))
        return len(surplus)

    def _prune(self, numbers: Sequence[int], keep: int) -> None:
        wanted = json.dumps(numbers)
        rows = self._parts.db.execute(sql.DROPPING, (wanted,)).fetchall()
        self._parts.db.execute(sql.DROP, (json.dumps([row[0] for row in rows]),))
        self._memory.specs.drop([row[3] for row in rows])
        payload: dict[str, Json] = {"dropped": len(rows), "keep": keep}
        self._ledger.append(
            prepare(Draft(chain="engine", act="sandbox.prune", phase=Phase.NOTE, payload=payload))
        )
        for _, project, state, _ in rows:
            self._memory.tally.stage(project, State(state), None)

    def _row(self, sandbox: SandboxId) -> LivingRow:
        """Of the transaction under way.  Raises: NotFound."""
        known = self._memory.living.find(sandbox)
        if known is not None:
            return known
        row = self._parts.db.execute(sql.GET, (sandbox,)).fetchone()
        if row is None:
            raise no_sandbox(sandbox)
        return row[0], self._info(row)

    async def _look_up(self, text: str, args: Arguments) -> Rows:
        """A read by key: at once when its connection is free, which no long read takes."""
        if self._find_lock.acquire(blocking=False):
            try:
                return self._select(self._parts.finder, text, args)
            finally:
                self._find_lock.release()
        return await self._query(text, args)

    async def _query(self, text: str, args: Arguments) -> Rows:
        return await to_thread.run_sync(self._locked_select, text, args)

    def _locked_select(self, text: str, args: Arguments) -> Rows:
        with self._read_lock:
            return self._select(self._parts.reader, text, args)

    def _select(self, db: sqlite3.Connection, text: str, args: Arguments) -> Rows:
        if self._closed:
            raise Conflict("the journal is closed")
        with translated():
            return db.execute(text, args).fetchall()
