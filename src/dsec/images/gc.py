"""Taking away what the image store holds and nothing needs any more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.errors import DsecError
from dsec.images.blobs import BlobCache
from dsec.images.builds import abandoned, open_lock, remove, try_lock
from dsec.images.disk import read_small, typed
from dsec.images.holds import held, is_living, references

_GRACE: Final = 3600.0  # seconds: somebody may have looked up its name a moment ago


def collect(root: Path, *, budget: int | None = None, grace: float = _GRACE) -> tuple[Path, ...]:
    """Remove half-made things of dead builders, holds of engines and templates that are gone, and images that no name stands for and nobody holds.

    The paths of all that was removed are returned.

    Images that are mounted stay usable until they are unmounted. Nothing happens while another process begins or publishes
    a build. Blocking.

    Args:
        budget: bytes that images may have together: beyond it those that nobody holds go too, with their names, the one
            first that was asked for longest ago. None: no bound.
        grace: seconds for which an image stays after it was asked for, whatever the budget.

    Raises: Denied, StoreDamaged.
    """
    if not root.is_dir():
        return ()
    descriptor = open_lock(root / "lock")
    try:
        if not try_lock(descriptor):
            return ()
        with typed(root):
            found = _remove_all(_unneeded(root, grace))
            if budget is not None:
                found += _remove_all(_evicted(root, budget, grace))
        return found + BlobCache(root / "blobs").prune()
    finally:
        os.close(descriptor)


def _unneeded(root: Path, grace: float) -> Iterator[Path]:
    yield from abandoned(root / "building")
    yield from (path for path in references(root) if not is_living(path))
    needed = {_digest(path) for path in _entries(root / "names")} | held(root)
    going = {
        path
        for path in _entries(root / "images")
        if _stem(path) not in needed and _age(path) > grace and _age(_used(path)) > grace
    }
    yield from _pointless(root, {path for path in _entries(root / "images") if path not in going}, grace)
    yield from sorted(going)
    for directory in ("names", "made", "held", "images"):
        torn = (path for path in _entries(root / directory) if path.name.startswith("."))
        yield from (path for path in torn if _age(path) > grace)


def _pointless(root: Path, staying: set[Path], grace: float) -> Iterator[Path]:
    """What says which image was made from something, when that image is not there or goes."""
    there = {_stem(path) for path in staying if path.suffix == ".erofs"}
    for path in _entries(root / "made"):
        if not path.name.startswith(".") and _digest(path) not in there and _age(path) > grace:
            yield path


def _evicted(root: Path, budget: int, grace: float) -> Iterator[Path]:
    """Names before the images they stand for: who sees a name sees a whole image."""
    images = [path for path in _entries(root / "images") if path.suffix == ".erofs"]
    total = sum(path.stat().st_size for path in images)
    needed = held(root)
    for path in sorted(images, key=lambda path: _age(_used(path)), reverse=True):
        if total <= budget:
            return
        if _stem(path) in needed or _age(_used(path)) <= grace:
            continue
        total -= path.stat().st_size
        meanings = (*_entries(root / "names"), *_entries(root / "made"))
        yield from (meaning for meaning in meanings if _digest(meaning) == _stem(path))
        yield from (each for each in _entries(root / "images") if _stem(each) == _stem(path))


def _stem(path: Path) -> str:
    """The digest that a file's name begins with."""
    return path.name.lstrip(".").split(".")[0]


def _used(path: Path) -> Path:
    """What bears the time at which an image was last asked for."""
    used = path.with_name(f"{_stem(path)}.used")
    return used if used.exists() else path


def _age(path: Path) -> float:
    """Seconds; none for what is gone."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _entries(directory: Path) -> tuple[Path, ...]:
    return tuple(sorted(directory.iterdir())) if directory.is_dir() else ()


def _digest(path: Path) -> str:
    """Of the image that a name stands for, "" when it cannot be read."""
    try:
        value = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError, DsecError):
        return ""
    return str(value.get("digest", "")).removeprefix("sha256:") if isinstance(value, dict) else ""


def _remove_all(paths: Iterator[Path]) -> tuple[Path, ...]:
    """All found before the first is removed."""
    found = tuple(paths)
    for path in found:
        remove(path)
    return found
