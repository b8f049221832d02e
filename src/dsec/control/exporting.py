"""Records of the journal to a sink, at least once: how far it came moves only when the sink has them.

Nothing is held but one batch: what waits for a sink waits in the journal. What the journal dropped meanwhile is told by an event.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dsec.errors import Busy, DsecError, NotFound, RuntimeUnavailable, StorageFull, Unsupported
from dsec.model.journal import Json, Record
from dsec.observe.cursor import Cursor, CursorFile
from dsec.observe.events import GAP, REWOUND, Event, Origin, event_of, statement
from dsec.observe.formats import LEAST_BYTES, Format, line_of
from dsec.observe.sink import Line, Refused, Sink
from dsec.observe.verdict import Verdict, verdict_of

_BATCH: Final = 500  # records
_BYTES: Final = 2**20  # of lines that are sent at once, as long as one alone is not longer
_FIRST: Final = 0.5  # seconds until the second try
_LONGEST: Final = 60.0
_NAMED: Final = 200  # chains that a gap names
_SEVERITY: Final = {Verdict.ASKED: 6, Verdict.DONE: 6, Verdict.FAILED: 5, Verdict.ALERT: 4}


class Source(Protocol):
    """A journal that is read. Blocking."""

    def tail(self, after: int, limit: int, chain: str = "") -> Sequence[tuple[int, Record]]:
        """Records in the order of their positions, above ``after``; of one chain, or of all.  Raises: DsecError."""

    def lost(self, after: int, before: int) -> Mapping[str, int]:
        """Chains that were dropped whose last record was between these positions, each with the number of that record."""

    def ended(self, chain: str) -> tuple[int, int] | None:
        """Position and number of the last record of a chain that was dropped; None: it was not."""

    def position_at(self, since: float) -> int:
        """The position before the first record that is not older (seconds since the epoch)."""

    def replaced(self) -> bool:
        """Whether another database is in its place by now."""

    def close(self) -> None:
        """Let go of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is exported.

    Attributes:
        chain: only that one, "" = all. after: only what has a greater position. since: only what is not older (seconds since the epoch).
        follow: go on for ever. limit: bytes of a line, 0 = any. poll: seconds between looks at a journal in which nothing is new.
        patience: seconds for which a sink may refuse when nothing is followed.
    """

    form: Format
    origin: Origin
    chain: str = ""
    after: int = 0
    since: float = 0.0
    follow: bool = False
    limit: int = 0
    poll: float = 0.5
    patience: float = 60.0


class Exporter:
    """One export.

    Args:
        open_source: the journal; again when it was replaced, or could not be read for a moment.
        cursor: where it is kept how far this came; None: nowhere.
        report: told, for people, what does not work, and that it works again.
    """

    def __init__(
        self,
        task: Task,
        open_source: Callable[[], Source],
        sink: Sink,
        *,
        cursor: CursorFile | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._task = task
        self._open_source = open_source
        self._sink = sink
        self._file = cursor
        self._report = report
        self._at = Cursor(chain=task.chain)
        self._stop = asyncio.Event()
        self.exported = 0

    def stop(self) -> None:
        """End after what is under way."""
        self._stop.set()

    @property
    def position(self) -> int:
        """Up to where the sink has everything."""
        return self._at.position

    async def run(self) -> None:
        """Until everything is exported or, when it follows, until :meth:`stop`.

        Raises:
            Busy: the sink did not take it for too long. Unsupported: it never will. And what reading the journal raises.
        """
        try:
            begun = await asyncio.to_thread(self._load)
            while not self._stop.is_set():
                try:
                    if await self._read(begun):
                        return
                except _Stopped:
                    return
                except _Over as over:
                    raise over.error from over
                except (NotFound, Busy, RuntimeUnavailable) as error:  # no journal yet, or not for now
                    if not self._task.follow:
                        raise
                    self._report(f"the journal: {error.message}; trying again")
                    await self._pause(self._task.poll * 4)
                begun = begun or self._at.position > 0
        finally:
            await self._sink.close()
            if self._file is not None:
                self._file.close()

    def _load(self) -> bool:
        """Go on where the last one ended, if there was one."""
        kept = self._file.load() if self._file is not None else None
        if kept is None:
            return False
        if kept.chain != self._task.chain:
            raise Unsupported(
                f"this name exports {kept.chain or 'all chains'}, not {self._task.chain or 'all chains'}",
                hint="choose another --name",
            )
        self._at = kept
        return True

    async def _read(self, begun: bool) -> bool:
        """Export from one opened journal; True: that was all."""
        source = await asyncio.to_thread(self._open_source)
        try:
            if begun:
                await self._verify(source)
            else:
                await self._begin(source)
            while not self._stop.is_set():
                found = await asyncio.to_thread(source.tail, self._at.position, _BATCH, self._task.chain)
                if found:
                    await self._deliver(await asyncio.to_thread(self._events, source, found))
                elif not await self._idle(source):
                    return not self._task.follow
            return True
        finally:
            await asyncio.to_thread(source.close)

    async def _begin(self, source: Source) -> None:
        after = self._task.after
        if self._task.since:
            after = max(after, await asyncio.to_thread(source.position_at, self._task.since))
        self._at = Cursor(position=after, chain=self._task.chain, seq=-1 if after else 0)

    async def _idle(self, source: Source) -> bool:
        """Nothing is new. False: that was all, or there is another journal."""
        if self._task.chain:
            await self._end_of_chain(source)
        if not self._task.follow or await asyncio.to_thread(source.replaced):
            return False
        await self._pause(self._task.poll)
        return True

    # What is missing

    async def _verify(self, source: Source) -> None:
        """Whether the journal is the one that was exported so far: after a power loss, or from a copy, it may be an older one."""
        if not self._at.position:
            return
        found = await asyncio.to_thread(source.tail, self._at.position - 1, 1)
        if found:
            position, record = found[0]
            same = not self._at.uid or event_of(position, record).uid == self._at.uid
            if position > self._at.position or same:
                return
        facts: dict[str, Json] = {
            "message": "the journal is older than what was exported of it: all of it is exported again",
            "position": self._at.position,
        }
        at = found[0][1].at if found else 0.0
        told = statement(REWOUND, self._at.position, at, facts)
        self._report("the journal is older than what was exported of it: beginning anew")
        await self._taken([self._line(told)])
        self._at = Cursor(chain=self._task.chain)
        await self._keep()

    def _events(self, source: Source, found: Sequence[tuple[int, Record]]) -> list[tuple[Event, int]]:
        """Events, each with its number in its chain; before what follows on a gap, the gap."""
        events: list[tuple[Event, int]] = []
        before, seq = self._at.position, self._at.seq
        for position, record in found:
            missing = self._missing(record.seq - seq, position - before, known=seq >= 0)
            if missing > 0:
                lost = (
                    source.lost(before, position) if not self._task.chain else {record.chain: record.seq - 1}
                )
                events.append((_gap(before, position, missing, record.at, lost), record.seq - 1))
            events.append((event_of(position, record), record.seq))
            before, seq = position, record.seq
        return events

    def _missing(self, numbers: int, positions: int, *, known: bool) -> int:
        """Records between two that follow each other, in one chain or in all of the journal."""
        if not self._task.chain:
            return positions - 1
        return numbers - 1 if known else 0

    async def _end_of_chain(self, source: Source) -> None:
        """The one chain that is exported may have been dropped before its end was."""
        end = await asyncio.to_thread(source.ended, self._task.chain)
        if end is None or self._at.seq < 0 or end[1] <= self._at.seq:
            return
        position, seq = max(end[0], self._at.position), end[1]
        gap = _gap(self._at.position, position + 1, seq - self._at.seq, 0.0, {self._task.chain: seq})
        await self._deliver([(gap, seq)])

    # Sending

    async def _deliver(self, events: Sequence[tuple[Event, int]]) -> None:
        """In parts; after each part the cursor moves."""
        part: list[tuple[Line, Event, int]] = []
        size = 0
        for event, seq in events:
            line = self._line(event)
            if part and size + len(line.data) > _BYTES:
                await self._pass_on(part)
                part, size = [], 0
            part.append((line, event, seq))
            size += len(line.data)
        if part:
            await self._pass_on(part)

    async def _pass_on(self, part: list[tuple[Line, Event, int]]) -> None:
        try:
            await self._taken([line for line, _, _ in part])
        except _TooLarge:
            if len(part) > 1:
                await self._pass_on(part[: len(part) // 2])
                await self._pass_on(part[len(part) // 2 :])
                return
            await self._taken([self._line(part[0][1], LEAST_BYTES)], smallest=True)
        _, event, seq = part[-1]
        uid = event.uid if event.record.seq else ""
        self._at = Cursor(position=event.position, uid=uid, chain=self._task.chain, seq=seq)
        self.exported += len(part)
        await self._keep()

    async def _taken(self, lines: Sequence[Line], *, smallest: bool = False) -> None:
        """Send until the sink has them.  Raises: _Over, _TooLarge, _Stopped."""
        tries, since, told = 0, asyncio.get_running_loop().time(), ""
        while True:
            try:
                await self._sink.send(lines)
            except Refused as refused:
                if refused.too_large and not smallest:
                    raise _TooLarge from refused
                self._give_up(refused, since)
                delay = max(refused.after, _delay(tries))
                if refused.reason != told:
                    self._report(f"the events are not taken: {refused.reason}; trying again until they are")
                told, tries = refused.reason, tries + 1
                await self._pause(delay)
                if self._stop.is_set():
                    raise _Stopped from refused
            else:
                if told:
                    self._report("the events are taken again")
                return

    def _give_up(self, refused: Refused, since: float) -> None:
        """Raises: _Over."""
        if self._task.follow:
            return
        if refused.lasting:
            error: DsecError = Unsupported(
                f"the events are not taken: {refused.reason}", hint="what was not taken is sent next time"
            )
            raise _Over(error) from refused
        if asyncio.get_running_loop().time() - since >= self._task.patience:
            error = Busy(
                f"the events are not taken: {refused.reason}",
                hint="what was not taken is sent next time; --follow waits for ever",
            )
            raise _Over(error) from refused

    async def _keep(self) -> None:
        """Say durably how far it came. On a full disk: wait, so that no more is sent twice than has to be."""
        tries = 0
        while self._file is not None:
            try:
                await asyncio.to_thread(self._file.save, self._at)
            except StorageFull as error:
                if not self._task.follow or self._stop.is_set():
                    raise
                self._report(error.message)
                await self._pause(_delay(tries))
                tries += 1
            else:
                return

    def _line(self, event: Event, limit: int = 0) -> Line:
        record = event.record
        data = line_of(self._task.form, event, self._task.origin, limit or self._task.limit)
        return Line(event.uid, record.at, record.act, _SEVERITY[verdict_of(record)], data)

    async def _pause(self, seconds: float) -> None:
        """Unless it is to end."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return


class _TooLarge(Exception):
    """Fewer at once."""


class _Stopped(Exception):
    """They were not taken when we were to end: the next one sends them."""


class _Over(Exception):
    """What the sink refused ends the export."""

    def __init__(self, error: DsecError) -> None:
        super().__init__(error.message)
        self.error = error


def _delay(tries: int) -> float:
    """Longer each time; not the same for all who wait."""
    longest = min(_LONGEST, _FIRST * 2.0 ** min(tries, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def _gap(after: int, before: int, missing: int, at: float, lost: Mapping[str, int]) -> Event:
    """Records that were dropped before they were exported: how many, and of which chains."""
    names = sorted(lost)
    facts: dict[str, Json] = {
        "message": f"{missing} records were dropped before they were exported",
        "records": missing,
        "after": after,
        "before": before,
        "chains": {name: lost[name] for name in names[:_NAMED]},
        "more": max(0, len(names) - _NAMED),
    }
    if not lost:
        facts["message"] = f"{missing} records are not there, and the journal does not say why"
    return statement(GAP, before - 1, at, facts)
