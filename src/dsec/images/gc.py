"""Taking away what the image store holds and nothing needs any more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from dsec.errors import DsecError
from dsec.images.blobs import BlobCache
from dsec.images.builds import abandoned, open_lock, remove, try_lock
from dsec.images.disk import read_small, typed

_HOME_BYTES: Final = 4096
_GRACE: Final = 3600.0  # seconds: somebody may have looked up its name a moment ago


def collect(root: Path, *, budget: int | None = None, grace: float = _GRACE) -> tuple[Path, ...]:
    """Remove half-made things of dead builders, holds of engines whose home is gone, and images that no name stands for and nobody holds.

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
    yield from (path for path in _entries(root / "held") if not _living(path))
    needed = {_digest(path) for path in _entries(root / "names")} | _held(root)
    for path in _entries(root / "images"):
        if _stem(path) not in needed and _age(path) > grace and _age(_used(path)) > grace:
            yield path
    for directory in ("names", "held", "images"):
        torn = (path for path in _entries(root / directory) if path.name.startswith("."))
        yield from (path for path in torn if _age(path) > grace)


def _evicted(root: Path, budget: int, grace: float) -> Iterator[Path]:
    """Names before the images they stand for: who sees a name sees a whole image."""
    images = [path for path in _entries(root / "images") if path.suffix == ".erofs"]
    total = sum(path.stat().st_size for path in images)
    held = _held(root)
    for path in sorted(images, key=lambda path: _age(_used(path)), reverse=True):
        if total <= budget:
            return
        if _stem(path) in held or _age(_used(path)) <= grace:
            continue
        total -= path.stat().st_size
        yield from (name for name in _entries(root / "names") if _digest(name) == _stem(path))
        yield from (each for each in _entries(root / "images") if _stem(each) == _stem(path))


def _held(root: Path) -> set[str]:
    """What is being written is no hold yet: who writes it looks for the image afterwards."""
    return {
        _stem(path) for path in _entries(root / "held") if not path.name.startswith(".") and _living(path)
    }


def holders(root: Path) -> Mapping[str, tuple[str, ...]]:
    """By the 64 digits of an image's digest who needs it: owners, with the home of those that have one.  Raises: OSError."""
    found: dict[str, list[str]] = {}
    for path in _entries(root / "held"):
        if path.name.startswith(".") or not _living(path):
            continue
        digest, _, owner = path.name.partition(".")
        home = _home(path)
        found.setdefault(digest, []).append(f"{owner} ({os.fsdecode(home)})" if home else owner)
    return {digest: tuple(owners) for digest, owners in found.items()}


def _home(path: Path) -> bytes:
    """Of the engine that has a reference; "" when it has none, or cannot be read."""
    try:
        return read_small(path, _HOME_BYTES)
    except (OSError, DsecError):
        return b""


def _living(path: Path) -> bool:
    """Whether who has a reference may still need it; what cannot be known counts as yes."""
    home = _home(path)
    if not home.startswith(b"/") or b"\0" in home:
        return True
    try:
        os.stat(home)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


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
