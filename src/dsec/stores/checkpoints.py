"""Signed heads of chains, in a file kept apart from the journal: what makes a cut tail visible.

One line of JSON a checkpoint: ``n`` counts from 1, ``previous`` is the SHA-256 of the line before, ``heads`` are
``[chain, seq, digest]``, ``signature`` is Ed25519 over the line without it.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dsec.errors import Denied, StorageFull, StoreDamaged
from dsec.stores.chain import GENESIS
from dsec.stores.ledger import Head
from dsec.stores.schema import sync_directory

MAX_LINE: Final = 2**20
MAX_HEADS: Final = 2000
_SIGNATURE: Final = b',"signature":"'


@dataclass(frozen=True, slots=True)
class Place:
    """Where the file ends: the number of its last line and that line's SHA-256."""

    n: int = 0
    digest: bytes = GENESIS


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One line that was read and whose signature is good."""

    place: Place
    heads: tuple[tuple[str, int, bytes], ...]


class BadCheckpoint(Exception):
    """Line ``n`` of the file is not what was written. Stays inside the stores."""

    def __init__(self, n: int, problem: str) -> None:
        super().__init__(problem)
        self.n = n
        self.problem = problem


def make_key(path: Path) -> Ed25519PrivateKey:
    """A new key in a new file, mode 0600, whole or not at all.  Raises: StoreDamaged: the file exists. StorageFull, Denied."""
    key = Ed25519PrivateKey.generate()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(half, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(base64.b64encode(key.private_bytes_raw()) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(half, path)  # whole, or not at all; and never over another
    except FileExistsError as exc:
        raise StoreDamaged(f"{path} exists; a key is never replaced") from exc
    except OSError as exc:
        kind = StorageFull if exc.errno in (errno.ENOSPC, errno.EDQUOT) else Denied
        raise kind(
            f"the signing key {path} cannot be written: {exc.strerror}",
            hint="free some space, or let it belong to whoever runs this",
        ) from exc
    finally:
        half.unlink(missing_ok=True)
    sync_directory(path.parent)
    return key


def load_key(path: Path) -> Ed25519PrivateKey:
    """Raises: StoreDamaged: missing, readable by others, or not a key."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            raw = base64.b64decode(file.read(200).strip(), validate=True)
        key = Ed25519PrivateKey.from_private_bytes(raw)
    except (OSError, ValueError) as exc:
        raise StoreDamaged(
            f"the signing key {path} cannot be read: {exc}", hint="restore it from a copy"
        ) from exc
    if mode & 0o077:
        raise StoreDamaged(
            f"the signing key {path} has mode {mode:04o}, others can read it", hint="chmod 600"
        )
    return key


class CheckpointFile:
    """The file, open for appending by its one writer."""

    def __init__(self, path: Path, key: Ed25519PrivateKey, engine_id: str, place: Place) -> None:
        self._key = key
        self._engine = engine_id
        self.place = place
        self._spoilt_from: int | None = None
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def append(self, heads: Mapping[str, Head], at: float) -> Place:
        """Sign ``heads``, in as many lines as they need, and sync once. On failure the file is as before.

        Raises:
            StorageFull: it cannot be written.
        """
        place, signed = self.place, list(heads.items())
        try:
            self._mend()
            before = os.fstat(self._fd).st_size
        except OSError as exc:
            raise StorageFull(f"a checkpoint cannot be written: {exc}") from exc
        try:
            for start in range(0, max(len(signed), 1), MAX_HEADS):
                line = self._line(signed[start : start + MAX_HEADS], place, at)
                written = os.write(self._fd, line)
                if written != len(line):
                    raise OSError(f"{written} of {len(line)} bytes were written")
                place = Place(place.n + 1, hashlib.sha256(line).digest())
            os.fdatasync(self._fd)
        except OSError as exc:
            self._spoilt_from = before
            with suppress(OSError):  # then before the next line
                self._mend()
            raise StorageFull(f"a checkpoint cannot be written: {exc}") from exc
        self.place = place
        return place

    def _mend(self) -> None:
        """Take away what is left of lines that could not be written.  Raises: OSError."""
        if self._spoilt_from is not None:
            os.ftruncate(self._fd, self._spoilt_from)
            self._spoilt_from = None

    def _line(self, heads: Sequence[tuple[str, Head]], before: Place, at: float) -> bytes:
        """The one after ``before``."""
        body = {
            "at": at,
            "engine": self._engine,
            "heads": [[chain, head.seq, head.digest.hex()] for chain, head in heads],
            "n": before.n + 1,
            "previous": before.digest.hex(),
            "v": 1,
        }
        text = json.dumps(body, separators=(",", ":")).encode("ascii")
        signature = base64.b64encode(self._key.sign(text))
        return text[:-1] + _SIGNATURE + signature + b'"}\n'

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def read(path: Path, public: Ed25519PublicKey) -> Iterator[Checkpoint]:
    """Every line in order, one in memory at a time. A missing file is an empty one.

    Raises:
        BadCheckpoint: at the first line that is not as it was signed.
    """
    place = Place()
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE + 1):
            checkpoint = _parse(line, place, public)
            place = checkpoint.place
            yield checkpoint


def last(path: Path, public: Ed25519PublicKey) -> tuple[Place, int]:
    """Where the file ends, and how many bytes of an unfinished line follow (a writer died in it).

    Raises:
        StoreDamaged: the last whole line is not signed with this key.
    """
    if not path.exists():
        return Place(), 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2 * MAX_LINE))
        tail = file.read()
    end = tail.rfind(b"\n") + 1
    torn = len(tail) - end
    if end == 0:
        return Place(), torn
    line = tail[tail.rfind(b"\n", 0, end - 1) + 1 : end]
    try:
        return _parse(line, None, public).place, torn
    except BadCheckpoint as exc:
        raise StoreDamaged(
            f"{path}: the last checkpoint: {exc.problem}", hint="run `dsec audit verify`"
        ) from exc


def _parse(line: bytes, before: Place | None, public: Ed25519PublicKey) -> Checkpoint:
    n = before.n + 1 if before else 0
    text, found, rest = line.rpartition(_SIGNATURE)
    if not found or not rest.endswith(b'"}\n'):
        raise BadCheckpoint(n, "not a whole signed line")
    try:
        public.verify(base64.b64decode(rest[:-3], validate=True), text + b"}")
        body = json.loads(text + b"}")
        number, previous = int(body["n"]), bytes.fromhex(body["previous"])
        heads = tuple((str(chain), int(seq), bytes.fromhex(digest)) for chain, seq, digest in body["heads"])
    except InvalidSignature as exc:
        raise BadCheckpoint(n, "its signature is not by this key") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise BadCheckpoint(n, f"it cannot be read: {exc}") from exc
    if before is not None and (number != before.n + 1 or previous != before.digest):
        raise BadCheckpoint(n, f"it says line {number}; lines before it are missing or not the signed ones")
    return Checkpoint(Place(number, hashlib.sha256(line).digest()), heads)


def check_place(place: Place, noted: tuple[int, bytes] | None, path: Path) -> None:
    """Raises: StoreDamaged: the file is shorter than the journal knows, or another."""
    if noted is None or place.n < noted[0] or (place.n == noted[0] and place.digest != noted[1]):
        known = noted[0] if noted else "no"
        raise StoreDamaged(
            f"{path} ends at checkpoint {place.n}, the journal knows {known}",
            hint="run `dsec audit verify`; restore the file from a copy",
        )
