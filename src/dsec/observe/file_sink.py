"""Events to a file or to a stream of this process."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dsec.observe.sink import Apart, Line, Refused, Sink

_SECONDS: Final = 60.0
_LOOK_BACK: Final = 2**20  # bytes: no line is longer
_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class FileSink(Sink):
    """Appends lines to a regular file, synced before they count; only one export at a time writes to it.

    A file that was moved away, removed or cut is noticed: the lines go to the file that has the name then. A line that a killed export
    left unfinished at its end is removed.

    Args:
        opening: how every line of the format begins: what a file ends with is only removed when it is such a line.
    """

    def __init__(self, path: Path, opening: bytes) -> None:
        self._path = path
        self._opening = opening
        self._fd = -1
        self._anew = False
        self._apart = Apart("dsec-export-file")

    async def send(self, lines: Sequence[Line]) -> None:
        data = b"".join([line.data + b"\n" for line in lines])
        await self._apart.run(lambda: self._append(data), _SECONDS)

    async def close(self) -> None:
        if not self._apart.busy:  # else a thread still holds it
            self._let_go()

    def reopen(self) -> None:
        self._anew = True

    def _let_go(self) -> None:
        self._anew = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: bytes) -> None:
        try:
            if self._fd < 0 or self._anew or self._elsewhere():
                self._let_go()
                self._fd = self._open()
            self._write(self._fd, data)
        except OSError as error:
            self._let_go()
            raise Refused(f"{self._path}: {error.strerror or error}") from error
        except Refused:
            self._let_go()
            raise

    def _write(self, fd: int, data: bytes) -> None:
        """All of it, synced; of what fails, nothing is left."""
        before = os.fstat(fd).st_size
        try:
            _write_all(fd, data)
            os.fsync(fd)
        except OSError:
            if os.fstat(fd).st_size > before:
                os.ftruncate(fd, before)
            raise
        after = os.fstat(fd)
        if after.st_nlink == 0 or after.st_size < before + len(data):
            raise Refused(f"{self._path}: it was removed or cut meanwhile")

    def _elsewhere(self) -> bool:
        """Whether the name means another file now, or none."""
        ours = os.fstat(self._fd)
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return True
        return (ours.st_dev, ours.st_ino) != (named.st_dev, named.st_ino)

    def _open(self) -> int:
        fresh = not self._path.exists()
        fd = os.open(self._path, _FLAGS, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Refused(f"{self._path} is no regular file", lasting=True)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(f"another export writes to {self._path}") from None
            self._mend(fd)
            if fresh:
                _sync_directory(self._path.parent)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _mend(self, fd: int) -> None:
        """Remove an unfinished last line of ours."""
        size = os.fstat(fd).st_size
        begin = max(0, size - _LOOK_BACK)
        tail = os.pread(fd, size - begin, begin)
        rest = tail[tail.rfind(b"\n") + 1 :]
        if not rest:
            return
        whole = len(rest) == len(tail) and begin > 0  # no end of a line as far as we look
        if whole or not (rest.startswith(self._opening) or self._opening.startswith(rest)):
            raise Refused(f"{self._path} does not end as an export of this format does", lasting=True)
        os.ftruncate(fd, size - len(rest))


class StreamSink(Sink):
    """Writes lines to a stream: whoever reads it has them when they are written.

    Args:
        write: all of it, or an error; may block.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._apart = Apart("dsec-export-stream")

    async def send(self, lines: Sequence[Line]) -> None:
        data = b"".join([line.data + b"\n" for line in lines])
        await self._apart.run(lambda: self._write(data), _FOR_EVER)

    async def close(self) -> None:
        return


_FOR_EVER: Final = 10.0**9  # a reader may take its time: a pager, for instance


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.write(fd, view)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view = view[count:]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
