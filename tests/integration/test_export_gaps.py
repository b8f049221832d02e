"""Journals that drop what was not exported: SQLite and PostgreSQL say alike how much is missing, and of which chains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsec.control.exporting import Exporter, Source, Task
from dsec.errors import Conflict
from dsec.model.sandbox import State
from dsec.observe.events import Origin
from dsec.observe.formats import FORMATS
from dsec.observe.sink import Line, Sink
from dsec.stores.journal import SqliteStore
from dsec.stores.keeper import Pace
from dsec.stores.postgres.store import PostgresStore
from dsec.stores.postgres.tailing import PostgresTail
from dsec.stores.tailing import JournalTail
from dsec.testing.contracts.journal import note, sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
PACE = Pace(records=5, seconds=0.05, keep_bytes=1)


class Kept(Sink):
    """Takes everything."""

    def __init__(self) -> None:
        self.taken: list[dict[str, object]] = []

    async def send(self, lines: Sequence[Line]) -> None:
        self.taken += [json.loads(line.data) for line in lines]

    async def close(self) -> None:
        return


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def opened(kind: str, url: str, home: Path, pace: Pace) -> SqliteStore | PostgresStore:
    key = home / "keys" / "journal.key"
    if kind == "sqlite":
        return await SqliteStore.open(home / "state", key=key, engine_id="en-test", pace=pace)
    return await PostgresStore.open(url, home / "state", key=key, engine_id="en-test", pace=pace)


async def test_what_was_dropped_is_told(kind: str, postgres_url: str, tmp_path: Path) -> None:
    def source() -> Source:
        return JournalTail(tmp_path / "state") if kind == "sqlite" else PostgresTail(postgres_url)

    store = await opened(kind, postgres_url, tmp_path, Pace(records=10**9, seconds=3600.0))
    old = [replace(sandbox(state=State.GONE), ended_at=1.0) for _ in range(3)]
    for one in old:
        await store.add(one, note(one.id))
        await store.append(*[note(one.id, n=n) for n in range(4)])
        with pytest.raises(Conflict):  # a job that fails takes no position
            await store.add(one, note(one.id))
        await store.append(note(n=1))
    whole = Kept()
    await Exporter(_task(), source, whole).run()
    assert [one["position"] for one in whole.taken] == list(range(1, 19))
    await store.close()
    store = await opened(kind, postgres_url, tmp_path, PACE)
    await store.append(note(n=2))
    await _dropped(store, old[-1].id)
    await store.close()
    rest = Kept()
    await Exporter(_task(), source, rest).run()
    gaps = [one["payload"] for one in rest.taken if one["act"] == "export.gap"]
    assert [(gap["records"], gap["chains"]) for gap in gaps] == [(5, {one.id: 5}) for one in old]  # type: ignore[index]
    assert {one["id"] for one in whole.taken if one["chain"] == "engine"} <= {one["id"] for one in rest.taken}
    alone = Kept()
    await Exporter(_task(chain=old[0].id), source, alone).run()
    assert [event["payload"]["records"] for event in alone.taken] == [5]  # type: ignore[index]


def _task(chain: str = "") -> Task:
    return Task(form=FORMATS["jsonl"], origin=Origin(host="h", version="1"), chain=chain)


async def _dropped(store: SqliteStore | PostgresStore, chain: str) -> None:
    async with asyncio.timeout(60):
        while await store.read(chain):
            await store.append(note(n=3))
            await asyncio.sleep(0.02)
