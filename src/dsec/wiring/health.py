"""What this machine can do, and what dead engines left."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dsec.client import aio
from dsec.errors import (
    DsecError,
    IsolationUnavailable,
)
from dsec.images import gc as images_gc
from dsec.images.dependencies.cache import WheelCache
from dsec.images.probe import image_layers
from dsec.model.health import Layer, Report, Verdict
from dsec.model.sandbox import Flag, Level, Problem
from dsec.runtimes import probe
from dsec.stores.probe import storage_layers
from dsec.wiring.engines import AsyncDsec
from dsec.wiring.settings import Settings, programs
from dsec.wiring.state import sweep
from dsec.wiring.templates import templates_of

_WHEELS_KEPT: Final = 4 * 2**30  # bytes of the wheels that were used last
_TRIAL_SECONDS: Final = 60.0


def examine() -> Report:
    """Every layer of isolation of this machine, and a trial of every level. Blocking, forks: for a process with one thread."""
    layers = [
        *probe.kernel_layers(),
        *storage_layers(),
        _native_programs(),
        *image_layers(Settings().store),
    ]
    return Report(kernel=os.uname().release, layers=tuple(layers), levels=asyncio.run(_try_levels()))


def _native_programs() -> Layer:
    try:
        return probe.active("native programs", str(programs()))
    except IsolationUnavailable as error:
        return probe.unavailable("native programs", error.message, error.hint)


async def _try_levels() -> tuple[Verdict, ...]:
    async with AsyncDsec(settings=Settings(shelf=1, pool=0)) as engine:
        return tuple([await _try_level(engine, level) for level in Level])


async def _try_level(engine: aio.AsyncDsec, level: Level) -> Verdict:
    begun = time.monotonic()
    try:
        async with await engine.sandboxes.create(level=level) as sandbox:
            result = await sandbox.exec(["/bin/true"], timeout=_TRIAL_SECONDS)
            flags = sandbox.flags
    except DsecError as error:
        return Verdict(level=level, available=False, reason=error.message, hint=error.hint)
    return Verdict(
        level=level,
        available=result.ok,
        reason="" if result.ok else f"/bin/true ended with exit code {result.exit_code}",
        flags=flags,
        missing=frozenset(Flag) - flags,
        seconds=time.monotonic() - begun,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What :func:`collect` removed, and what could not be removed yet."""

    removed: tuple[Path, ...]
    problems: tuple[Problem, ...]


async def collect(home: Path | None, budget: int | None = None) -> Collected:
    """Remove what dead private engines and half-made or replaced images left, and repair the durable engine of ``home``, None = none.

    A durable engine without sandboxes keeps no process.

    Args:
        budget: bytes that stored images may have together: beyond it those that nobody holds go, the longest unused first, and wheels that were used longest ago. None: no bound but 4 GiB of wheels.

    Raises:
        Conflict: another process owns ``home``.
    """
    removed = await asyncio.to_thread(sweep, Path(tempfile.gettempdir()))
    store = Settings().store
    removed += await asyncio.to_thread(partial(images_gc.collect, store, budget=budget))
    await asyncio.to_thread(
        WheelCache(templates_of(store) / "wheels").prune,
        min(_WHEELS_KEPT, _WHEELS_KEPT if budget is None else budget),
    )
    problems: tuple[Problem, ...] = ()
    if home is not None and await asyncio.to_thread(home.exists):
        async with AsyncDsec(home) as engine:
            problems = await engine.problems()
    return Collected(removed=removed, problems=problems)
