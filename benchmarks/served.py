"""The same SDK over loopback HTTP: commands, lifecycles with and without ready sandboxes, and what two processors sustain.

``dsec serve`` is a process of its own over an empty home, with keys, quotas and turns as its users have it; the client is this one.
Both share the machine. Beside each, the engine in this process does the same, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import uvloop

from benchmarks.blocks import in_turn, timed_into
from benchmarks.common import TRUE, Findings, Script, main, warm_up
from benchmarks.figures import NS_PER_MS, Series, milliseconds, quantile
from benchmarks.lifecycles import Times, engine, exec_true, lifecycle
from dsec import AsyncDsec, Dsec
from dsec.wiring import default_home

LEVEL: Final = "container"
CLIENTS: Final = 8
PATIENCE: Final = 60.0


@contextmanager
def served(*, pool: int) -> Iterator[tuple[str, str]]:
    """A server of its own: its URL, and a key of scope admin."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as home:
        share_images(home)
        port = free_port()
        environment = {**os.environ, "DSEC_HOME": home}
        command = [sys.executable, "-m", "dsec", "serve", "--port", str(port), "--pool", str(pool)]
        with (Path(home) / "serve.out").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            answers(url, process, Path(home) / "serve.out")
            key = new_key(environment)
            yield url, key
        finally:
            with Dsec(url, api_key=key) as dsec:
                for info in dsec.sandboxes.list():
                    dsec.sandboxes.get(info.id).destroy()
            process.terminate()
            process.wait(PATIENCE)


def share_images(home: str) -> None:
    """The base is built once for all: how long that takes is measured elsewhere."""
    store = default_home() / "store"
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    (Path(home) / "store").symlink_to(store)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server: {log.read_text(errors='replace')}") from None
            time.sleep(0.05)


def new_key(environment: dict[str, str]) -> str:
    made = subprocess.run(
        [sys.executable, "-m", "dsec", "key", "create", "--scope", "admin", "--json"],
        env=environment,
        check=True,
        capture_output=True,
    )
    return str(json.loads(made.stdout)["key"])


def _commands(n: int, url: str, key: str) -> tuple[list[int], list[int]]:
    far: list[int] = []
    near: list[int] = []
    with ExitStack() as stack:
        remote = stack.enter_context(Dsec(url, api_key=key))
        local = stack.enter_context(engine())
        there = stack.enter_context(remote.sandboxes.create(level=LEVEL))
        here = stack.enter_context(local.sandboxes.create(level=LEVEL))
        sides = [
            timed_into(far, lambda: exec_true(there)),
            timed_into(near, lambda: exec_true(here)),
        ]
        in_turn(warm_up(n), sides)
        far.clear()
        near.clear()
        in_turn(n, sides)
    return far, near


def _lifecycles(n: int, url: str, key: str) -> Times:
    times, cold = Times(), Times()
    with Dsec(url, api_key=key) as dsec:
        for _ in range(warm_up(n)):
            lifecycle(dsec, LEVEL, cold)
        for _ in range(n):
            lifecycle(dsec, LEVEL, times)
    return times


def _claims(n: int, url: str, key: str, pause: float) -> Times:
    """With ready ones: as somebody who has something to do in between, so that there is one."""
    times = Times()
    with Dsec(url, api_key=key) as dsec:
        for number in range(n + warm_up(n)):
            lifecycle(dsec, LEVEL, times if number >= warm_up(n) else Times())
            time.sleep(pause)
    return times


async def _sustained(url: str, key: str, seconds: float) -> tuple[int, int, float, list[int]]:
    """Whole lifecycles of some clients at once: how many, how many failed, how long, and what each took."""
    whole: list[int] = []
    failed = 0
    async with AsyncDsec(url, api_key=key) as dsec:
        begun = time.monotonic()

        async def client() -> None:
            nonlocal failed
            while time.monotonic() - begun < seconds:
                start = perf_counter_ns()
                try:
                    sandbox = await dsec.sandboxes.create(level=LEVEL)
                    result = await sandbox.exec(TRUE)
                    await sandbox.destroy()
                    failed += result.exit_code != 0
                except Exception as error:  # noqa: BLE001 - each is counted, whatever it is
                    failed += 1
                    sys.stderr.write(f"{error!r}\n")
                whole.append(perf_counter_ns() - start)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        took = time.monotonic() - begun
    return len(whole) - failed, failed, took, whole


def measure(options: argparse.Namespace) -> Findings:
    """Commands, lifecycles, claims, then what is sustained."""
    with served(pool=0) as (url, key):
        far, near = _commands(options.n, url, key)
        cold = _lifecycles(options.n // 2, url, key)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            count, failed, took, whole = runner.run(_sustained(url, key, options.seconds))
    with served(pool=8) as (url, key):
        ready = _claims(options.n // 2, url, key, options.pause)
    lines: tuple[Series, ...] = (
        milliseconds("exec /bin/true over HTTP", far),
        milliseconds("exec /bin/true in this process", near),
        *cold.lines("over HTTP, no pool"),
        *ready.lines("over HTTP, pool"),
        milliseconds(f"lifecycle, {CLIENTS} at once", whole),
    )
    return Findings(
        samples=options.n,
        series=lines,
        figures={
            "exec_p50_ms": quantile(far, 0.5) / NS_PER_MS,
            "exec_p99_ms": quantile(far, 0.99) / NS_PER_MS,
            "http_share_ms": (quantile(far, 0.5) - quantile(near, 0.5)) / NS_PER_MS,
            "lifecycle_p50_ms": quantile(cold.whole, 0.5) / NS_PER_MS,
            "pooled_p50_ms": quantile(ready.whole, 0.5) / NS_PER_MS,
            "sustained_per_s": count / took,
            "sustained_s": took,
            "sustained_errors": float(failed),
        },
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this script."""
    parser.add_argument("--seconds", type=float, default=60.0, help="of sustained lifecycles")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds between claims from the pool")


SCRIPT = Script(
    name="served",
    claim="an engine behind HTTP answers like one in the same process, and goes on doing so",
    n=1000,
    measure=measure,
    options=arguments,
)

if __name__ == "__main__":
    main(SCRIPT)
