"""Requests that must not be done twice, by project and key."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, bindparam, delete, func, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from dsec.errors import Busy, Conflict, TooLarge
from dsec.ports.idempotency import Begun, IdempotencyStore, Recorded
from dsec.stores.control.database import Database
from dsec.stores.control.tables import CALL

MOST_BODY: Final = 8 * 2**20  # bytes of an answer
MOST_CALLS: Final = 2_000_000
"""That are remembered; a day's worth is forgotten by the sweep."""


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
        self._count: int | None = None

    async def begin(self, project: str, key: str, request: str) -> Begun:
        if self._count is None:
            self._count = await self._database.run(_count)
        if self._count >= MOST_CALLS:
            raise Busy(
                f"{MOST_CALLS} idempotency keys are remembered, the most there may be",
                hint="they are forgotten after a day; leave the key out where it is not needed",
                retry_after=60,
            )
        at = self._clock()
        found = await self._database.run(lambda connection: _begin(connection, project, key, request, at))
        self._count += found.fresh
        return found

    async def finish(self, project: str, key: str, answer: Recorded) -> None:
        if len(answer.body) > MOST_BODY:
            raise TooLarge(
                f"an answer of {len(answer.body):,} bytes is not remembered: {MOST_BODY:,} are the most",
                size=len(answer.body),
                limit=MOST_BODY,
            )
        values = {"status": answer.status, "media": answer.media_type, "answer": answer.body}
        given = {"of_project": project, "of_key": key, **values}
        await self._database.run(lambda connection: connection.execute(_FINISH, given).rowcount)

    async def forget(self, project: str, key: str) -> None:
        given = {"of_project": project, "of_key": key}
        self._dropped(
            await self._database.run(lambda connection: connection.execute(_FORGET, given).rowcount)
        )

    async def sweep(self, before: float, limit: int) -> int:
        dropped = await self._database.run(lambda connection: _sweep(connection, before, limit))
        self._dropped(dropped)
        return dropped

    def _dropped(self, count: int) -> None:
        if self._count is not None:
            self._count -= count


def _count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(CALL)).scalar_one()


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


def _sweep(connection: Connection, before: float, limit: int) -> int:
    old = select(CALL.c.project, CALL.c.key).where(CALL.c.created < before).limit(limit)
    return connection.execute(delete(CALL).where(tuple_(CALL.c.project, CALL.c.key).in_(old))).rowcount
