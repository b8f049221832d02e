"""The journal, the table of sandboxes and the execs in one SQLite file."""

from __future__ import annotations

import contextlib
import hashlib
import json
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

from dsec.errors import BadRequest, Conflict, NotFound, StorageFull, StoreDamaged, TooLarge
from dsec.model.ids import ExecId, SandboxId
from dsec.model.journal import Draft, Finding, Json, Phase, Record
from dsec.model.sandbox import SandboxInfo, State
from dsec.ports.journal import Execs, Journal, Sandboxes, StoredExec
from dsec.stores import checkpoints, schema
from dsec.stores import journal_sql as sql
from dsec.stores.audit import Sources, audit
from dsec.stores.chain import Prepared, decode, prepare
from dsec.stores.keeper import Keeper, Pace
from dsec.stores.ledger import Ledger
from dsec.stores.sandbox_codec import clean_reason, from_row, to_row
from dsec.stores.schema import Durability, translated
from dsec.stores.writer import Writer

Rows = list[tuple[Any, ...]]  # before the class, in which `list` is a method

CHECKPOINTS: Final = "checkpoints.jsonl"
MAX_DRAFTS: Final = 256
MAX_READ: Final = 10_000
_ARGV_BYTES: Final = 16 * 1024
_KNOWN: Final = 16_384  # living sandboxes remembered
_PRUNE_STEP: Final = 500
_ENDED: Final = frozenset({State.GONE, State.FAILED})


class SqliteStore(Journal, Sandboxes, Execs):
    """One open journal. Made by :meth:`open`; the caller makes sure that it is the directory's only owner.

    Appends of a ``durability="process"`` store run on the caller's thread when nothing waits (some 60 µs, no sync);
    so does the look-up of a single row. All else happens on threads.
    """

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._writer = parts.writer
        self._ledger = parts.ledger
        self._now = parts.now
        self._read_lock = threading.Lock()
        self._closed = False
        self._known: dict[SandboxId, SandboxInfo] = {}

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

    async def append(self, *drafts: Draft) -> tuple[Record, ...]:
        if len(drafts) > MAX_DRAFTS:
            raise TooLarge(f"{len(drafts)} records at once, the bound is {MAX_DRAFTS}")
        if len(drafts) == 1:
            one = prepare(drafts[0])
            record = await self._writer.run(
                partial(self._ledger.append, one),
                size=len(one.payload),
                bare=partial(self._ledger.is_bare, one.draft.chain),
            )
            return (record,)
        prepared = [prepare(draft) for draft in drafts]
        if not prepared:
            return ()
        size = sum(len(one.payload) for one in prepared)
        return await self._writer.run(lambda: tuple(map(self._ledger.append, prepared)), size=size)

    async def read(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        if not 0 <= limit <= MAX_READ:
            raise BadRequest(f"limit: {limit} is not from 0 to {MAX_READ}")
        rows = await self._query(sql.READ, (chain, after, limit))
        return tuple(record_of(chain, row) for row in rows)

    async def verify(self) -> tuple[Finding, ...]:
        return await to_thread.run_sync(audit, self._parts.sources)

    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        row, prepared = to_row(info), prepare(draft)

        def job() -> None:
            if self._parts.db.execute(sql.ADD, row).rowcount != 1:
                raise Conflict(f"sandbox {info.id} exists already", id=info.id)
            self._ledger.append(prepared)

        await self._writer.run(job, size=len(prepared.payload) + len(row[2]))
        self._remember(info)

    async def move(
        self, sandbox: SandboxId, *, seen: State, to: State, draft: Draft, reason: str = ""
    ) -> SandboxInfo:
        prepared = prepare(draft)
        change = {
            "id": sandbox,
            "seen": str(seen),
            "to": str(to),
            "ends": to in _ENDED,
            "now": self._now(),
            "reason": clean_reason(reason),
        }

        def job() -> SandboxInfo:
            row = self._parts.db.execute(sql.MOVE, change).fetchone()
            known = self._known.get(sandbox) or self._row(sandbox)
            if row is None:
                known = self._row(sandbox)
                raise Conflict(
                    f"sandbox {sandbox} is {known.state}, not {seen}", id=sandbox, state=str(known.state)
                )
            self._ledger.append(prepared)
            return replace(known, state=to, expires_at=row[0], ended_at=row[1], reason=row[2])

        info = await self._writer.run(job, size=len(prepared.payload))
        self._remember(info)
        return info

    def _remember(self, info: SandboxInfo) -> None:
        """Of a living sandbox, what never changes: it need not be read and decoded for each of its moves."""
        if info.state in _ENDED:
            self._known.pop(info.id, None)
            return
        self._known[info.id] = info
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]

    async def expire_at(self, sandbox: SandboxId, at: float, draft: Draft) -> SandboxInfo:
        prepared = prepare(draft)

        def job() -> SandboxInfo:
            info = replace(self._row(sandbox), expires_at=float(at))
            to_row(info)  # the same check as when it was added
            self._parts.db.execute(sql.EXPIRE, (info.expires_at, sandbox))
            self._ledger.append(prepared)
            return info

        return await self._writer.run(job, size=len(prepared.payload))

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        rows = await self._look_up(sql.GET, (sandbox,))
        if not rows:
            raise _no_sandbox(sandbox)
        return from_row(rows[0])

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        wanted = json.dumps([str(state) for state in states or State])
        rows = await self._query(sql.LIST, (wanted,))
        return await to_thread.run_sync(lambda: tuple(map(from_row, rows)))

    async def prune(self, keep: int = 10_000) -> int:
        if keep < 0:
            raise BadRequest(f"keep: {keep} is less than 0")
        total, step = 0, _PRUNE_STEP
        while step == _PRUNE_STEP:
            step = await self._writer.run(lambda: self._prune(keep))
            total += step
        return total

    async def exec_started(
        self,
        sandbox: SandboxId,
        exec_id: ExecId,
        argv: Sequence[str],
        *,
        actor: str = "local",
        details: Mapping[str, Json] | None = None,
    ) -> Record:
        payload: dict[str, Json] = {**(details or {}), **_argv(argv)}
        draft = Draft(
            chain=sandbox, act="exec", phase=Phase.INTENT, ref=exec_id, actor=actor, payload=payload
        )
        prepared = _referring(draft)

        def job() -> Record:
            if self._has(draft, Phase.INTENT):
                raise Conflict(f"exec {exec_id} was started in {sandbox} before", id=exec_id)
            return self._ledger.append(prepared)

        return await self._writer.run(job, size=len(prepared.payload))

    async def exec_ended(
        self, sandbox: SandboxId, exec_id: ExecId, outcome: Mapping[str, Json], *, actor: str = "local"
    ) -> Record:
        draft = Draft(
            chain=sandbox, act="exec", phase=Phase.RESULT, ref=exec_id, actor=actor, payload=outcome
        )
        prepared = _referring(draft)

        def job() -> Record:
            if not self._has(draft, Phase.INTENT):
                raise NotFound(f"there is no exec {exec_id} in {sandbox}", id=exec_id)
            if self._has(draft, Phase.RESULT):
                raise Conflict(f"how exec {exec_id} ended is recorded already", id=exec_id)
            return self._ledger.append(prepared)

        return await self._writer.run(job, size=len(prepared.payload))

    async def get_exec(self, sandbox: SandboxId, exec_id: ExecId) -> StoredExec:
        intents = await self._look_up(sql.EXEC_BY_REF, (sandbox, Phase.INTENT, exec_id))
        if not intents:
            raise NotFound(f"there is no exec {exec_id} in {sandbox}", id=exec_id)
        results = await self._look_up(sql.EXEC_BY_REF, (sandbox, Phase.RESULT, exec_id))
        return _stored(record_of(sandbox, intents[0]), record_of(sandbox, results[0]) if results else None)

    async def open_execs(self, sandbox: SandboxId) -> tuple[StoredExec, ...]:
        rows = await self._query(sql.OPEN_EXECS, (sandbox,))
        return tuple(_stored(record_of(sandbox, row), None) for row in rows)

    def _has(self, draft: Draft, phase: Phase) -> bool:
        rows = self._parts.db.execute(sql.EXEC_BY_REF, (draft.chain, str(phase), draft.ref))
        return rows.fetchone() is not None

    def _row(self, sandbox: SandboxId) -> SandboxInfo:
        row = self._parts.db.execute(sql.GET, (sandbox,)).fetchone()
        if row is None:
            raise _no_sandbox(sandbox)
        return from_row(row)

    def _prune(self, keep: int) -> int:
        dropped = self._parts.db.execute(sql.PRUNE, (_PRUNE_STEP, keep)).rowcount
        if dropped:
            payload: dict[str, Json] = {"dropped": dropped, "keep": keep}
            self._ledger.append(
                prepare(Draft(chain="engine", act="sandbox.prune", phase=Phase.NOTE, payload=payload))
            )
        return dropped

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
            return checkpoints.load_key(self.key)
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
            file = stack.enter_context(
                contextlib.closing(checkpoints.CheckpointFile(files.checkpoints, key, engine_id, place))
            )
            self.writer = Writer(self.db, self.ledger, inline=durability == "process", committed=_nothing)
            self.keeper = keeper = Keeper(
                side, self.writer, self.ledger, file, wal=files.wal, pace=pace, now=now
            )
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


def _nothing() -> None:
    """Nobody is there yet who wants to know of a commit."""


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


def _referring(draft: Draft) -> Prepared:
    if not draft.ref:
        raise BadRequest("exec id: it is empty")
    return prepare(draft)


def _argv(argv: Sequence[str]) -> dict[str, Json]:
    """``argv`` as far as it is kept: whole, or its head with the count and the digest of all."""
    kept: list[Json] = []
    size = 0
    for word in argv:
        size += len(word) + 3
        if size > _ARGV_BYTES:
            data = b"\0".join(part.encode("utf-8", "surrogateescape") for part in argv)
            return {"argv": kept, "argv_count": len(argv), "argv_sha256": hashlib.sha256(data).hexdigest()}
        kept.append(word)
    return {"argv": kept}


def _stored(intent: Record, result: Record | None) -> StoredExec:
    argv = intent.payload.get("argv")
    words = tuple(str(word) for word in argv) if isinstance(argv, list) else ()
    return StoredExec(id=ExecId(intent.ref), argv=words, intent=intent, result=result)


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


def _no_sandbox(sandbox: SandboxId) -> NotFound:
    return NotFound(f"there is no sandbox {sandbox}", hint="`dsec ls` shows those there are", id=sandbox)
