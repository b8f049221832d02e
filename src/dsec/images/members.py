"""Reading strangers' tar archives: as strict as need be, bounded, in one pass."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final, Protocol, cast

CHUNK: Final = 2**18
_HEADER_BYTES: Final = 2**20  # of one long name or set of attributes: it is read into memory
_LONG: Final = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


UNREADABLE: Final = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError)
"""What reading a damaged archive raises, but for :class:`Refused`."""


class Refused(Exception):
    """An archive is not let in. ``code`` is that of the error to raise, as in :mod:`dsec.errors`."""

    def __init__(self, message: str, code: str = "bad_request") -> None:
        super().__init__(message)
        self.code = code


class Source(Protocol):
    """Where bytes come from."""

    def read(self, size: int, /) -> bytes: ...


class Stream:
    """An archive's bytes, decompressed, counted, hashed and cut off at a bound."""

    def __init__(self, source: Source, limit: int) -> None:
        self._source = source
        self.limit = limit
        self._read = 0
        self._hash = hashlib.sha256()

    def read(self, size: int = CHUNK) -> bytes:
        """Raises: Refused: over the bound."""
        data = self._source.read(size)
        self._read += len(data)
        if self._read > self.limit:
            raise Refused(f"an archive is more than {self.limit} bytes when decompressed", "too_large")
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """``sha256:…`` over all of it, the rest read first."""
        while self.read():
            pass
        return f"sha256:{self._hash.hexdigest()}"


class Member(tarfile.TarInfo):
    """An entry. A header that is none is an error wherever it stands (the library takes it for the end)."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        """Raises: Refused: a header that would be read into memory is too large."""
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in _LONG and member.size > _HEADER_BYTES):
            raise Refused(f"a header of an archive claims {member.size} bytes", "too_large")
        return member

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Member:
        """Raises: Refused."""
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.TarError as error:
            if type(error).__name__ in ("InvalidHeaderError", "TruncatedHeaderError"):
                raise Refused(f"this is no tar archive: {error}") from error
            raise


@contextmanager
def entries(stream: Stream) -> Iterator[tarfile.TarFile]:
    """The archive, to be iterated once.  Raises: Refused, and what tarfile raises."""
    with tarfile.open(
        fileobj=cast("BinaryIO", stream),
        mode="r|",
        tarinfo=Member,
        encoding="utf-8",
        errors="surrogateescape",
    ) as tar:
        yield tar


def decompressed(file: BinaryIO, *, packed: bool) -> Source:
    """What a file holds, through gzip when it is ``packed``."""
    return cast("Source", gzip.GzipFile(fileobj=file)) if packed else file


def shown(name: str) -> str:
    """For messages: bounded, printable."""
    return ascii(name if len(name) <= 200 else f"{name[:200]}…")
