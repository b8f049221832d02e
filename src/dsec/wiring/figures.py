"""Figures of a server: what they are taken from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from dsec.model.admission import AdmissionInfo
from dsec.ports.engine import Services
from dsec.ports.journal import Journal, Sandboxes
from dsec.server.metrics import Meters, Sources

Bytes = Callable[[], Awaitable[int]]


def meters_of(
    engine: Services,
    journal: Journal,
    sandboxes: Sandboxes,
    journal_bytes: Bytes,
    queue: Callable[[], AdmissionInfo] = AdmissionInfo,
    refusals: Callable[[], Mapping[str, int]] = dict,
) -> Meters:
    """All figures of a server over that engine, as its owner sees it.

    Args:
        journal_bytes: that the journal takes on disk, see :func:`bytes_of`. queue: of what waits to be made. refusals: of keys, by reason.
    """
    return Meters(
        Sources(
            engine=engine,
            journal=journal,
            counts=sandboxes.count,
            journal_bytes=journal_bytes,
            queue=queue,
            refusals=refusals,
        )
    )


@runtime_checkable
class Elsewhere(Protocol):
    """A journal whose records are not in its directory."""

    async def bytes(self) -> int:
        """That they take where they are."""


def bytes_of(journal: Journal, directory: Path) -> Bytes:
    """What asks how much a journal takes on disk: in its directory, and in its database where that is elsewhere."""
    here = bytes_below(directory)

    async def both() -> int:
        return await here() + (await journal.bytes() if isinstance(journal, Elsewhere) else 0)

    return both


def bytes_below(directory: Path) -> Bytes:
    """What asks for the size of all files of a directory and of those below it."""
    return partial(asyncio.to_thread, _sum, directory)


def _sum(directory: Path) -> int:
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
