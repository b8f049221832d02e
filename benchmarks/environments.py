"""Very many environments of a hundred tenants behind one server, nearly all of them cold: recording them, looking, listing, waking, starting anew.

``dsec serve`` is a process of its own; everything is asked for over loopback HTTP with the SDK. ``--live`` of them run meanwhile. The server is
stopped and started again at the end; its memory is that of its own process, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, Final, cast

import uvloop

from benchmarks.common import TRUE, Findings, Script, main
from benchmarks.figures import NS_PER_MS, milliseconds, quantile
from benchmarks.served import answers, free_port, new_key, share_images
from dsec import AsyncDsec, Limits
from dsec.client import aio
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.model.journal import Draft, Phase
from dsec.model.sandbox import State
from dsec.node.clock import SystemClock
from dsec.node.drafts import recorded
from dsec.node.janitor import Janitor
from dsec.node.reaper import Reaper
from dsec.stores.journal import SqliteStore
from dsec.stores.postgres.store import PostgresStore

PROJECTS: Final = 100
BATCH: Final = 1000
AT_ONCE: Final = 4
LOOKS: Final = 2000
PAGES: Final = 300
WOKEN: Final = 200
DUE: Final = 1000
TTL: Final = 30 * 86400.0
SMALL: Final = Limits(memory_mib=64, disk_mib=16, pids=32)


class Server:
    """One that can be stopped and started again over the same home."""

    def __init__(self, home: str, database: str) -> None:
        self.home = Path(home)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {**os.environ, "DSEC_HOME": home}
        self._log = Path(home) / "serve.out"
        self._command = [sys.executable, "-m", "dsec", "serve", "--port", str(self.port), "--pool", "0"]
        if database:
            self._environment["DSEC_DATABASE"] = database

    def start(self) -> float:
        """Seconds until it answers."""
        begun = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
        answers(self.url, self.process, self._log)
        return time.monotonic() - begun

    def key(self) -> str:
        """Of scope admin."""
        return new_key(self._environment)

    def mib(self) -> float:
        """Resident memory of its process, now."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("the server has ended")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


@contextmanager
def _home(directory: str | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir=directory) as home:
        share_images(home)
        yield home


async def _record(dsec: aio.AsyncDsec, count: int) -> tuple[list[SandboxId], float]:
    """``count`` cold ones, in batches of some clients at once, evenly over the projects; a sample of their ids, and how many a second."""
    numbers = iter(range(0, count, BATCH))
    sample: list[SandboxId] = []

    async def client() -> None:
        for start in numbers:
            ids = await dsec.sandboxes.create_many(
                count=min(BATCH, count - start),
                limits=SMALL,
                labels={"batch": str(start)},
                ttl=TTL,
                project=f"tenant-{start // BATCH % PROJECTS}",
            )
            sample.extend(random.sample(ids, min(20, len(ids))))

    begun = time.monotonic()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return sample, count / (time.monotonic() - begun)


async def _live(dsec: aio.AsyncDsec, count: int) -> list[aio.AsyncSandbox]:
    made: list[aio.AsyncSandbox] = []
    left = iter(range(count))

    async def client() -> None:
        made.extend(
            [
                await dsec.sandboxes.create(
                    limits=SMALL, project=f"tenant-{number % PROJECTS}", hibernate="never"
                )
                for number in left
            ]
        )

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return made


async def _looks(dsec: aio.AsyncDsec, sample: list[SandboxId]) -> list[int]:
    times = []
    for _ in range(LOOKS):
        chosen = random.choice(sample)
        begun = perf_counter_ns()
        await dsec.sandboxes.get(chosen)
        times.append(perf_counter_ns() - begun)
    return times


async def _pages(dsec: aio.AsyncDsec) -> list[int]:
    """Pages of one tenant after the other, from anywhere in its list."""
    times: list[int] = []
    after = ""
    for number in range(PAGES):
        begun = perf_counter_ns()
        page = await dsec._link.services.sandboxes.page(
            project=f"tenant-{number // 3 % PROJECTS}", after=after, limit=100
        )
        times.append(perf_counter_ns() - begun)
        after = page.next if number % 3 != 2 else ""
    return times


async def _wake(dsec: aio.AsyncDsec, sample: list[SandboxId]) -> list[int]:
    times = []
    for chosen in random.sample(sample, min(WOKEN, len(sample))):
        sandbox = await dsec.sandboxes.get(chosen)
        begun = perf_counter_ns()
        result = await sandbox.exec(TRUE)
        times.append(perf_counter_ns() - begun)
        if result.exit_code:
            raise RuntimeError(f"{chosen}: exit code {result.exit_code}")
        await sandbox.destroy()
    return times


async def _sweep(home: Path, database: str) -> float:
    """Seconds of a sweep of the reaper over the records of a server that was stopped, which finds that the time of so many is up."""
    state = home / "engine"
    key = state / "keys" / "journal.key"
    directory = state / "journal"
    store: SqliteStore | PostgresStore
    if database:
        store = await PostgresStore.open(database, directory, key=key, engine_id="en-bench")
    else:
        store = await SqliteStore.open(directory, key=key, engine_id="en-bench")
    clock = SystemClock()
    now = clock.now()
    cold = (await store.page(states=[State.COLD], limit=DUE)).items
    due = [
        replace(info, id=new_sandbox_id(), created_boot=now.boot - TTL, expires_at=now.wall) for info in cold
    ]
    await store.add_many(due, recorded(due))

    async def end(sandbox: SandboxId, reason: str) -> None:
        draft = Draft(chain=sandbox, act="sandbox.destroy", phase=Phase.RESULT, payload={"reason": reason})
        await store.move(sandbox, seen=State.COLD, to=State.GONE, draft=draft)

    kit: Any = SimpleNamespace(clock=clock, sandboxes=store)
    begun = time.monotonic()
    ended = await Reaper(kit, end, cast("Janitor", None)).sweep()
    took = time.monotonic() - begun
    await store.close()
    if ended != len(due):
        raise RuntimeError(f"{ended} of {len(due)} were ended")
    return took


async def _measured(
    server: Server, key: str, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[int]]]:
    async with AsyncDsec(server.url, api_key=key) as dsec:
        sample, rate = await _record(dsec, options.n)
        live = await _live(dsec, options.live)
        times = {"get": await _looks(dsec, sample), "a page of 100": await _pages(dsec)}
        times["first command in a cold one"] = await _wake(dsec, list(dict.fromkeys(sample)))
        memory = server.mib()
        await asyncio.to_thread(server.stop)
        sweep = await _sweep(server.home, options.database)
        restart = await asyncio.to_thread(server.start)
        again = await _looks(dsec, [one.id for one in live] or sample)
        after = server.mib()
        for one in live:
            await one.destroy()
    figures = {
        "create_per_s": rate,
        "get_p99_ms": quantile(times["get"], 0.99) / NS_PER_MS,
        "page_p99_ms": quantile(times["a page of 100"], 0.99) / NS_PER_MS,
        "wake_p50_ms": quantile(times["first command in a cold one"], 0.5) / NS_PER_MS,
        "restart_s": restart,
        "sweep_s": sweep,
        "server_mib": max(memory, after),
        "live": float(options.live),
        "environments": float(options.n),
    }
    times["get of a live one, after the restart"] = again
    return figures, times


def measure(options: argparse.Namespace) -> Findings:
    """All of it, once."""
    with _home(options.directory) as home:
        server = Server(home, options.database)
        server.start()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                figures, times = runner.run(_measured(server, server.key(), options))
        finally:
            server.stop()
    return Findings(
        samples=options.n,
        series=tuple(milliseconds(what, each) for what, each in times.items()),
        figures=figures,
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--live", type=int, default=1000, help="that run meanwhile")
    parser.add_argument("--database", default="", help="a URL of PostgreSQL; else SQLite")
    parser.add_argument("--directory", help="where the home is made")


SCRIPT = Script(
    name="environments",
    claim="environments that nobody uses cost next to nothing",
    n=300_000,
    n_help="environments that are recorded",
    measure=measure,
    options=_options,
)

if __name__ == "__main__":
    main(SCRIPT)
