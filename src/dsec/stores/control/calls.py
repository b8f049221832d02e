"""Requests that must not be done twice, by project and key."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, func, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from dsec.errors import Busy, Conflict, RuntimeUnavailable, TooLarge
from dsec.ports.idempotency import Begun, IdempotencyStore, Recorded
from dsec.stores.control.database import Database, Work
from dsec.stores.control.tables import CALL

T = TypeVar("T")

MOST_BODY: Final = 8 * 2**20  # bytes of an answer
MOST_CALLS: Final = 2_000_000
MOST_BYTES: Final = 2**30  # of all answers
MOST_OF_PROJECT: Final = 2**28  # of those of one project
MOST_CALLS_OF_PROJECT: Final = MOST_CALLS // 2
YOUNG: Final = 600.0
"""Seconds for which every request is known. Where there are too many, older ones that were answered are forgotten before their day is over."""
_AT_ONCE: Final = 5000
_PATIENCE: Final = 5.0  # seconds between two looks for old ones, where there were none


# Made once: to put a statement together takes longer than to run it.
_NAMED: Final = (CALL.c.project == bindparam("of_project"), CALL.c.key == bindparam("of_key"))
_FIND: Final = select(CALL).where(*_NAMED)
_FINISH: Final = update(CALL).where(*_NAMED, CALL.c.status == 0)
_FORGET: Final = delete(CALL).where(*_NAMED, CALL.c.status == 0)
_BEGIN: Final = {
    "sqlite": sqlite.insert(CALL).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(CALL).on_conflict_do_nothing(),
}


class Calls(IdempotencyStore):
    """In the control database. Args: clock: seconds since the epoch."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._count = self._size = 0  # of all, and bytes of their answers
        self._counts: Counter[str] = Counter()  # likewise, by project
        self._sizes: Counter[str] = Counter()
        self._counted = False
        self._counting = asyncio.Lock()
        self._looked: dict[str, float] = {}  # when nothing was found that could be forgotten, by project

    async def begin(self, project: str, key: str, request: str) -> Begun:
        await self._make_room(project)
        at = self._clock()
        found = await self._run(lambda connection: _begin(connection, project, key, request, at))
        if found.fresh:
            self._add([(project, 1, 0)])
        return found

    async def finish(self, project: str, key: str, answer: Recorded) -> None:
        size = len(answer.body)
        if size > MOST_BODY:
            raise TooLarge(
                f"an answer of {size:,} bytes is not remembered: {MOST_BODY:,} are the most",
                size=size,
                limit=MOST_BODY,
            )
        values = {"status": answer.status, "media": answer.media_type, "answer": answer.body}
        given = {"of_project": project, "of_key": key, **values}
        if await self._run(lambda connection: connection.execute(_FINISH, given).rowcount):
            self._add([(project, 0, size)])

    async def forget(self, project: str, key: str) -> None:
        given = {"of_project": project, "of_key": key}
        if await self._run(lambda connection: connection.execute(_FORGET, given).rowcount):
            self._add([(project, -1, 0)])

    async def sweep(self, before: float, limit: int) -> int:
        return await self._drop(CALL.c.created < before, limit)

    async def _run(self, work: Work[T]) -> T:
        """As :meth:`Database.run`; whether something was done may not be known: then all is counted again, before the next one."""
        try:
            return await self._database.run(work)
        except RuntimeUnavailable:
            self._counted = False
            raise

    # Room

    async def _make_room(self, project: str) -> None:
        """Forget old ones where there are too many.  Raises: Busy: all of them are young."""
        if not self._counted:
            await self._know()
        if self._has_its_share(project):
            await self._forget_old(project)
        if self._count >= MOST_CALLS or self._size >= MOST_BYTES:
            await self._forget_old("")
        if self._count >= MOST_CALLS or self._has_its_share(project):
            raise Busy(
                f"too many requests with idempotency keys were answered in the last {YOUNG:g} seconds to remember more",
                hint="try again later; leave the key out where it is not needed",
                retry_after=60,
            )

    def _has_its_share(self, project: str) -> bool:
        """What was begun and never answered is not forgotten before its day is over: one project must not keep all others out by that."""
        return self._counts[project] >= MOST_CALLS_OF_PROJECT or self._sizes[project] >= MOST_OF_PROJECT

    async def _know(self) -> None:
        """Count what there is, once."""
        async with self._counting:
            if not self._counted:
                held = await self._database.run(_held)
                self._count = self._size = 0
                self._counts.clear()
                self._sizes.clear()
                self._add(held)
                self._counted = True

    async def _forget_old(self, project: str) -> None:
        """Of one project, "" = of all: the oldest that were answered."""
        now = self._clock()
        if abs(now - self._looked.get(project, 0.0)) < _PATIENCE:
            return
        # By age: there are few of the others before the oldest of a project that has very many.
        own = (func.coalesce(CALL.c.project, "") == project,) if project else ()
        if await self._drop(and_(CALL.c.created < now - YOUNG, CALL.c.status != 0, *own), _AT_ONCE):
            self._looked.pop(project, None)
        else:
            self._looked[project] = now

    async def _drop(self, old: ColumnElement[bool], limit: int) -> int:
        dropped = await self._run(lambda connection: _drop(connection, old, limit))
        if self._counted:
            self._add([(project, -1, -size) for project, size in dropped])
        return len(dropped)

    def _add(self, changes: Iterable[tuple[str, int, int]]) -> None:
        """Projects, with so many requests and bytes more."""
        for project, count, size in changes:
            self._count += count
            self._size += size
            for each, more in ((self._counts, count), (self._sizes, size)):
                each[project] += more
                if not each[project]:
                    del each[project]


def _held(connection: Connection) -> list[tuple[str, int, int]]:
    """By project, how many requests and bytes of answers."""
    size = func.coalesce(func.sum(func.length(CALL.c.answer)), 0)
    asked = select(CALL.c.project, func.count(), size).group_by(CALL.c.project)
    return [(str(project), int(count), int(size)) for project, count, size in connection.execute(asked)]


def _begin(connection: Connection, project: str, key: str, request: str, at: float) -> Begun:
    """Raises: Conflict."""
    values = {
        "project": project,
        "key": key,
        "request": request,
        "status": 0,
        "media": "",
        "answer": b"",
        "created": at,
    }
    if connection.execute(_BEGIN[connection.dialect.name], values).rowcount == 1:
        return Begun(at=at, fresh=True)
    row = connection.execute(_FIND, {"of_project": project, "of_key": key}).mappings().one()
    if row["request"] != request:
        raise Conflict(
            "this Idempotency-Key came with another request before",
            hint="a key for each request; the same key only to ask the same again",
        )
    answer = None
    if row["status"]:
        answer = Recorded(status=int(row["status"]), media_type=row["media"], body=bytes(row["answer"]))
    return Begun(at=float(row["created"]), fresh=False, answer=answer)


def _drop(connection: Connection, old: ColumnElement[bool], limit: int) -> list[tuple[str, int]]:
    """The oldest of those; their projects, with the bytes of their answers."""
    those = select(CALL.c.project, CALL.c.key).where(old).order_by(CALL.c.created).limit(limit)
    gone = delete(CALL).where(tuple_(CALL.c.project, CALL.c.key).in_(those))
    rows = connection.execute(gone.returning(CALL.c.project, func.length(CALL.c.answer)))
    return [(str(project), int(size)) for project, size in rows]
