"""How much memory this machine has left."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")


def available(source: Path = _MEMINFO) -> float:
    """The share of its memory that programs could still have, 0 to 1; 1 where nobody tells. Blocks, for some microseconds."""
    try:
        lines = source.read_text(encoding="ascii").splitlines()
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return min(found["MemAvailable"] / found["MemTotal"], 1.0)
    except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
        return 1.0
