"""`dsec doctor`, `gc` and `bench`: this machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Final

import typer

from dsec.cli import options as opt
from dsec.cli.numbers import whole
from dsec.cli.output import printable, put, put_json, put_table
from dsec.cli.session import Signals, announce_build, conduct, durable, engine_home, private
from dsec.cli.wording import in_options
from dsec.client.aio import AsyncDsec as Client
from dsec.client.aio import AsyncSandbox
from dsec.model.health import Layer, Report, Verdict
from dsec.model.sandbox import Flag
from dsec.wiring import collect, examine

app = typer.Typer()

_WARM_UP: Final = 5
_TRUE: Final = ("/bin/true",)


@app.command()
def doctor(as_json: opt.AsJson = False) -> None:
    """Tell what this machine can isolate, and try it.

    Layers are active, degraded or unavailable, with the reason and how to enable what is missing. Exit code 1 when no
    level works.

    Examples:

        dsec doctor

        dsec doctor --json | jq '.levels[] | select(.available) | .level'
    """
    report = examine()
    if as_json:
        put_json(report)
    else:
        put(_told(report))
    if not any(one.available for one in report.levels):
        raise typer.Exit(1)


def _told(report: Report) -> str:
    width = max(len(layer.name) for layer in report.layers)
    lines = [f"Linux {report.kernel}", "", "Layers of isolation"]
    lines += [_layer_line(layer, width) for layer in report.layers]
    lines += ["", "Levels"]
    for verdict in report.levels:
        lines += _verdict_lines(verdict)
    return "\n".join(printable(line) for line in lines) + "\n"


def _layer_line(layer: Layer, width: int) -> str:
    line = f"  {layer.name.ljust(width)}  {layer.status.value}"
    words = "; to enable: ".join(one for one in (layer.detail, in_options(layer.hint)) if one)
    return f"{line} ({words})" if words else line


def _verdict_lines(verdict: Verdict) -> list[str]:
    if not verdict.available:
        hint = f"; to enable: {in_options(verdict.hint)}" if verdict.hint else ""
        return [f"  {verdict.level.value}: unavailable ({verdict.reason}{hint})"]
    return [
        f"  {verdict.level.value}: active (tried in {verdict.seconds * 1000:.0f} ms)",
        f"    guarantees: {', '.join(sorted(verdict.flags))}",
        f"    does not guarantee: {', '.join(sorted(verdict.missing)) or 'nothing is missing'}",
    ]


@app.command()
def gc(budget: opt.Budget = "", as_json: opt.AsJson = False) -> None:
    """Remove what dead engines left and nothing needs any more.

    That is: state of private engines that were killed, half-made images and those that no name stands for, and what the
    engine of lasting sandboxes could not remove earlier. Exit code 1 when something still cannot be removed.

    With a budget also images that nobody holds go, the longest unused first, as long as images together are larger.

    Examples:

        dsec gc

        dsec gc --budget 20G
    """
    most = opt.size_of("budget", budget)

    async def work(signals: Signals) -> int:
        del signals
        done = await collect(None, most)
        if await asyncio.to_thread(engine_home().exists):
            async with durable() as engine:  # opening it repairs what it can
                done = replace(done, problems=await engine.problems())
        if as_json:
            put_json(done)
        else:
            lines = [f"removed {path}" for path in done.removed]
            lines += [f"still there: {one.sandbox} {one.what}: {one.error}" for one in done.problems]
            put("".join(printable(line) + "\n" for line in lines or ["nothing to remove"]))
        return 1 if done.problems else 0

    conduct(work)


@app.command()
def bench(
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", help="How often each.", parser=whole(1, 100_000))
    ] = 100,
    level: opt.LevelName = "container",
    pool: Annotated[
        int,
        typer.Option(
            "--pool", metavar="N", help="Ready sandboxes kept meanwhile, at most.", parser=whole(0, 64)
        ),
    ] = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Measure creating, executing and destroying here, through the SDK, one at a time.

    Examples:

        dsec bench

        dsec bench -n 1000 --level process --json
    """

    announce_build(level)

    async def work(signals: Signals) -> int:
        del signals
        async with private(pool) as engine:
            found = await _measured(engine, level, count)
            kept = await engine.pool.info()
        rows = [_figures(name, times) for name, times in found]
        if as_json:
            machine = {"kernel": os.uname().release, "cpus": os.cpu_count()}
            claims = {"hits": kept.hits, "misses": kept.misses, "wasted": kept.wasted}
            put_json({"level": level, "pool": pool, "machine": machine, "results": rows, "claims": claims})
        else:
            cells = [(str(row["what"]), *(f"{row[key]:.2f}" for key in _COLUMNS)) for row in rows]
            put_table(("MILLISECONDS", "P50", "P90", "P99", "MAX"), cells)
            if pool:
                put(f"{kept.hits} creates found a sandbox ready, {kept.misses} did not\n")
        return 0

    conduct(work)


_COLUMNS: Final = ("p50_ms", "p90_ms", "p99_ms", "max_ms")


async def _measured(engine: Client, level: str, count: int) -> list[tuple[str, list[float]]]:
    async def whole() -> None:
        async with await engine.sandboxes.create(level=level) as one:
            await one.exec(_TRUE)

    found = [("create, exec and destroy", await _times(whole, count))]
    async with await engine.sandboxes.create(level=level) as sandbox:

        async def execute() -> None:
            await sandbox.exec(_TRUE)

        found.append(("exec in a running sandbox", await _times(execute, count)))
        if Flag.PAUSE in sandbox.flags:
            found.append(("resume a paused one and exec", await _resumes(sandbox, count)))
    return found


async def _times(act: Callable[[], Awaitable[None]], count: int) -> list[float]:
    """Milliseconds of each, after a warm-up."""
    for _ in range(min(_WARM_UP, count)):
        await act()
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        await act()
        found.append((time.perf_counter() - begun) * 1000)
    return found


async def _resumes(sandbox: AsyncSandbox, count: int) -> list[float]:
    found = []
    for _ in range(count):
        await sandbox.pause()
        begun = time.perf_counter()
        await sandbox.resume()
        await sandbox.exec(_TRUE)
        found.append((time.perf_counter() - begun) * 1000)
    return found


def _figures(what: str, times: Sequence[float]) -> dict[str, object]:
    ordered = sorted(times)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return {
        "what": what,
        "count": len(ordered),
        "p50_ms": at(0.5),
        "p90_ms": at(0.9),
        "p99_ms": at(0.99),
        "max_ms": round(ordered[-1], 3),
    }
