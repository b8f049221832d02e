"""Blobs of images that are being fetched, kept so that a fetch that was cut off goes on with the next blob.

``sha256/<64 digits>`` as skopeo's shared directory of blobs has them; ``lock`` is held (shared) while somebody fetches. What is there
is believed only after its digest was computed: a loss of power may have torn it. A blob goes when its image is stored, and
otherwise when it is old, or too much is kept.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dsec.images.builds import open_lock, remove, try_lock
from dsec.images.disk import typed
from dsec.images.tools import Check, unstoppable
from dsec.images.tree import file_digest

_KEPT_BYTES: Final = 8 * 2**30
_KEPT_SECONDS: Final = 7 * 86400.0


class BlobCache:
    """Below one directory, which it makes (mode 0700) when absent. Blocking. Digests are ``sha256:…``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Meanwhile nothing is taken away.  Raises: Denied, StorageFull, StoreDamaged."""
        with typed(self.root):
            (self.root / "sha256").mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_lock(self.root / "lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # whoever has it alone has it for moments
            yield
        finally:
            os.close(descriptor)

    def settle(self, digests: Iterable[str], check: Check = unstoppable) -> None:
        """Take away those of these blobs that are not what their names say.  Raises: Denied, StoreDamaged."""
        with typed(self.root):
            for digest in digests:
                check()
                path = self._path(digest)
                if not os.path.lexists(path):
                    continue
                if path.is_symlink() or not path.is_file() or file_digest(path) != digest:
                    remove(path)
                else:
                    os.utime(path)

    def size(self, digests: Iterable[str]) -> int:
        """Bytes of those of these blobs that are there."""
        total = 0
        for digest in digests:
            with suppress(OSError):
                total += self._path(digest).lstat().st_size
        return total

    def link(self, digest: str, target: Path) -> bool:
        """Show one at ``target`` too, where it stays whatever happens here; False: there is none.  Raises: Denied, StorageFull, StoreDamaged."""
        with typed(self.root):
            try:
                os.link(self._path(digest), target, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    def drop(self, digests: Iterable[str]) -> None:
        """These are not needed any more, unless somebody fetches just now: then the next :meth:`prune` decides.  Raises: Denied, StoreDamaged."""
        with self._alone() as alone, typed(self.root):
            for digest in digests if alone else ():
                self._path(digest).unlink(missing_ok=True)

    def prune(
        self, *, keep_bytes: int = _KEPT_BYTES, keep_seconds: float = _KEPT_SECONDS
    ) -> tuple[Path, ...]:
        """Take away what is old, then the oldest beyond so many bytes; what went. Nothing while somebody fetches.

        Raises: Denied, StoreDamaged.
        """
        if not self.root.is_dir():
            return ()
        with self._alone() as alone, typed(self.root):
            gone = tuple(self._surplus(keep_bytes, keep_seconds)) if alone else ()
            for path in gone:
                remove(path)
        return gone

    def _surplus(self, keep_bytes: int, keep_seconds: float) -> Iterator[Path]:
        directory = self.root / "sha256"
        found = [(path, path.lstat()) for path in directory.iterdir()] if directory.is_dir() else []
        total = sum(info.st_size for _, info in found)
        for path, info in sorted(found, key=lambda pair: pair[1].st_mtime):
            if total > keep_bytes or time.time() - info.st_mtime > keep_seconds:
                total -= info.st_size
                yield path

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        descriptor = open_lock(self.root / "lock")
        try:
            yield try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, digest: str) -> Path:
        return self.root / "sha256" / digest.removeprefix("sha256:")
