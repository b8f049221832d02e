"""Figures of a server: what they are taken from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

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
) -> Meters:
    """All figures of a server over that engine, as its owner sees it.

    Args:
        journal_bytes: that the journal takes on disk, :func:`bytes_below` where it is files. queue: of what waits to be made.
    """
    return Meters(
        Sources(
            engine=engine, journal=journal, counts=sandboxes.count, journal_bytes=journal_bytes, queue=queue
        )
    )


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
