"""What locking and installing may take, and where wheels come from."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dsec.errors import BadRequest
from dsec.model.checks import check_count, check_flag, check_seconds, check_text, shown

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Hard ceilings of one lock or one layer.

    Attributes:
        seconds: of resolving and downloading. wheels: how many. download_bytes: of all wheels, and of all that resolving them takes.
        unpacked_bytes: of all files. entries: files of all wheels.
        ratio: how many times larger than its wheel what is in it may be (small wheels excepted).
    """

    seconds: float = 900.0
    wheels: int = 500
    download_bytes: int = 8 * _GIB
    unpacked_bytes: int = 16 * _GIB
    entries: int = 400_000
    ratio: int = 100

    def __post_init__(self) -> None:
        check_seconds("bounds.seconds", self.seconds)
        for each in fields(self)[1:]:
            check_count(f"bounds.{each.name}", getattr(self, each.name), 1, 2**50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Where wheels are looked for.

    Attributes:
        machine: as pip is configured on this machine (its files and ``PIP_`` variables: indexes, mirrors, certificates,
            constraints). False: nothing of that; pip's own default index.
        links: directories or pages with wheels, besides. none: no index at all, only the links.
    """

    machine: bool = True
    links: tuple[str, ...] = ()
    none: bool = False

    def __post_init__(self) -> None:
        check_flag("index.machine", self.machine)
        check_flag("index.none", self.none)
        check_text("index.links", *self.links)
        wrong = [link for link in self.links if not link or link.startswith("-") or not link.isprintable()]
        if wrong:
            raise BadRequest(f"index.links: {shown(wrong[0])} is no directory or page", field="links")
