"""Stored images, and what is told while one is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MOST_BYTES: Final = 2**60
"""The largest budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """A stored image.

    Attributes:
        digest: of its tree, ``sha256:…``. names: that stand for it now. sources: digests by which others know it.
        size: bytes of its file. mutable: it shows files of this machine, which change.
        created_at, used_at: when it was made, and last asked for, seconds since the epoch.
        held_by: who needs it: templates, and engines with their homes. It stays as long as anybody does.
    """

    digest: str
    names: tuple[str, ...]
    sources: tuple[str, ...] = ()
    size: int
    mutable: bool = False
    created_at: float
    used_at: float
    held_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What was taken out of a store.

    Attributes:
        paths: that are gone. bytes: of images that were.
    """

    paths: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a long build is doing.

    Attributes:
        what: in words. done, total: how far it is; total 0 = nobody knows. unit: of both, such as "bytes"; "" = there is no figure.
        over: nothing more comes of this build.
    """

    what: str
    done: int = 0
    total: int = 0
    unit: str = ""
    over: bool = False


Progress = Callable[[Step], None]
"""Told of steps, from any thread, some times a second at most."""


def silent(_: Step) -> None:
    """Nobody wants to know."""
