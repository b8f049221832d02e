"""Many creations at once: each is done or told that there is no room, none is lost, none is made twice.

After every burst the engine's sandboxes are counted: there must be exactly those that were acknowledged. With ``--url`` the engine is
one behind a server; else it is one in this process, with the queue and the turns of a server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from benchmarks.common import Findings, Script, main
from benchmarks.figures import NS_PER_MS, Series, quantile, series
from dsec import AsyncDsec
from dsec.client import aio
from dsec.errors import Busy
from dsec.model.admission import AT_ONCE
from dsec.wiring.admission import Reception
from dsec.wiring.engines import open_engine
from dsec.wiring.settings import Settings

SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500)
LABEL: Final = "burst"


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What became of one: ``asked`` creations; the ids that were acknowledged, with ns each; refusals, with ns; how many there were afterwards."""

    asked: int
    made: dict[str, int]
    busy: list[int]
    lost: int
    doubled: int


@contextlib.asynccontextmanager
async def _engine(options: argparse.Namespace) -> AsyncIterator[aio.AsyncDsec]:
    if options.url:
        async with AsyncDsec(options.url) as dsec:
            yield dsec
        return
    with tempfile.TemporaryDirectory(prefix="burst-") as home:
        settings = Settings(
            home=Path(home) / "engine", pool=options.pool, shelf=options.shelf, creations=options.creations
        )
        async with aio.AsyncDsec(lambda: open_engine(settings, Reception(settings))) as dsec:
            try:
                yield dsec
            finally:
                for info in await dsec.sandboxes.list():
                    await (await dsec.sandboxes.get(info.id)).destroy()


async def _burst(dsec: aio.AsyncDsec, size: int, level: str) -> Burst:
    made: dict[str, int] = {}
    busy: list[int] = []
    label = f"{size}-{perf_counter_ns()}"

    async def one() -> None:
        begun = perf_counter_ns()
        try:
            sandbox = await dsec.sandboxes.create(level=level, labels={LABEL: label})
        except Busy:
            busy.append(perf_counter_ns() - begun)
        else:
            made[sandbox.id] = perf_counter_ns() - begun

    await asyncio.gather(*[one() for _ in range(size)])
    there = [info.id for info in await dsec.sandboxes.list() if info.spec.labels.get(LABEL) == label]
    found = Burst(
        asked=size,
        made=made,
        busy=busy,
        lost=len(made.keys() - set(there)) + size - len(made) - len(busy),
        doubled=len(there) - len(set(there)) + len(set(there) - made.keys()),
    )
    for sandbox in there:
        await (await dsec.sandboxes.get(sandbox)).destroy()
    return found


async def _measure(options: argparse.Namespace) -> list[Burst]:
    async with _engine(options) as dsec:
        await _burst(dsec, 5, options.level)
        sizes = [size for size in SIZES if size <= options.most]
        return [await _burst(dsec, size, options.level) for size in sizes for _ in range(options.n)]


def measure(options: argparse.Namespace) -> Findings:
    """All sizes, one after the other."""
    bursts = asyncio.run(_measure(options))
    lines: list[Series] = []
    figures: dict[str, float] = {}
    for size in sorted({burst.asked for burst in bursts}):
        of = [burst for burst in bursts if burst.asked == size]
        times = [each / NS_PER_MS for burst in of for each in burst.made.values()]
        if times:
            lines.append(series(f"{size} at once: each", times))
            figures[f"p99_ms_{size}"] = quantile(times, 0.99)
        refused = [each / NS_PER_MS for burst in of for each in burst.busy]
        if refused:
            lines.append(series(f"{size} at once: busy", refused))
        figures[f"busy_share_{size}"] = len(refused) / (len(refused) + len(times))
    figures["lost"] = float(sum(burst.lost for burst in bursts))
    figures["doubled"] = float(sum(burst.doubled for burst in bursts))
    return Findings(samples=sum(burst.asked for burst in bursts), series=tuple(lines), figures=figures)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="", help="a server, with $DSEC_API_KEY; default: an engine in this process"
    )
    parser.add_argument("--level", default="container")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="creations at once, at most")
    parser.add_argument(
        "--creations", type=int, default=AT_ONCE, help="that are in progress at the same time"
    )
    parser.add_argument("--pool", type=int, default=0, help="sandboxes that are kept ready")
    parser.add_argument("--shelf", type=int, default=8, help="empty layers that are kept ready")


if __name__ == "__main__":
    main(
        Script(
            name="burst",
            claim="Of 1 to 500 creations at once each is done or busy; none is lost or doubled",
            n=3,
            measure=measure,
            n_help="bursts of each size",
            options=_options,
        )
    )
