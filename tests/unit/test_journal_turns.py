"""Whoever waits for the journal's connection has it next, however many jobs come after."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dsec.stores import schema
from dsec.stores.chain import Prepared, prepare
from dsec.stores.ledger import Ledger
from dsec.stores.memory import Memory
from dsec.stores.writer import Writer
from dsec.testing.contracts.journal import note

pytestmark = pytest.mark.anyio


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    schema.create(tmp_path / schema.DATABASE)
    with closing(schema.connect(tmp_path / schema.DATABASE)) as db:
        ledger = Ledger(db, time.time)
        ledger.recover()
        writer = Writer(db, ledger, Memory(db), inline=False)
        yield writer
        writer.close()


async def test_a_queue_that_is_never_empty_keeps_nobody_out(writer: Writer) -> None:
    turns: list[str] = []
    begun = threading.Event()

    def keeper() -> None:
        begun.wait(10)
        with writer.alone():
            turns.append("keeper")

    def job(rounds: int) -> None:
        begun.set()
        deadline = time.monotonic() + 10
        while not waits() and time.monotonic() < deadline:
            pass
        turns.append("job")
        if rounds:
            loop.call_soon_threadsafe(more, rounds - 1)
            while rounds not in asked:  # the next one is in the queue before this one ends
                pass

    def waits() -> bool:
        return writer._turn.locked() or "keeper" in turns

    def more(rounds: int) -> None:
        tasks.append(asyncio.ensure_future(writer.run(lambda: job(rounds))))
        loop.call_soon(asked.add, rounds + 1)

    loop, asked = asyncio.get_running_loop(), set[int]()
    thread = threading.Thread(target=keeper)
    thread.start()
    tasks = [asyncio.ensure_future(writer.run(lambda: job(5)))]
    for task in tasks:  # grows meanwhile
        await task
    thread.join()
    assert turns == ["job", "keeper", "job", "job", "job", "job", "job"]


def record(n: int) -> Prepared:
    return prepare(note(f"chain-{n % 3}", n=n))


async def test_records_that_wait_together_are_stored_by_few_statements(writer: Writer) -> None:
    for n in range(3):
        await writer.append(record(n))  # their heads are known from now on
    held, statements = threading.Event(), list[str]()
    with writer.alone() as db:
        db.set_trace_callback(statements.append)
    first = asyncio.ensure_future(writer.run(lambda: held.wait(10)))
    rest = [asyncio.ensure_future(writer.append(record(n))) for n in range(3, 203)]
    asyncio.get_running_loop().call_soon(held.set)
    await first
    heads = await asyncio.gather(*rest)
    assert [head.seq for head in heads] == [n // 3 + 1 for n in range(3, 203)]
    stored = [text for text in statements if text.startswith("INSERT INTO record")]
    assert len(stored) <= 2 * len(format(200, "b"))
    with writer.alone() as db:
        db.set_trace_callback(None)
        rows = db.execute("SELECT seq, position FROM record WHERE chain = 1 ORDER BY id").fetchall()
    assert [seq for seq, _ in rows] == list(range(1, 69))
    assert [position for _, position in rows] == list(range(1, 203, 3))
