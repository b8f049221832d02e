"""Numbers and sizes as people write them, read in our own words whatever typer would say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import typer

_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,18})(?:(?P<unit>[KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")
_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MIB: Final = 2**20
MOST_MIB: Final = 2**40


def size(text: str, plain: int = 1) -> int | None:
    """Bytes of ``20G`` and the like, in powers of 1,024; a number without a unit counts ``plain`` bytes. None: it is no size."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    unit = _UNITS[found["unit"].upper()] if found["unit"] else 1 if text[-1] in "bB" else plain
    return int(found["number"]) * unit


def mib(text: str | int) -> int:
    """MiB of ``256``, ``256M`` or ``10G``.  Raises: typer.BadParameter."""
    if isinstance(text, int):
        return text
    found = size(text, _MIB)
    if found is None or found % _MIB or found // _MIB > MOST_MIB:
        raise typer.BadParameter(f"{text!r:.100} is not a size in whole MiB: write 256 (MiB), 256M or 10G")
    return found // _MIB


def whole(least: int | None = None, most: int | None = None) -> Callable[[str | int], int]:
    """What reads a whole number within bounds, and raises typer.BadParameter for everything else."""

    def number(text: str | int) -> int:
        value = text if isinstance(text, int) else int(text) if _WHOLE.fullmatch(text) else None
        if value is None:
            raise typer.BadParameter(f"{text!r:.100} is not a whole number")
        if (least is not None and value < least) or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise typer.BadParameter(f"{value} is not {bounds}")
        return value

    return number


def decimal(text: str | float) -> float:
    """A number, such as 0.5.  Raises: typer.BadParameter."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r:.100} is not a number, such as 5 or 0.5") from None
