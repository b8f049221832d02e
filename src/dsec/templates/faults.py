"""What is wrong with a document, and where: all of it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsec.errors import BadRequest

MOST_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a text. ``line`` and ``column`` count from 1; 0 = it is nowhere."""

    line: int = 0
    column: int = 0


NOWHERE: Final = Place()
Places = Mapping[str, Place]
"""Where each field of a document is written, by its path, such as ``runtime.dependencies[0]``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        field: its path, "" = the document. place: where it is written. message: what is wrong, without the field. hint: what to do.
    """

    field: str
    place: Place
    message: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"line {self.place.line}, column {self.place.column}" if self.place.line else ""
        return ": ".join(part for part in (where, self.field, self.message) if part)


def refused(source: str, faults: Sequence[Fault]) -> BadRequest:
    """One error for all that is wrong with ``source``: in lines for people, in ``facts["errors"]`` for programs."""
    faults = sorted(faults, key=lambda fault: (fault.place.line, fault.place.column))
    facts = [
        {
            "field": fault.field,
            "line": fault.place.line,
            "column": fault.place.column,
            "message": fault.message,
            "hint": fault.hint,
        }
        for fault in faults[:MOST_SHOWN]
    ]
    if len(faults) == 1:
        return BadRequest(
            f"{source}: {faults[0]}",
            hint=faults[0].hint or "correct that line",
            errors=facts,
            count=1,
        )
    lines = [f"{fault} ({fault.hint})" if fault.hint else str(fault) for fault in faults[:MOST_SHOWN]]
    if len(faults) > MOST_SHOWN:
        lines.append(f"and {len(faults) - MOST_SHOWN} more")
    return BadRequest(
        "\n  ".join([f"{source}: {len(faults)} errors", *lines]),
        hint="correct each of these lines",
        errors=facts,
        count=len(faults),
    )
