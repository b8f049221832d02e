"""Figures of a list of measurements. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a table: what was measured, how often, and how it is distributed.

    Attributes:
        unit: of every figure: ``ms``, ``MB/s`` and so on.
        peer: measured for comparison; not ours.
    """

    what: str
    unit: str
    n: int
    p50: float
    p90: float
    p99: float
    mean: float
    least: float
    most: float
    peer: bool = False


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile: a value that occurred.  Raises: ValueError: no values, or not a share."""
    if not values:
        raise ValueError("there is nothing to take a quantile of")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{share} is not a share above 0, up to 1")
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def ratio(ours: float, theirs: float) -> float:
    """``ours`` as a multiple of ``theirs``.  Raises: ValueError: theirs is nothing."""
    if theirs <= 0:
        raise ValueError(f"{theirs} cannot be compared with")
    return ours / theirs


def series(what: str, values: Sequence[float], *, unit: str = "ms", peer: bool = False) -> Series:
    """The figures of ``values``, which are in ``unit``."""
    return Series(
        what=what,
        unit=unit,
        n=len(values),
        p50=_rounded(quantile(values, 0.5)),
        p90=_rounded(quantile(values, 0.9)),
        p99=_rounded(quantile(values, 0.99)),
        mean=_rounded(math.fsum(values) / len(values)),
        least=_rounded(min(values)),
        most=_rounded(max(values)),
        peer=peer,
    )


def milliseconds(what: str, nanoseconds: Sequence[int], *, peer: bool = False) -> Series:
    """The figures of times taken with ``perf_counter_ns``."""
    return series(what, [each / NS_PER_MS for each in nanoseconds], peer=peer)


def slower(blocking: Series, awaited: Series) -> dict[str, float]:
    """What bars are held against when both SDKs were measured: of each figure the worse one; and both medians.

    Both are in ms.
    """
    return {
        "p50_ms": max(blocking.p50, awaited.p50),
        "p99_ms": max(blocking.p99, awaited.p99),
        "dsec_p50_ms": blocking.p50,
        "asyncdsec_p50_ms": awaited.p50,
    }


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last third (at least one value each).  Raises: ValueError: no values."""
    if not values:
        raise ValueError("there is nothing to compare")
    size = max(1, len(values) // 3)
    return math.fsum(values[:size]) / size, math.fsum(values[-size:]) / size


def _rounded(value: float) -> float:
    """Six significant digits: more would pretend."""
    return float(f"{value:.6g}")
