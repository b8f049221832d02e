"""Taking away what the image store holds and nothing needs any more."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_GRACE: Final = 3600.0  # seconds: somebody may have looked up its name a moment ago


def collect(root: Path) -> tuple[Path, ...]:
    """Remove half-made things and images that no name stands for; what was removed. Nothing while an image is built.

    Images that are mounted stay usable until they are unmounted. Blocking.

    Raises: OSError.
    """
    if not root.is_dir():
        return ()
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ()
        found = tuple(_unneeded(root))
        for path in found:
            _remove(path)
        return found
    finally:
        os.close(descriptor)


def _unneeded(root: Path) -> Iterator[Path]:
    yield from _entries(root / "building")
    named = {_digest(path) for path in _entries(root / "names")}
    for path in _entries(root / "images"):
        if path.name.split(".")[0] not in named and _old(path):
            yield path
    yield from (path for path in _entries(root / "names") if path.name.startswith(".") and _old(path))


def _old(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > _GRACE


def _entries(directory: Path) -> tuple[Path, ...]:
    return tuple(sorted(directory.iterdir())) if directory.is_dir() else ()


def _digest(path: Path) -> str:
    """Of the image that a name stands for, "" when it cannot be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ""
    return str(value.get("digest", "")).removeprefix("sha256:") if isinstance(value, dict) else ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
