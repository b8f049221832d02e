"""How far a named export has come: a small file, written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest, Busy, StorageFull, StoreDamaged

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST: Final = 2**63 - 1
_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Everything up to here was taken by the sink.

    Attributes:
        position: of the newest record that was taken, or known to be lost. uid: of that record, "" where it is lost.
        chain: the only one that is exported, "" = all. seq: in that chain.
    """

    position: int = 0
    uid: str = ""
    chain: str = ""
    seq: int = 0


class CursorFile:
    """Kept by one export at a time: a lock says who. Blocking.

    Raises:
        BadRequest: the name. Busy: another export of that name runs.
    """

    def __init__(self, directory: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise BadRequest(
                f"name: {name[:80]!r} is not 1 to 64 letters, digits or any of ._-, the first a letter or digit",
                hint="choose another --name",
            )
        directory.mkdir(mode=0o700, exist_ok=True)
        self._path = directory / f"{name}.json"
        self._lock = os.open(directory / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Busy(
                f"an export named {name!r} runs already",
                hint="choose another --name, or end that one",
                name=name,
            ) from None

    def close(self) -> None:
        """Let another one have it."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def load(self) -> Cursor | None:
        """Where the last one ended; None: it never began.  Raises: StoreDamaged: the file is not what was written."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_BYTES)
        except FileNotFoundError:
            return None
        try:
            return _checked(json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreDamaged(
                f"{self._path} does not say how far the export came",
                hint="remove it to export everything again: receivers know by the ids what they have",
            ) from error

    def save(self, cursor: Cursor) -> None:
        """Durably.  Raises: StorageFull: the one before still stands."""
        draft = self._path.with_suffix(".new")
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(json.dumps(asdict(cursor)).encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self._path)
            _sync(self._path.parent)
        except OSError as error:
            raise StorageFull(
                f"{self._path}: {error.strerror}", hint="free space under the state directory"
            ) from error


def _checked(value: object) -> Cursor:
    """Raises: ValueError, TypeError, KeyError."""
    if not isinstance(value, dict):
        raise TypeError("no object")
    numbers = [value["position"], value["seq"]]
    texts = [value["uid"], value["chain"]]
    if not all(type(one) is int and -1 <= one <= _MOST for one in numbers):
        raise ValueError("no number")
    if not all(isinstance(one, str) for one in texts) or len(value) != 4:
        raise ValueError("no text")
    return Cursor(**value)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
