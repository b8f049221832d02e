"""Paths of an image as the image means them: its symbolic links never lead out of its tree."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

_LINKS: Final = 40  # followed for one path, as the kernel does


def resolved(tree: Path, path: str) -> str:
    """The absolute path inside that ``path`` stands for once every symbolic link is followed.

    Raises: OSError: it is not there, or has too many links.
    """
    parts = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    done: list[str] = []
    links = 0
    while parts:
        part = parts.pop()
        if part == "..":
            del done[-1:]
            continue
        here = tree.joinpath(*done, part)
        if not here.is_symlink():
            here.lstat()
            done.append(part)
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, "too many symbolic links", path)
        value = str(here.readlink())
        if value.startswith("/"):
            done.clear()
        parts.extend(each for each in reversed(value.split("/")) if each not in ("", "."))
    return "/" + "/".join(done)


def find(tree: Path, path: str) -> Path | None:
    """Where on this machine the file is that the image means by ``path``; None when it has none."""
    try:
        return tree / resolved(tree, path)[1:]
    except (OSError, ValueError):  # ValueError: it has a NUL
        return None
