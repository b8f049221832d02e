"""What the table of sandboxes and the journal cost when there are millions: adding them, looking, and opening again.

``python -m benchmarks.records [--n 300000] [--database postgresql://…] [--directory DIR] [--json]``: environments of 100 projects, nearly all
cold, the last 1,000 running; figures, and beside each the bar that it is to keep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from dsec.errors import UnknownOutcome
from dsec.model.ids import SandboxId, new_exec_id, new_sandbox_id, new_session_id
from dsec.model.sandbox import Flag, SandboxInfo, SandboxSpec, State
from dsec.node.drafts import created, exec_failure
from dsec.stores.journal import SqliteStore
from dsec.stores.postgres.store import PostgresStore

PROJECTS = 100
LIVE = 1000
BATCH = 1000
BARS = {
    "add_per_second": (">=", 3000),
    "get_p99_ms": ("<=", 10),
    "page_p99_ms": ("<=", 30),
    "sweep_s": ("<=", 2),
    "open_s": ("<=", 10),
    "rss_mb": ("<=", 500),
}


@dataclass
class Figures:
    """By name, in the unit that the name says."""

    values: dict[str, float] = field(default_factory=dict)

    def put(self, name: str, value: float) -> None:
        sign, bar = BARS.get(name, ("", 0.0))
        self.values[name] = value
        print(f"{name:32} {value:14,.3f}  {sign} {bar if sign else ''}", flush=True)

    def spread(self, name: str, times: list[float]) -> None:
        times.sort()
        for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            at = min(int(len(times) * share), len(times) - 1)
            self.put(f"{name}_{label}_ms", times[at] * 1e3)


def environment(n: int, state: State, specs: list[SandboxSpec]) -> SandboxInfo:
    """One of many that were asked to be the same, but for their project."""
    now = time.time()
    return SandboxInfo(
        id=new_sandbox_id(),
        state=state,
        spec=specs[n % PROJECTS],
        flags=frozenset({Flag.PTY, Flag.VOLUMES, Flag.LAYERS, Flag.PAUSE, Flag.SNAPSHOTS}),
        created_at=now,
        expires_at=now + 3600 + n / 1000 if n % 10 else 0.0,
        session_id=new_session_id(),
        workdir="/workspace",
        boot_id="b3c1",
        created_boot=n / 1000,
    )


def specs() -> list[SandboxSpec]:
    """Of the projects."""
    labels = MappingProxyType({"team": "agents", "purpose": "measurement"})
    digest = "sha256:" + "a" * 64
    return [
        SandboxSpec(base_digest=digest, project=f"project-{n}", labels=labels, ttl=3600.0)
        for n in range(PROJECTS)
    ]


async def fill(
    store: SqliteStore | PostgresStore, count: int, state: State, seen: list[SandboxId]
) -> list[float]:
    """Add so many; seconds of each batch."""
    made, times = specs(), []
    for start in range(0, count, BATCH):
        infos = [environment(n, state, made) for n in range(start, min(start + BATCH, count))]
        drafts = [created(info) for info in infos]
        begun = time.perf_counter()
        await store.add_many(infos, drafts)
        times.append(time.perf_counter() - begun)
        seen += [info.id for info in infos[:: max(len(infos) // 20, 1)]]
    return times


async def timed(times: int, act: Callable[[], Awaitable[object]]) -> list[float]:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        await act()
        found.append(time.perf_counter() - begun)
    return found


async def look(store: SqliteStore | PostgresStore, figures: Figures, seen: list[SandboxId]) -> None:
    """The reads that people and the reaper make."""
    chance = random.Random(1)
    figures.spread("get", await timed(3000, lambda: store.get(chance.choice(seen))))
    places = [str(chance.randrange(1, len(seen) * 50 + 1)) for _ in range(300)]
    figures.spread("page", await timed(300, lambda: store.page(after=places.pop())))
    figures.spread(
        "page_project", await timed(300, lambda: store.page(project=f"project-{chance.randrange(PROJECTS)}"))
    )
    figures.spread(
        "page_1000",
        await timed(50, lambda: store.page(project=f"project-{chance.randrange(PROJECTS)}", limit=1000)),
    )
    figures.spread("page_running", await timed(100, lambda: store.page(states=[State.RUNNING])))
    figures.spread("list_live", await timed(5, lambda: store.list([State.RUNNING, State.PAUSED])))
    figures.spread("count", await timed(100, lambda: store.count("project-7")))
    begun = time.perf_counter()
    due = await store.expiring(time.time() + 3600 + 1, 10_000)
    figures.put("sweep_s", time.perf_counter() - begun)
    figures.put("sweep_found", len(due))
    figures.spread("standing", await timed(3, store.standing))
    figures.spread("tail_1000", await timed(50, lambda: store.tail(chance.randrange(len(seen) * 50))))


async def act(store: SqliteStore | PostgresStore, figures: Figures, seen: list[SandboxId]) -> None:
    """Appends and moves, as a command and a wake-up make them, to those that nobody touched for long."""
    chance = random.Random(2)
    error = UnknownOutcome("an example")

    async def append() -> None:
        sandbox = chance.choice(seen)
        await store.append(exec_failure(sandbox, new_exec_id(), error))

    figures.spread("append", await timed(3000, append))
    some = chance.sample(seen, min(500, len(seen) // 2))
    cold = [info for info in [await store.get(one) for one in some] if info.state is State.COLD]
    left = iter(cold)

    async def wake() -> None:
        info = next(left)
        await store.move(info.id, seen=State.COLD, to=State.RUNNING, draft=created(info))

    figures.spread("wake_move", await timed(len(cold), wake))


async def run(
    home: Path, count: int, opened: Callable[[Path], Awaitable[SqliteStore | PostgresStore]]
) -> Figures:
    figures, seen = Figures(), list[SandboxId]()
    store = await opened(home)
    begun = time.perf_counter()
    times = await fill(store, count - LIVE, State.COLD, seen)
    figures.put("add_per_second", (count - LIVE) / (time.perf_counter() - begun))
    figures.spread("add_batch", times)
    await fill(store, LIVE, State.RUNNING, seen)
    await look(store, figures, seen)
    await act(store, figures, seen)
    begun = time.perf_counter()
    await store.close()
    figures.put("close_s", time.perf_counter() - begun)
    begun = time.perf_counter()
    store = await opened(home)
    figures.put("open_s", time.perf_counter() - begun)
    assert sum((await store.count()).values()) == count
    await look(store, figures, seen)
    await store.close()
    figures.put("rss_mb", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    figures.put("files_mb", await asyncio.to_thread(_megabytes, home))
    return figures


def _megabytes(home: Path) -> float:
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) / 2**20


async def sqlite(home: Path) -> SqliteStore:
    return await SqliteStore.open(home / "state", key=home / "key", engine_id="en-bench")


async def postgres(url: str, home: Path) -> PostgresStore:
    return await PostgresStore.open(url, home / "state", key=home / "key", engine_id="en-bench")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=300_000)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--database", default="", help="an empty database of PostgreSQL; SQLite unless told")
    arguments = parser.parse_args()
    opened = partial(postgres, arguments.database) if arguments.database else sqlite
    with tempfile.TemporaryDirectory(dir=arguments.directory) as home:
        figures = asyncio.run(run(Path(home), arguments.n, opened))
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
        print(json.dumps({"machine": machine, "environments": arguments.n, "figures": figures.values}))


if __name__ == "__main__":
    main()
