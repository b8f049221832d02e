"""What an image store holds, who needs it, and taking an image out by hand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsec.errors import Conflict, NotFound
from dsec.images.builds import locked, remove
from dsec.images.disk import damaged, typed
from dsec.images.holds import holders
from dsec.images.shelf import DIGEST, Shelf, read_json
from dsec.model.images import ImageInfo

_WAIT_SECONDS: Final = 60.0
_NAMED: Final = 10  # holders that a message names


def stored(root: Path) -> tuple[ImageInfo, ...]:
    """Every image below ``root``, by name; those that no name stands for come last. Blocking.

    Raises: StoreDamaged, Denied.
    """
    shelf = Shelf(root)
    if not root.exists():
        return ()
    names: dict[str, list[str]] = {}
    for name, meaning in shelf.names():
        names.setdefault(str(meaning["digest"]), []).append(name)
    with typed(root):
        files = sorted((root / "images").glob("*.erofs"))
        held = holders(root)
    found = [each for path in files if (each := _info(path, names, held)) is not None]
    return tuple(sorted(found, key=lambda each: (not each.names, each.names, each.digest)))


def find(root: Path, digest: str) -> ImageInfo:
    """Raises: NotFound, StoreDamaged, Denied."""
    for each in stored(root):
        if each.digest == digest:
            return each
    raise _absent(digest)


def take_out(root: Path, name: str, digest: str) -> ImageInfo:
    """Remove a name, and the image with it when no other name stands for it; with ``name`` "" the image and all its names.

    Sandboxes that run on it go on. Blocking.

    Raises:
        Conflict: somebody needs it. NotFound. Busy, Denied, StoreDamaged.
    """
    with locked(root / "lock", seconds=_WAIT_SECONDS), typed(root):
        info = find(root, digest)
        going = info.names if not name or info.names == (name,) else ()
        if (going or not info.names) and info.held_by:
            raise _needed(name or digest, info)
        for path in _keys(root, (name,) if name and not going else info.names):
            path.unlink(missing_ok=True)
        if going or not info.names:
            for path in sorted((root / "images").glob(f"{digest.removeprefix('sha256:')}.*")):
                remove(path)
    return info


def _info(
    path: Path, names: Mapping[str, list[str]], held: Mapping[str, tuple[str, ...]]
) -> ImageInfo | None:
    """None: it went meanwhile."""
    digest = f"sha256:{path.stem}"
    if not DIGEST.fullmatch(digest):
        return None
    try:
        info = path.lstat()
        facts = read_json(path.with_suffix(".json"))
        used = path.with_suffix(".used")
        used_at = used.lstat().st_mtime if used.exists() else info.st_mtime
    except FileNotFoundError:
        return None
    created, sources = facts.get("created"), facts.get("sources", [])
    if not isinstance(created, int | float) or not isinstance(sources, list):
        raise damaged(path.with_suffix(".json"), "does not say when it was made, and of what")
    return ImageInfo(
        digest=digest,
        names=tuple(names.get(digest, ())),
        sources=tuple(map(str, sources)),
        size=info.st_size,
        mutable=bool(facts.get("shows")),
        created_at=float(created),
        used_at=used_at,
        held_by=held.get(path.stem, ()),
    )


def _keys(root: Path, names: tuple[str, ...]) -> list[Path]:
    """The files of these names."""
    shelf, found = Shelf(root), []
    for entry in os.scandir(root / "names"):
        meaning = None if entry.name.startswith(".") else shelf.meaning(entry.name)
        if meaning is not None and str(meaning.get("name", entry.name)) in names:
            found.append(Path(entry.path))
    return found


def _needed(what: str, info: ImageInfo) -> Conflict:
    others = len(info.held_by) - _NAMED
    more = f" and {others} more" if others > 0 else ""
    return Conflict(
        f"image {what} is needed by {', '.join(info.held_by[:_NAMED])}{more}",
        hint="remove those templates, or the sandboxes and snapshots of those engines, first",
        held_by=list(info.held_by),
        digest=info.digest,
    )


def _absent(digest: str) -> NotFound:
    return NotFound(
        f"no image {digest:.80} is stored", hint="`dsec image ls` shows those that are", digest=digest[:80]
    )
