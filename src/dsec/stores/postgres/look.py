"""Reading a journal in PostgreSQL beside its owner, or when it has none: nothing is written, and no lock is taken. Blocking."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from dsec.errors import NotFound
from dsec.model.ids import SandboxId
from dsec.model.journal import Finding, Record
from dsec.model.sandbox import SandboxInfo, State
from dsec.stores.audit import Look, audit_of
from dsec.stores.listing import classes_of
from dsec.stores.postgres import identity, sql
from dsec.stores.postgres.faults import REFUSALS, translate
from dsec.stores.postgres.line import connect
from dsec.stores.retention import ACT, ENGINE
from dsec.stores.rows import no_sandbox, record_of
from dsec.stores.sandbox_codec import from_row
from dsec.stores.schema import SEQ_MAX

_PAGE: Final = 2000
_CHAINS: Final = "SELECT number, name FROM chain WHERE number > $1 ORDER BY number LIMIT $2"
# The numbers of chains that have lost their name are found, too: neither happens to a sound journal.
_STRAYS: Final = """
    SELECT DISTINCT chain FROM record r WHERE NOT EXISTS (SELECT 1 FROM chain c WHERE c.number = r.chain) ORDER BY chain LIMIT 1000
"""
_ROWS: Final = """
    SELECT chain, seq, at, act, phase, ref, actor, payload, payload_digest, digest FROM record
    WHERE (chain, seq) > ($1, $2) ORDER BY chain, seq LIMIT $3
"""


class Session:
    """A connection that only reads, asked from a thread. As a context manager it is closed.

    Raises:
        RuntimeUnavailable, Denied: it cannot be made. StoreDamaged: the tables are not those of a journal. NotFound: there is none.
    """

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._connection: Any = None
        try:
            self._connection = self._run(connect(identity.check_url(url), default_transaction_read_only="on"))
            if not self._run(identity.is_there(self._connection)):
                raise NotFound(
                    "there is no journal in this database", hint="`dsec create` makes a first sandbox"
                )
            self._run(identity.check_tables(self._connection))
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(*REFUSALS):
                self._runner.run(self._connection.close(timeout=5.0))
        self._runner.close()

    def fetch(self, text: str, *values: Any) -> list[Any]:
        """Rows.  Raises: RuntimeUnavailable, StoreDamaged."""
        rows: list[Any] = self._run(self._connection.fetch(text, *values))
        return rows

    def _run(self, work: Any) -> Any:
        try:
            return self._runner.run(work)
        except REFUSALS as error:
            raise translate(error) from error


class PostgresLook:
    """What an audit reads; pages of many chains at once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names: dict[int, object] = {}
        self._page: list[Any] = []
        self._place = (0, 0)

    def noted(self) -> tuple[int, bytes] | None:
        rows = self._session.fetch("SELECT number, digest FROM mark WHERE name = 'checkpoint'")
        return tuple(rows[0]) if rows else None

    def number_of(self, name: str) -> int | None:
        rows = self._session.fetch("SELECT number FROM chain WHERE name = $1", name)
        return rows[0][0] if rows else None

    def name_of(self, number: int) -> tuple[object] | None:
        if number in self._names:
            return (self._names[number],)
        rows = self._session.fetch("SELECT name FROM chain WHERE number = $1", number)
        return tuple(rows[0]) if rows else None

    def numbers(self) -> Iterator[int]:
        last = -(2**63)
        while rows := self._session.fetch(_CHAINS, last, _PAGE):
            self._names = {row[0]: row[1] for row in rows}
            yield from self._names
            last = rows[-1][0]
        for (stray,) in self._session.fetch(_STRAYS):
            yield stray

    def rows(self, number: int, after: int) -> Iterator[tuple[Any, ...]]:
        place = (number, after or -1)
        if not (self._page and self._place <= place and place < (self._page[-1][0], self._page[-1][1])):
            self._read(place)
        while True:
            page = self._page
            first = bisect_right(page, place, key=lambda row: (row[0], row[1]))
            for row in itertools.islice(page, first, None):
                if row[0] != number:
                    return
                place = (number, row[1])
                yield tuple(row[1:])
            if len(page) < _PAGE:
                return
            self._read(place)

    def _read(self, place: tuple[int, int]) -> None:
        self._place, self._page = place, self._session.fetch(_ROWS, *place, _PAGE)


@contextlib.contextmanager
def _looked(url: str) -> Iterator[Look]:
    with Session(url) as session:
        yield PostgresLook(session)


def verify(url: str, file: Path, public: Ed25519PublicKey) -> tuple[Finding, ...]:
    """All that is wrong with a journal; see :func:`~dsec.stores.audit.audit`."""
    return audit_of(lambda: _looked(url), file, public)


class PostgresReader:
    """What is recorded now; the same questions as :class:`~dsec.stores.reader.JournalReader`."""

    def __init__(self, url: str) -> None:
        self._session = Session(url)

    def __enter__(self) -> PostgresReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)

    def sandboxes(self, states: Sequence[State]) -> tuple[SandboxInfo, ...]:
        """Those in these states, oldest first."""
        return tuple([from_row(tuple(row[1:])) for row in self._session.fetch(sql.LIST, *classes_of(states))])

    def sandbox(self, sandbox: SandboxId) -> SandboxInfo:
        """Raises: NotFound."""
        rows = self._session.fetch(sql.GET, sandbox)
        if not rows:
            raise no_sandbox(sandbox)
        return from_row(tuple(rows[0][1:]))

    def chains(self) -> tuple[str, ...]:
        """Every chain, oldest first."""
        return tuple([row[0] for row in self._session.fetch("SELECT name FROM chain ORDER BY number")])

    def records(self, chain: str, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        """Of one chain in order, numbered above ``after``."""
        rows = self._session.fetch(sql.READ, min(max(after, 0), SEQ_MAX), chain, limit)
        return tuple([record_of(chain, tuple(row)) for row in rows])

    def dropped(self) -> int:
        """How many chains were dropped to keep the journal within its bound; records of the chain ``engine`` name them."""
        return int(self._session.fetch(sql.DROPPED, ENGINE, ACT)[0][0])

    def running(self, sandbox: SandboxId) -> tuple[Record, ...]:
        """Intents of the commands of a sandbox whose end is not recorded."""
        rows = self._session.fetch(sql.UNANSWERED, sandbox)
        found = [record_of(sandbox, tuple(row)) for row in rows]
        return tuple([record for record in found if record.act == "exec"])
