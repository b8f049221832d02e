"""Wheels on disk by the digest of their bytes, checked whenever one is used.

``wheels/<sha256>.whl`` the wheels, ``http/`` what pip has downloaded whole (so that a run that was killed is taken up where its last
file ended), ``work/`` half-made things of the runs that live, ``lock`` held by them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dsec.images.dependencies.lock import Locked


class WheelCache:
    """Wheels below one directory, made (mode 0700) when absent. Several processes may use it at once.

    Args:
        root: of the cache, on one file system.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.http = root / "http"
        self._wheels = root / "wheels"
        self._work = root / "work"

    @contextmanager
    def run(self) -> Iterator[Path]:
        """A directory of this run, removed after it. Removes what runs left that were killed.  Raises: OSError."""
        for directory in (self.root, self._wheels, self._work):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._sweep(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            work = self._work / secrets.token_hex(8)
            work.mkdir(mode=0o700)
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
        finally:
            os.close(descriptor)

    def open(self, wanted: Locked) -> BinaryIO | None:
        """The wheel, all of its bytes checked; None when it is not here. One that is damaged is removed.  Raises: OSError."""
        path = self._path(wanted.sha256)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        try:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found == wanted.sha256 and file.tell() == wanted.size:
                file.seek(0)
                return file
        except BaseException:
            file.close()
            raise
        file.close()
        path.unlink(missing_ok=True)
        return None

    def has(self, wanted: Locked) -> bool:
        """Whether the wheel is here, all of its bytes checked.  Raises: OSError."""
        file = self.open(wanted)
        if file is None:
            return False
        file.close()
        return True

    def take(self, path: Path, sha256: str) -> None:
        """Move a whole file that has this digest into the cache.  Raises: OSError."""
        path.chmod(0o600)
        path.replace(self._path(sha256))

    def prune(self, keep_bytes: int) -> int:
        """Remove what was used longest ago until this much is left; the bytes removed. Nothing while a run lives.

        Raises: OSError.
        """
        if not self.root.is_dir():
            return 0
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not self._sweep(descriptor):
                return 0
            files = [path for top in (self._wheels, self.http) for path in top.rglob("*") if path.is_file()]
            ages = sorted(
                (max(info.st_atime, info.st_mtime), info.st_size, str(path)) for path, info in _infos(files)
            )
            left = total = sum(size for _, size, _ in ages)
            for _, size, path in ages:
                if left <= keep_bytes:
                    break
                Path(path).unlink(missing_ok=True)
                left -= size
            return total - left
        finally:
            os.close(descriptor)

    def _path(self, sha256: str) -> Path:
        return self._wheels / f"{sha256}.whl"

    def _sweep(self, descriptor: int) -> bool:
        """Remove half-made things when nobody lives whose they could be; whether the lock is ours alone now."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for path in self._work.iterdir() if self._work.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)
        # pip writes beside what it is going to replace.
        for path in self.http.rglob("*.tmp") if self.http.is_dir() else ():
            path.unlink(missing_ok=True)
        return True


def _infos(paths: list[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in paths:
        with suppress(FileNotFoundError):
            yield path, path.stat()
