"""What a command pays for being recorded: its intent and its result, appended as the engine does.

``process`` one command after the other, ``disk`` thirty-two at once (each append waits for the disk, together with others). ``--directory``
chooses the file system.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import uvloop

from benchmarks.common import Findings, Script, main, warm_up
from benchmarks.figures import NS_PER_MS, milliseconds, quantile
from dsec.model.ids import new_exec_id, new_sandbox_id
from dsec.model.journal import Draft, Phase
from dsec.stores.journal import SqliteStore
from dsec.stores.schema import Durability

AT_ONCE: Final = 32


async def _command(store: SqliteStore, chain: str, times: list[int]) -> None:
    ref = new_exec_id()
    asked = {"argv": ["/bin/true"], "cwd": "/workspace", "uid": 1000, "timeout": 10.0}
    told = {"outcome": "ok", "exit_code": 0, "wall": 0.001, "stdout_bytes": 0, "stderr_bytes": 0}
    begun = perf_counter_ns()
    await store.append(Draft(chain=chain, act="exec", phase=Phase.INTENT, ref=ref, payload=asked))
    between = perf_counter_ns()
    await asyncio.sleep(0)  # where the command would run
    again = perf_counter_ns()
    await store.append(Draft(chain=chain, act="exec", phase=Phase.RESULT, ref=ref, payload=told))
    times.append(perf_counter_ns() - again + between - begun)


async def _commands(place: Path, durability: Durability, n: int, at_once: int) -> list[int]:
    store = await SqliteStore.open(place, key=place / "key", engine_id="en-bench", durability=durability)
    times: list[int] = []
    left = iter(range(n + warm_up(n)))

    async def client() -> None:
        chain = new_sandbox_id()
        for _ in left:
            await _command(store, chain, times)

    await asyncio.gather(*(client() for _ in range(at_once)))
    await store.close()
    return times[warm_up(n) :]


def measure(options: argparse.Namespace) -> Findings:
    """Both durabilities."""
    with (
        tempfile.TemporaryDirectory(prefix="dsec-bench-", dir=options.directory) as home,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        one = runner.run(_commands(Path(home) / "process", "process", options.n, 1))
        many = runner.run(_commands(Path(home) / "disk", "disk", options.n, AT_ONCE))
    return Findings(
        samples=options.n,
        series=(
            milliseconds("intent and result, process, one after the other", one),
            milliseconds(f"intent and result, disk, {AT_ONCE} at once", many),
        ),
        figures={
            "process_p50_ms": quantile(one, 0.5) / NS_PER_MS,
            "disk_p50_ms": quantile(many, 0.5) / NS_PER_MS,
        },
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", help="where the journals are made")


SCRIPT = Script(
    name="journal_share",
    claim="being recorded costs a command next to nothing",
    n=4000,
    measure=measure,
    options=_options,
)

if __name__ == "__main__":
    main(SCRIPT)
