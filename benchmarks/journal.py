"""What the journal costs: each act of a sandbox's life, and an append by durability and by the two designs of its writer.

``python -m benchmarks.journal [--json] [--directory DIR] [--count N]``: tables, and the figures as JSON. Only the
file system of DIR (default: the temporary directory) counts for ``disk``; ``loop`` is the longest time for which the
event loop could do nothing else, ``cpu`` the processor time of the event loop's thread for each append, the
benchmark's own work included: it says what an append costs whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dsec.model.ids import new_sandbox_id, new_session_id
from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import Flag, SandboxInfo, SandboxSpec, State
from dsec.node.drafts import created
from dsec.stores.journal import SqliteStore
from dsec.stores.keeper import Pace
from dsec.stores.schema import Durability

WARM_UP = 200


@dataclass(frozen=True)
class Result:
    """One line of the table; times in microseconds."""

    durability: str
    writer: str
    callers: int
    appends: int
    per_second: float
    loop_cpu: float
    p50: float
    p90: float
    p99: float
    longest: float
    loop_p99: float


@dataclass(frozen=True)
class Cost:
    """What one act costs: microseconds of the event loop's thread, and pages of 4 KiB written to the log."""

    act: str
    cpu: float
    pages: float


def draft(n: int) -> Draft:
    """A record as an exec writes it."""
    payload: dict[str, Json] = {"argv": ["sh", "-c", "echo hello"], "cwd": "/workspace", "timeout": 10.0}
    return Draft(chain=f"sb-{n % 50}", act="exec", phase=Phase.INTENT, ref=f"ex-{n}", payload=payload)


async def lags(stop: asyncio.Event) -> list[float]:
    """How late the loop comes back to a task that only waits its turn."""
    found: list[float] = []
    while not stop.is_set():
        begun = time.perf_counter()
        await asyncio.sleep(0.001)
        found.append(time.perf_counter() - begun - 0.001)
    return found


async def measure(home: Path, durability: Durability, *, inline: bool, callers: int, count: int) -> Result:
    """Append ``count`` records by ``callers`` tasks."""
    store = await SqliteStore.open(
        home / "state", key=home / "key", engine_id="en-bench", durability=durability
    )
    store._writer._inline = inline  # the other design, for comparison
    times: list[float] = []
    for n in range(WARM_UP):
        await store.append(draft(n))

    async def caller(worker: int) -> None:
        for n in range(worker, count, callers):
            made = draft(n + WARM_UP)
            begun = time.perf_counter()
            await store.append(made)
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(0)

    stop = asyncio.Event()
    watch = asyncio.create_task(lags(stop))
    begun, spent = time.perf_counter(), time.thread_time()
    await asyncio.gather(*(caller(worker) for worker in range(callers)))
    spent = time.thread_time() - spent
    took = time.perf_counter() - begun
    stop.set()
    late = sorted(await watch)
    await store.close()
    times.sort()
    p50, p90, p99 = (times[int(len(times) * share)] * 1e6 for share in (0.5, 0.9, 0.99))
    cpu = spent / count * 1e6
    lag = late[int(len(late) * 0.99)] * 1e6
    writer = "inline" if inline else "thread"
    return Result(durability, writer, callers, count, count / took, cpu, p50, p90, p99, times[-1] * 1e6, lag)


async def costs(home: Path, count: int) -> list[Cost]:
    """Whole lives of sandboxes, ``count`` of them, act by act: so the pages are those of a table that has grown."""
    quiet = Pace(records=10**9, seconds=3600.0, wal_bytes=2**40)
    store = await SqliteStore.open(home / "state", key=home / "key", engine_id="en-bench", pace=quiet)
    log = home / "state" / "journal.db-wal"
    infos = [sandbox() for _ in range(count)]
    found: list[Cost] = []

    async def act(name: str, call: Callable[[SandboxInfo], Awaitable[object]]) -> None:
        size, spent = log.stat().st_size, time.thread_time()
        for info in infos:
            await call(info)
        spent = time.thread_time() - spent
        pages = (log.stat().st_size - size) / 4120
        found.append(Cost(name, spent / count * 1e6, pages / count))

    def move(seen: State, to: State) -> Callable[[SandboxInfo], Awaitable[object]]:
        return lambda info: store.move(info.id, seen=seen, to=to, draft=result(info))

    await act("create", lambda info: store.add(info, created(info)))
    await act("create: it runs", move(State.PENDING, State.RUNNING))
    await act("exec: intent", lambda info: store.append(exec_draft(info, Phase.INTENT)))
    await act("exec: result", lambda info: store.append(exec_draft(info, Phase.RESULT)))
    await act("destroy: intent", move(State.RUNNING, State.STOPPING))
    await act("destroy: gone", move(State.STOPPING, State.GONE))
    await store.close()
    return [*found, Cost("all", sum(one.cpu for one in found), sum(one.pages for one in found))]


def sandbox() -> SandboxInfo:
    """One as an engine makes it."""
    return SandboxInfo(
        id=new_sandbox_id(),
        state=State.PENDING,
        spec=SandboxSpec(),
        flags=frozenset(Flag),
        created_at=time.time(),
        session_id=new_session_id(),
        workdir="/workspace",
        boot_id="0" * 36,
        created_boot=1000.0,
    )


def result(info: SandboxInfo) -> Draft:
    """The record of a change of state."""
    return Draft(chain=info.id, act="sandbox.create", phase=Phase.RESULT, payload={"outcome": "ok"})


def exec_draft(info: SandboxInfo, phase: Phase) -> Draft:
    """One of the two records of a command, in size as the engine writes them."""
    intent: dict[str, Json] = {"argv": ["/bin/true"], "cwd": "/workspace", "uid": 1000}
    end: dict[str, Json] = {
        "outcome": "ok",
        "exit_code": 0,
        "signal": 0,
        "cause": "itself",
        "duration": 0.001,
    }
    payload = intent if phase is Phase.INTENT else {**end, "stdout_bytes": 0, "stderr_bytes": 0}
    return Draft(chain=info.id, act="exec", phase=phase, ref="ex-" + info.id[3:], payload=payload)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON only")
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--count", type=int, default=5000)
    args = parser.parse_args()
    results = []
    designs: tuple[tuple[Durability, bool], ...] = (("process", True), ("process", False), ("disk", False))
    for durability, inline in designs:
        for callers in (1, 16):
            count = args.count if durability == "process" else args.count // 5
            with tempfile.TemporaryDirectory(dir=args.directory) as name:
                results.append(
                    asyncio.run(measure(Path(name), durability, inline=inline, callers=callers, count=count))
                )
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        acts = asyncio.run(costs(Path(name), args.count // 5))
    if not args.json:
        show(results)
        print(
            "".join(f"{one.act:18}{one.cpu:8.1f} us of CPU{one.pages:7.2f} pages\n" for one in acts), end=""
        )
    figures = {"acts": [asdict(one) for one in acts], "results": [asdict(one) for one in results]}
    print(json.dumps({"machine": machine(), **figures}))


def machine() -> dict[str, object]:
    """Where these figures were taken."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "commit": commit.stdout.strip(),
    }


def show(results: list[Result]) -> None:
    """A table for people."""
    print(
        f"{'durability':11}{'writer':8}{'callers':>7}{'/s':>9}{'cpu us':>8}{'p50 us':>9}{'p90':>8}{'p99':>9}{'max':>9}{'loop p99':>10}"
    )
    for r in results:
        print(
            f"{r.durability:11}{r.writer:8}{r.callers:7}{r.per_second:9.0f}{r.loop_cpu:8.1f}"
            f"{r.p50:9.1f}{r.p90:8.1f}{r.p99:9.1f}{r.longest:9.0f}{r.loop_p99:10.0f}"
        )


if __name__ == "__main__":
    main()
