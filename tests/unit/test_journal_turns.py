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
from dsec.stores.ledger import Ledger
from dsec.stores.memory import Memory
from dsec.stores.writer import Writer

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
