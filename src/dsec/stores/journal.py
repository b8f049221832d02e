"""The journal and the table of sandboxes in one SQLite file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from anyio import to_thread
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dsec.errors import BadRequest, Conflict, Denied, NotFound, StorageFull, StoreDamaged, TooLarge
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Finding, Json, Phase, Record
from dsec.model.paging import PAGE, Page, check_limit, check_place
from dsec.model.sandbox import SandboxInfo, State
from dsec.ports.journal import Journal, Receipt, Sandboxes, check_many
from dsec.stores import checkpoints, schema
from dsec.stores import journal_sql as sql
from dsec.stores.audit import Sources, audit
from dsec.stores.chain import Prepared, decode, prepare
from dsec.stores.keeper import Keeper, Pace
from dsec.stores.ledger import Head, Ledger
from dsec.stores.living import ENDED, Living
from dsec.stores.living import Row as LivingRow
from dsec.stores.sandbox_codec import changed, clean_reason, from_row, to_row
from dsec.stores.schema import Durability, translated
from dsec.stores.snapshot_records import SqliteSnapshots
from dsec.stores.volume_records import SqliteVolumes
from dsec.stores.writer import Writer

Rows = list[tuple[Any, ...]]  # before the class, in which `list` is a method

CHECKPOINTS: Final = "checkpoints.jsonl"
MAX_DRAFTS: Final = 256
MAX_READ: Final = 10_000
_PRUNE_STEP: Final = 500


class SqliteStore(Journal, Sandboxes):
    """One open journal. Made by :meth:`open`; the caller makes sure that it is the directory's only owner.

    Appends of a ``durability="process"`` store run on the caller's thread when nothing waits (some 40 µs, no sync);
    so does the look-up of a single row. All else happens on threads.
    """

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._writer = parts.writer
        self._ledger = parts.ledger
        self._living = parts.living
        self._now = parts.now
        self._read_lock = threading.Lock()
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
        sources = _Files(directory, key, checkpoint_file or directory / CHECKPOINTS)
        return await to_thread.run_sync(
            lambda: cls(_Parts(sources, engine_id, durability, pace or Pace(), now)), abandon_on_cancel=False
        )

    async def close(self) -> None:
        """Store what is queued, sign every head, and release the files. Closing twice is not an error."""
        if not self._closed:
            self._closed = True
            await to_thread.run_sync(self._parts.close)

    async def append(self, *drafts: Draft) -> tuple[Receipt, ...]:
        if len(drafts) == 1:
            one = prepare(drafts[0])
            job = partial(self._ledger.append, one)
            return (_receipt(await self._writer.run(job, size=len(one.payload), lone=one.draft.chain)),)
        if len(drafts) > MAX_DRAFTS:
            raise TooLarge(f"{len(drafts)} records at once, the bound is {MAX_DRAFTS}")
        prepared = [prepare(draft) for draft in drafts]
        if not prepared:
            return ()
        size = sum(len(one.payload) for one in prepared)
        heads = await self._writer.run(lambda: list(map(self._ledger.append, prepared)), size=size)
        return tuple(map(_receipt, heads))

    async def read(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        _check_limit(limit)
        rows = await self._query(sql.READ, (min(max(after, 0), schema.SEQ_MAX), chain, limit))
        return tuple(record_of(chain, row) for row in rows)

    async def latest(
        self, chain: str, act: str, *, ref: str | None = None, limit: int = 1000
    ) -> tuple[Record, ...]:
        _check_limit(limit)
        if ref is None:
            rows = await self._query(sql.LATEST, (chain, act, limit))
        else:
            rows = await self._query(sql.LATEST_OF_REF, (chain, act, ref, limit))
        return tuple(record_of(chain, row) for row in rows)

    async def unanswered(self, chain: str) -> tuple[Record, ...]:
        rows = await self._query(sql.UNANSWERED, (chain,))
        return tuple(record_of(chain, row) for row in rows)

    async def tail(self, after: int, limit: int = 1000) -> tuple[tuple[int, Record], ...]:
        _check_limit(limit)
        rows = await self._query(sql.TAIL, (max(after, 0), limit))
        return tuple((row[0], record_of(row[1], row[2:])) for row in rows)

    async def verify(self) -> tuple[Finding, ...]:
        return await to_thread.run_sync(audit, self._parts.sources)

    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        row, prepared = to_row(info), _of(info.id, draft)

        def job() -> None:
            added = self._parts.db.execute(sql.ADD, row)
            number = added.lastrowid
            if added.rowcount != 1 or number is None:
                raise Conflict(f"sandbox {info.id} exists already", id=info.id)
            self._ledger.born(info.id, number)
            self._ledger.append(prepared)
            self._living.stage(number, info)

        await self._writer.run(job, size=len(prepared.payload) + len(row[-1]))

    async def add_many(self, infos: Sequence[SandboxInfo], drafts: Sequence[Draft]) -> None:
        check_many(infos, drafts)
        rows = [to_row(info) for info in infos]
        prepared = [_of(info.id, draft) for info, draft in zip(infos, drafts, strict=True)]

        def job() -> None:
            for info, row, one in zip(infos, rows, prepared, strict=True):
                added = self._parts.db.execute(sql.ADD, row)
                if added.rowcount != 1 or added.lastrowid is None:
                    raise Conflict(f"sandbox {info.id} exists already", id=info.id)
                self._ledger.born(info.id, added.lastrowid)
                self._ledger.append(one)

        await self._writer.run(job, size=sum(len(one.payload) for one in prepared))

    async def move(
        self, sandbox: SandboxId, *, seen: State, to: State, draft: Draft, reason: str = ""
    ) -> SandboxInfo:
        prepared, words = _of(sandbox, draft), clean_reason(reason)

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
        prepared = _of(sandbox, draft)
        if not math.isfinite(at):
            raise BadRequest(f"expires_at: {at!r} is not a time")

        def job() -> SandboxInfo:
            row = self._row(sandbox)
            return self._change(row, replace(row[1], expires_at=float(at)), prepared)

        return await self._writer.run(job, size=len(prepared.payload))

    def _change(self, row: LivingRow, info: SandboxInfo, prepared: Prepared) -> SandboxInfo:
        """Write what can change of a sandbox, and the record of it."""
        number, before = row
        values = (info.state.value, info.ended_at, info.expires_at, info.reason, number, before.state.value)
        if self._parts.db.execute(sql.CHANGE, values).rowcount != 1:
            raise StoreDamaged(f"the row of sandbox {info.id} was changed by somebody else")
        self._ledger.append(prepared, marked=True)
        self._living.stage(number, info)
        return info

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        rows = await self._look_up(sql.GET, (sandbox,))
        if not rows:
            raise no_sandbox(sandbox)
        return from_row(rows[0][1:])

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        wanted = json.dumps([str(state) for state in states or State])
        rows = await self._query(sql.LIST, (wanted,))
        return await to_thread.run_sync(lambda: tuple([from_row(row[1:]) for row in rows]))

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        check_limit(limit)
        wanted = states or [state for state in State if state is not State.GONE]
        text = json.dumps([str(state) for state in wanted])
        rows = await self._query(sql.PAGE, (text, check_place(after), project, project, limit + 1))
        items = tuple([from_row(row[1:]) for row in rows[:limit]])
        return Page(items=items, next=str(rows[limit - 1][0]) if len(rows) > limit else "")

    async def count(self, project: str = "") -> Mapping[State, int]:
        rows = await self._query(sql.COUNT, (project, project))
        return {State(state): number for state, number in rows}

    async def expiring(self, before: float, limit: int = 1000) -> tuple[SandboxInfo, ...]:
        rows = await self._query(sql.EXPIRING, (before, limit))
        return tuple([from_row(row[1:]) for row in rows])

    async def prune(self, keep: int = 10_000) -> int:
        if keep < 0:
            raise BadRequest(f"keep: {keep} is less than 0")
        surplus = [number for (number,) in await self._query(sql.SURPLUS, (keep,))]
        for start in range(0, len(surplus), _PRUNE_STEP):
            numbers = surplus[start : start + _PRUNE_STEP]
            await self._writer.run(partial(self._prune, numbers, keep))
        return len(surplus)

    def _prune(self, numbers: Sequence[int], keep: int) -> None:
        dropped = self._parts.db.execute(sql.DROP, (json.dumps(numbers),)).rowcount
        payload: dict[str, Json] = {"dropped": dropped, "keep": keep}
        self._ledger.append(
            prepare(Draft(chain="engine", act="sandbox.prune", phase=Phase.NOTE, payload=payload))
        )

    def _row(self, sandbox: SandboxId) -> LivingRow:
        """Of the transaction under way.  Raises: NotFound."""
        known = self._living.find(sandbox)
        if known is not None:
            return known
        row = self._parts.db.execute(sql.GET, (sandbox,)).fetchone()
        if row is None:
            raise no_sandbox(sandbox)
        return row[0], from_row(row[1:])

    async def _look_up(self, text: str, args: tuple[Any, ...]) -> Rows:
        """A read by key: at once when the reader is free."""
        if self._read_lock.acquire(blocking=False):
            try:
                return self._select(text, args)
            finally:
                self._read_lock.release()
        return await self._query(text, args)

    async def _query(self, text: str, args: tuple[Any, ...]) -> Rows:
        return await to_thread.run_sync(self._locked_select, text, args)

    def _locked_select(self, text: str, args: tuple[Any, ...]) -> Rows:
        with self._read_lock:
            return self._select(text, args)

    def _select(self, text: str, args: tuple[Any, ...]) -> Rows:
        if self._closed:
            raise Conflict("the journal is closed")
        with translated():
            return self._parts.reader.execute(text, args).fetchall()


def verify_directory(
    directory: Path, *, key: Path, checkpoint_file: Path | None = None
) -> tuple[Finding, ...]:
    """Check a journal, open or not. Blocks.

    Raises:
        StoreDamaged: there is no journal, it cannot be read, or its key is missing.
    """
    files = _Files(directory, key, checkpoint_file or directory / CHECKPOINTS)
    return audit(Sources(files.database, files.checkpoints, checkpoints.load_key(key).public_key()))


class _Files:
    """Where the parts of a journal are."""

    def __init__(self, directory: Path, key: Path, checkpoint_file: Path) -> None:
        self.database = directory / schema.DATABASE
        self.wal = directory / f"{schema.DATABASE}-wal"
        self.key = key
        self.checkpoints = checkpoint_file

    def prepare(self) -> Ed25519PrivateKey:
        """The signing key; makes the files when there are none of them.  Raises: StoreDamaged."""
        if self.database.exists():
            key = checkpoints.load_key(self.key)
            schema.upgrade(self.database)
            return key
        left = [str(path) for path in (self.wal, self.checkpoints) if path.exists()]
        if left:
            raise StoreDamaged(
                f"{self.database} is missing but {left[0]} is there", hint="restore it from a copy"
            )
        self.database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The key before the journal: a key alone (we died here) is simply used by the next start.
        key = checkpoints.load_key(self.key) if self.key.exists() else checkpoints.make_key(self.key)
        schema.create(self.database)
        return key


class _Parts:
    """Everything behind an open store, put together and taken apart. Blocks."""

    def __init__(
        self, files: _Files, engine_id: str, durability: Durability, pace: Pace, now: Callable[[], float]
    ) -> None:
        self.now = now
        with contextlib.ExitStack() as stack:
            try:
                key = files.prepare()
            except PermissionError as exc:
                raise Denied(
                    f"the journal cannot be opened: {exc}",
                    hint="its files and their directory must belong to whoever runs this",
                ) from exc
            except OSError as exc:
                raise StorageFull(f"the journal cannot be made: {exc}") from exc
            self.sources = Sources(files.database, files.checkpoints, key.public_key())
            self.db = stack.enter_context(
                contextlib.closing(schema.connect(files.database, durability=durability))
            )
            self.reader = stack.enter_context(
                contextlib.closing(schema.connect(files.database, read_only=True))
            )
            side = stack.enter_context(contextlib.closing(schema.connect(files.database)))
            with translated():
                self.ledger = Ledger(self.db, now)
                self.ledger.recover()
                place, torn = _place(self.db, self.sources)
                schema.begin_log(self.db)
            file = stack.enter_context(
                contextlib.closing(checkpoints.CheckpointFile(files.checkpoints, key, engine_id, place))
            )
            self.living = Living()
            self.writer = Writer(self.db, self.ledger, self.living, inline=durability == "process")
            stack.callback(self.writer.release)  # an open read would keep the connection open
            with translated():
                self.writer.hold()
            self.keeper = keeper = Keeper(side, self.writer, self.ledger, file, pace=pace, now=now)
            self.writer.tell(keeper.committed)
            if torn:
                self._cut(files.checkpoints, torn)
            self.keeper.start()
            self._open = stack.pop_all()

    def close(self) -> None:
        """Raises: StorageFull: the last heads could not be signed; they will be after the next start."""
        with self._open:
            self.writer.close()
            self.keeper.close()

    def _cut(self, path: Path, torn: int) -> None:
        """Drop an unfinished last line, and say so in the journal first."""
        payload: dict[str, Json] = {"bytes": torn}
        note = prepare(Draft(chain="engine", act="journal.checkpoint_cut", phase=Phase.NOTE, payload=payload))
        self.writer.transact(lambda: self.ledger.append(note))
        os.truncate(path, path.stat().st_size - torn)


def _place(db: sqlite3.Connection, sources: Sources) -> tuple[checkpoints.Place, int]:
    """Where the checkpoint file ends.  Raises: StoreDamaged: it is shorter than the journal knows."""
    place, torn = checkpoints.last(sources.checkpoints, sources.public)
    row = db.execute(sql.CHECKPOINT).fetchone()
    if row is None or place.n < row[0] or (place.n == row[0] and place.digest != row[1]):
        known = row[0] if row else "no"
        raise StoreDamaged(
            f"{sources.checkpoints} ends at checkpoint {place.n}, the journal knows {known}",
            hint="run `dsec audit verify`; restore the file from a copy",
        )
    return place, torn


def _of(sandbox: SandboxId, draft: Draft) -> Prepared:
    """A draft that must be of the sandbox's own chain.  Raises: BadRequest."""
    if draft.chain != sandbox:
        raise BadRequest(f"chain: {draft.chain!r} is not that of {sandbox}")
    return prepare(draft)


def _check_limit(limit: int) -> None:
    if not 0 <= limit <= MAX_READ:
        raise BadRequest(f"limit: {limit} is not from 0 to {MAX_READ}")


def _receipt(head: Head) -> Receipt:
    return Receipt(head.seq, head.at / 1_000_000, head.digest.hex())


def record_of(chain: str, row: tuple[Any, ...]) -> Record:
    seq, at, act, phase, ref, actor, payload, digest = row
    try:
        return Record(
            chain=chain,
            seq=seq,
            at=at / 1_000_000,
            act=act,
            phase=Phase(phase),
            ref=ref,
            actor=actor,
            payload={} if payload is None else decode(payload),
            digest=digest.hex(),
        )
    except (TypeError, ValueError, AttributeError) as exc:
        raise StoreDamaged(
            f"record {seq!r} of {chain} cannot be read: {exc}", hint="run `dsec audit verify`"
        ) from exc


def no_sandbox(sandbox: SandboxId) -> NotFound:
    return NotFound(f"there is no sandbox {sandbox}", hint="`dsec ls` shows those there are", id=sandbox)
