"""What is known of the journal in memory, and sheets of what is to be stored next: jobs are decided here, and PostgreSQL is told the outcome.

That can be, as only the holder of the lock changes anything. A sheet is stored by one statement: all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from dsec.errors import Conflict, StorageFull, StoreDamaged
from dsec.model.ids import SandboxId
from dsec.model.sandbox import SandboxInfo, State
from dsec.stores.chain import GENESIS, Prepared, link_fields
from dsec.stores.ledger import Head
from dsec.stores.living import ENDED
from dsec.stores.rows import no_sandbox
from dsec.stores.sandbox_codec import Row, class_of
from dsec.stores.schema import SEQ_MAX
from dsec.stores.specs import MAX_KEPT, MOST_KEPT, Decoder
from dsec.stores.tally import Tally

RECORD_BYTES: Final = 250  # of a record, beside its payload
_CACHED: Final = 16_384
_FEW: Final = 300  # heads of one sheet: more are of a batch, which nobody touches soon
_NO_SANDBOX: Final = (None,) * 13  # state to number of the specification

LivingRow = tuple[int, SandboxInfo]
Extra = tuple[str, tuple[Any, ...], int]
"""A statement, its arguments, and how many rows it must change (-1: any number)."""


@dataclass(slots=True)
class Found:
    """What was read for a sheet, None where it is not there."""

    heads: dict[str, Head | None]
    rows: dict[str, LivingRow | None]
    specs: dict[str, int]


class Book:
    """As of the last commit.

    Attributes:
        position, chains, specs: the greatest that are used. bytes: of all records, roughly.
        unsigned: heads that no checkpoint covers. unsigned_records: about how many records that are.
    """

    def __init__(self, now: Callable[[], float], unsigned_max: int = 65_536) -> None:
        self.now = now
        self.position = 0
        self.chains = 0
        self.specs = 0
        self.bytes = 0
        self.heads: dict[str, Head] = {}
        self.rows: dict[str, LivingRow] = {}
        self.spec_numbers: dict[str, int] = {}
        self.unsigned: dict[str, Head] = {}
        self.unsigned_records = 0
        self.tally = Tally()
        self.decode = Decoder()
        self._unsigned_max = unsigned_max

    @property
    def room(self) -> int:
        """How many more chains may come to wait for a signature."""
        return self._unsigned_max - len(self.unsigned)

    @property
    def reserve(self) -> int:
        """What of it is for those who come one at a time, and do not wait."""
        return self._unsigned_max // 4

    def settle(self, sheet: Sheet) -> None:
        """It was stored."""
        self.position, self.chains, self.specs = sheet.position, sheet.chains, sheet.specs
        self.bytes += sum(len(record[8]) + RECORD_BYTES for record in sheet.records)
        self.unsigned.update(sheet.heads)
        self.unsigned_records += len(sheet.records)
        if len(sheet.heads) <= _FEW:
            self._keep(sheet)
        else:
            for name in sheet.heads:
                self.heads.pop(name, None)
                self.rows.pop(name, None)
        for text, number in sheet.spec_numbers.items():
            if len(text) <= MAX_KEPT:
                self.spec_numbers[text] = number
        _shorten(self.spec_numbers, MOST_KEPT)
        for change in sheet.tally:
            self.tally.stage(*change)
        self.tally.settle()

    def _keep(self, sheet: Sheet) -> None:
        self.heads.update(sheet.heads)
        for name, row in sheet.rows.items():
            if row[1].state in ENDED:
                self.rows.pop(name, None)
            else:
                self.rows[name] = row
        _shorten(self.heads, _CACHED)
        _shorten(self.rows, _CACHED)

    def drop(self, name: str) -> None:
        """Its records were deleted, or its row emptied."""
        self.heads.pop(name, None)
        self.rows.pop(name, None)


class Sheet:
    """What one or more jobs are going to store, over what was found for them. A job that raises leaves its own sheet, which is thrown away."""

    def __init__(self, book: Book, found: Found, below: Sheet | None = None) -> None:
        self.position: int = below.position if below else book.position
        self.chains: int = below.chains if below else book.chains
        self.specs: int = below.specs if below else book.specs
        self.first = self.position + 1
        self.heads: dict[str, Head] = {}
        self.rows: dict[str, LivingRow] = {}
        self.spec_numbers: dict[str, int] = {}
        self.new_specs: list[tuple[int, bytes, str]] = []
        self.new_chains: dict[int, tuple[Any, ...]] = {}
        self.changes: dict[int, tuple[Any, ...]] = {}
        self.records: list[tuple[Any, ...]] = []
        self.tally: list[tuple[str, State | None, State | None]] = []
        self.extra: list[Extra] = []
        self._book = book
        self._found = found
        self._below = below

    @property
    def empty(self) -> bool:
        """Whether there is nothing to store."""
        return not (self.records or self.extra)

    def take(self, above: Sheet) -> None:
        """A job on a sheet over this one succeeded."""
        self.position, self.chains, self.specs = above.position, above.chains, above.specs
        self.heads |= above.heads
        self.rows |= above.rows
        self.spec_numbers |= above.spec_numbers
        self.new_specs += above.new_specs
        for number, change in above.changes.items():
            self._merge(number, change)
        self.new_chains |= above.new_chains
        self.records += above.records
        self.tally += above.tally
        self.extra += above.extra

    def _merge(self, number: int, change: tuple[Any, ...]) -> None:
        """A later change of a row that this sheet makes, or changes already."""
        seen, state, class_, ended, expires, reason = change
        made = self.new_chains.get(number)
        if made is not None:
            # number, name, state, ended, expires, reason, created .. flags, class, project, spec
            self.new_chains[number] = (
                *made[:2],
                state,
                ended,
                expires,
                reason,
                *made[6:12],
                class_,
                *made[13:],
            )
            return
        earlier = self.changes.get(number)
        self.changes[number] = (earlier[0] if earlier else seen, *change[1:])

    # Looking

    def head(self, name: str) -> Head | None:
        """Of a chain, as of the jobs before."""
        found = self.heads.get(name)
        if found is None and self._below is not None:
            return self._below.head(name)
        return found or self._book.heads.get(name) or self._found.heads.get(name)

    def row(self, sandbox: SandboxId) -> LivingRow:
        """Raises: NotFound."""
        found = self.rows.get(sandbox)
        if found is None and self._below is not None:
            return self._below.row(sandbox)
        found = found or self._book.rows.get(sandbox) or self._found.rows.get(sandbox)
        if found is None:
            raise no_sandbox(sandbox)
        return found

    def _spec(self, text: str) -> int:
        """The number of a specification; a new row where there is none."""
        for known in (self.spec_numbers, self._below.spec_numbers if self._below else {}):
            if text in known:
                return known[text]
        number = self._book.spec_numbers.get(text) or self._found.specs.get(text)
        if number is None:
            self.specs = number = self.specs + 1
            self.new_specs.append((number, spec_digest(text), text))
        self.spec_numbers[text] = number
        return number

    # Writing

    def add(self, info: SandboxInfo, row: Row, prepared: Prepared) -> None:
        """A new sandbox and the first record of its chain.  Raises: Conflict: the id exists. StorageFull."""
        if self.head(info.id) is not None:
            raise Conflict(f"sandbox {info.id} exists already", id=info.id)
        number = self._born(
            info.id, (*row[1:-1], class_of(info.state), info.spec.project, self._spec(row[-1]))
        )
        self.heads[info.id] = Head(number, 0, GENESIS)
        self.append(prepared)
        self.rows[info.id] = (number, info)
        self.tally.append((info.spec.project, None, info.state))

    def change(self, info: SandboxInfo, prepared: Prepared) -> None:
        """What can change of a sandbox, and the record of it.  Raises: StorageFull. NotFound."""
        number, before = self.row(info.id)
        self.append(prepared)
        values = (info.state.value, class_of(info.state), info.ended_at, info.expires_at, info.reason)
        self._merge(number, (before.state.value, *values))
        self.rows[info.id] = (number, info)
        if before.state is not info.state:
            self.tally.append((info.spec.project, before.state, info.state))

    def append(self, prepared: Prepared) -> Head:
        """One record.  Raises: StorageFull: signed checkpoints could not be written for too long, or the chain has no number left."""
        draft, payload, payload_digest = prepared
        chain = draft.chain
        head = self.head(chain)
        if head is None:
            head = Head(self._born(chain, _NO_SANDBOX), 0, GENESIS)
        elif not head.number:  # it was dropped: it goes on where it ended
            head = Head(self._born(chain, _NO_SANDBOX), head.seq, head.digest)
        if head.seq >= SEQ_MAX:
            raise StorageFull(f"{chain} holds as many records as a chain can")
        if chain not in self._book.unsigned and self._book.room <= len(self.heads):
            raise _no_room(self._book)
        number, seq, at = head.number, head.seq + 1, int(self._book.now() * 1_000_000)
        fields = (chain, seq, at, draft.act, draft.phase.value, draft.ref, draft.actor)
        digest = link_fields(fields, payload_digest=payload_digest, previous=head.digest)
        self.position += 1
        self.records.append((number, seq, self.position, *fields[2:], payload, digest))
        head = Head(number, seq, digest, at)
        self.heads[chain] = head
        return head

    def _born(self, name: str, values: tuple[Any, ...]) -> int:
        self.chains += 1
        self.new_chains[self.chains] = (self.chains, name, *values)
        return self.chains


def _no_room(book: Book) -> StorageFull:
    return StorageFull(
        f"{len(book.unsigned)} chains wait for a signed checkpoint",
        hint="checkpoints cannot be written; look at the file system that holds them",
    )


def spec_digest(text: str) -> bytes:
    """By which a specification is found."""
    return sha256(text.encode("ascii")).digest()


def arguments_of(sheet: Sheet) -> list[list[Any]]:
    """Of the statement that stores a sheet: a list for each column."""
    changes = [(number, *change) for number, change in sheet.changes.items()]
    lists: list[list[Any]] = []
    for rows, width in (
        (sheet.new_specs, 3),
        (list(sheet.new_chains.values()), 15),
        (changes, 7),
        (sheet.records, 10),
    ):
        lists += [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
    return lists


def marks_of(rows: list[tuple[str, int, bytes]]) -> Mapping[str, tuple[int, bytes]]:
    """Raises: StoreDamaged: one of them is missing."""
    marks = {name: (number, digest) for name, number, digest in rows}
    missing = {"checkpoint", "signed", "owner", "bytes", "counted", "flush"} - marks.keys()
    if missing:
        raise StoreDamaged(f"the journal's note of {sorted(missing)[0]} is missing", hint="restore a copy")
    return marks


def _shorten(kept: dict[str, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
