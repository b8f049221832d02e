"""What a command pays for being recorded: its intent and its result.

``process``: appended as the engine does, one command after the other. ``disk``: each append waits for the disk, together with others, while other
commands go on. What a command pays for that is how much longer ``/bin/true`` takes thirty-two clients at once, in engines in this process, in turns:
the difference, and the share that it has in ``process``. Beside it, appends of as many clients with nothing between them. ``--directory`` chooses the
file system.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import uvloop

from benchmarks.common import TRUE, Findings, Script, main, warm_up
from benchmarks.figures import NS_PER_MS, milliseconds, quantile
from dsec import Limits
from dsec.client import aio
from dsec.model.ids import new_exec_id, new_sandbox_id
from dsec.model.journal import Draft, Json, Phase
from dsec.stores.journal import SqliteStore
from dsec.stores.schema import Durability
from dsec.wiring.engines import open_engine
from dsec.wiring.settings import Settings

BLOCK: Final = 4  # commands of each client, before it is the other engine's turn
SMALL: Final = Limits(memory_mib=64, disk_mib=16, pids=32)
AT_ONCE: Final = 32


async def _command(store: SqliteStore, chain: str, times: list[int]) -> None:
    ref = new_exec_id()
    asked: dict[str, Json] = {"argv": ["/bin/true"], "cwd": "/workspace", "uid": 1000, "timeout": 10.0}
    told: dict[str, Json] = {
        "outcome": "ok",
        "exit_code": 0,
        "wall": 0.001,
        "stdout_bytes": 0,
        "stderr_bytes": 0,
    }
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


@asynccontextmanager
async def _clients(home: Path, durability: Durability) -> AsyncIterator[Sequence[aio.AsyncSandbox]]:
    """An engine, and a sandbox for each client."""
    settings = Settings(home=home, durability=durability, pool=0)
    async with aio.AsyncDsec(lambda: open_engine(settings)) as dsec:
        made = [await dsec.sandboxes.create(limits=SMALL) for _ in range(AT_ONCE)]
        yield made
        for sandbox in made:
            await sandbox.destroy()


async def _block(sandboxes: Sequence[aio.AsyncSandbox], times: list[int]) -> None:
    """So many commands of each client."""

    async def client(sandbox: aio.AsyncSandbox) -> None:
        for _ in range(BLOCK):
            begun = perf_counter_ns()
            await sandbox.exec(TRUE)
            times.append(perf_counter_ns() - begun)

    await asyncio.gather(*map(client, sandboxes))


async def _real(home: Path, n: int) -> dict[Durability, list[int]]:
    """Nanoseconds of ``n`` commands or a few more, of all clients at once, for each durability in turn."""
    times: dict[Durability, list[int]] = {"process": [], "disk": []}
    async with _clients(home / "a", "process") as light, _clients(home / "b", "disk") as heavy:
        for sandboxes in (light, heavy):
            await _block(sandboxes, [])
        while len(times["disk"]) < n:
            await _block(light, times["process"])
            await _block(heavy, times["disk"])
    return times


def measure(options: argparse.Namespace) -> Findings:
    """Both durabilities."""
    with (
        tempfile.TemporaryDirectory(prefix="dsec-bench-", dir=options.directory) as home,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        one = runner.run(_commands(Path(home) / "process", "process", options.n, 1))
        many = runner.run(_commands(Path(home) / "disk", "disk", options.n, AT_ONCE))
        real = runner.run(_real(Path(home), options.n))
    process = quantile(one, 0.5)
    return Findings(
        samples=options.n,
        series=(
            milliseconds("intent and result, process, one after the other", one),
            milliseconds(f"intent and result, disk, {AT_ONCE} at once", many),
            milliseconds(f"/bin/true, {AT_ONCE} at once, process", real["process"]),
            milliseconds(f"/bin/true, {AT_ONCE} at once, disk", real["disk"]),
        ),
        figures={
            "process_p50_ms": process / NS_PER_MS,
            "disk_p50_ms": (quantile(real["disk"], 0.5) - quantile(real["process"], 0.5) + process)
            / NS_PER_MS,
            "disk_appends_p50_ms": quantile(many, 0.5) / NS_PER_MS,
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
