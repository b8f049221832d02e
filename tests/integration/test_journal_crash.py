"""A writer that is killed: every record that it acknowledged is there, and the chains are sound."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from dsec.model.ids import SandboxId
from dsec.model.journal import Finding, Phase
from dsec.model.sandbox import State
from dsec.stores.journal import SqliteStore
from dsec.stores.parts import verify_directory
from dsec.testing.contracts.journal import note

pytestmark = pytest.mark.anyio

WRITER = """
import asyncio, os, sys
from dataclasses import replace
from pathlib import Path
from dsec.model.ids import new_exec_id, new_sandbox_id
from dsec.model.journal import Draft, Phase
from dsec.model.sandbox import State
from dsec.stores.journal import SqliteStore
from dsec.stores.keeper import Pace
from dsec.testing.contracts.journal import act, note, sandbox

home, durability, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def acknowledge(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

async def work(store):
    info = sandbox()
    await store.add(info, note(info.id))
    acknowledge("add", info.id)
    await store.move(info.id, seen=State.PENDING, to=State.RUNNING, draft=note(info.id))
    acknowledge("running", info.id)
    while True:
        one = new_exec_id()
        record, = await store.append(act(Phase.INTENT, one, chain=info.id))
        acknowledge("started", info.id, one, record.seq, record.digest)
        record, = await store.append(replace(act(Phase.RESULT, one, chain=info.id), payload={"text": "x" * 500}))
        acknowledge("ended", info.id, one, record.seq, record.digest)
        await asyncio.sleep(0)

async def main():
    pace = Pace(records=50, seconds=0.05, wal_bytes=2**18)  # signing and shortening go on all the time
    store = await SqliteStore.open(home / "s", key=home / "key", engine_id="en-x", durability=durability, pace=pace)
    acknowledge("open")
    await asyncio.gather(*(work(store) for _ in range(workers)))

asyncio.run(main())
"""


def killed_writer(home: Path, durability: str, workers: int, seconds: float) -> list[list[str]]:
    """Run a writer, kill it after ``seconds`` of writing, and return what it acknowledged."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(home), durability, str(workers)], stdout=subprocess.PIPE
    )
    out = b""
    try:
        assert process.stdout is not None
        end = 0.0
        while not end or time.monotonic() < end:
            if select.select([process.stdout], [], [], 0.01 if end else 30.0)[0]:
                out += os.read(process.stdout.fileno(), 65536)
                end = end or time.monotonic() + seconds
            assert process.poll() is None, "the writer ended by itself"
    finally:
        process.send_signal(signal.SIGKILL)
        out += process.communicate()[0]
    return [line.split() for line in out.decode().split("\n")[:-1]]


async def verified(home: Path) -> tuple[Finding, ...]:
    return await anyio.to_thread.run_sync(lambda: verify_directory(home / "s", key=home / "key"))


@pytest.mark.parametrize(("durability", "workers"), [("process", 1), ("process", 8), ("disk", 8)])
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, durability: str, workers: int) -> None:
    chance = random.Random(workers)
    lines: list[list[str]] = []
    for _ in range(4):
        seconds = chance.uniform(0.0, 0.4)
        lines += killed_writer(tmp_path, durability, workers, seconds)
        assert await verified(tmp_path) == ()
    assert sum(line[0] == "ended" for line in lines) > 10
    store = await SqliteStore.open(tmp_path / "s", key=tmp_path / "key", engine_id="en-y")
    await _check(store, lines)
    # Positive control: the same look fails for one acknowledged record that is not there.
    gone = next(line for line in lines if line[0] == "ended")
    with pytest.raises(AssertionError):
        await _check(store, [[*gone[:3], "999999", gone[4]]])
    await store.append(note())
    assert await store.verify() == ()
    await store.close()
    assert await verified(tmp_path) == ()


async def _check(store: SqliteStore, lines: list[list[str]]) -> None:
    ended = {line[2] for line in lines if line[0] == "ended"}
    for word, *rest in lines:
        if word == "open":
            continue
        home = SandboxId(rest[0])
        if word in ("add", "running"):
            assert (await store.get(home)).state in ((State.RUNNING,) if word == "running" else State)
            continue
        seq, digest = int(rest[2]), rest[3]
        found = await store.read(home, after=seq - 1, limit=1)
        assert [record.digest for record in found] == [digest]
        if word == "started" and rest[1] not in ended:
            # Its result may have been stored just before the kill, and never told.
            stored = await store.latest(home, "exec", ref=rest[1])
            is_open = rest[1] in [found.ref for found in await store.unanswered(home)]
            assert [record.phase for record in stored] in ([Phase.INTENT], [Phase.RESULT, Phase.INTENT])
            assert is_open == (len(stored) == 1)
