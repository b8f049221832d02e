"""A wheel is looked at before anything of it is written: what it would write, and how much. Every wheel may be hostile."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO, Final

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dsec.errors import TooLarge, Unsupported
from dsec.images.dependencies.bounds import Bounds
from dsec.model.checks import shown

_LARGEST_METADATA: Final = 16 * 2**20  # bytes of METADATA, RECORD and the like
_LARGEST_DIRECTORY: Final = 64 * 2**20  # bytes of a zip's central directory: some 600,000 files
_SMALL: Final = 16 * 2**20  # unpacked bytes below which the ratio does not matter
_LONGEST_NAME: Final = 255
_END: Final = b"PK\5\6"
_END64: Final = b"PK\6\7"
UNREADABLE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
)
"""What reading an archive raises that is not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a wheel says of itself. ``requires``: what it needs, its markers not yet judged."""

    name: str
    version: str
    requires: tuple[Requirement, ...]


@contextmanager
def opened(file: BinaryIO, name: str, bounds: Bounds) -> Iterator[zipfile.ZipFile]:
    """The wheel as an archive whose every entry was judged by name, kind and size.

    Args:
        name: of the wheel, for messages and as the archive's file name.

    Raises:
        Unsupported: it is no archive, or an entry leaves the tree, is a link or a device, or is there twice.
        TooLarge: more entries or bytes than the bounds, or many times its own size.
    """
    try:
        size = _check_end(file, name)
        archive = zipfile.ZipFile(file)
    except UNREADABLE as exc:
        raise broken(name, f"is no readable archive: {exc}") from exc
    with archive:
        archive.filename = name
        _check(archive.infolist(), name, size, bounds)
        yield archive


def describe(archive: zipfile.ZipFile) -> Described:
    """Name, version and needs, from its METADATA.  Raises: Unsupported: absent, unreadable, or it names a URL."""
    name = str(archive.filename)
    found = [each for each in archive.namelist() if PurePosixPath(each).match("*.dist-info/METADATA")]
    top = [each for each in found if each.count("/") == 1]
    if len(top) != 1:
        raise broken(name, f"has {len(top)} METADATA files, and one is needed")
    try:
        raw, _ = parse_email(archive.read(top[0]))
        version = str(Version(raw["version"]))
        requires = tuple(Requirement(each) for each in raw.get("requires_dist", []))
    except (*UNREADABLE, InvalidVersion, InvalidRequirement) as exc:
        raise broken(name, f"has METADATA that cannot be read: {shown(str(exc))}") from exc
    for each in requires:
        if each.url is not None:
            raise broken(name, f"wants {each.name!r} from a URL, and not from an index")
    return Described(name=canonicalize_name(raw["name"]), version=version, requires=requires)


def broken(name: str, what: str, **facts: object) -> Unsupported:
    """A wheel that will not be installed."""
    return Unsupported(
        f"wheel {name} {what}",
        hint="pin another version of the package, or ask its author for a sound wheel",
        wheel=name,
        **facts,
    )


def _check_end(file: BinaryIO, name: str) -> int:
    """Bytes of the file. Reading a directory of entries must not itself fill the memory.  Raises: TooLarge."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 2**16 - 22))
    tail = file.read()
    at = len(tail) - 22 if tail[-22:-18] == _END and tail[-2:] == b"\0\0" else tail.rfind(_END)
    if at >= 0 and len(tail) - at >= 22:
        (directory,) = struct.unpack_from("<I", tail, at + 12)
        if directory > _LARGEST_DIRECTORY or tail[max(0, at - 20) :][:4] == _END64:
            raise TooLarge(
                f"wheel {name} lists more files than {_LARGEST_DIRECTORY} bytes can name",
                hint="split the package",
                wheel=name,
            )
    file.seek(0)
    return size


def _check(entries: list[zipfile.ZipInfo], name: str, size: int, bounds: Bounds) -> None:
    """Raises: Unsupported, TooLarge."""
    if len(entries) > bounds.entries:
        raise TooLarge(
            f"wheel {name} has {len(entries)} files, {bounds.entries} are the most",
            hint="raise the bounds when this package is meant to be that large",
            wheel=name,
        )
    seen: set[str] = set()
    for entry in entries:
        problem = _problem(entry)
        if problem or entry.filename in seen:
            raise broken(name, f"has the entry {shown(entry.filename)}, which {problem or 'is there twice'}")
        seen.add(entry.filename)
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > bounds.unpacked_bytes or (unpacked > _SMALL and unpacked > size * bounds.ratio):
        raise TooLarge(
            f"wheel {name} of {size} bytes unpacks to {unpacked}: the most is {bounds.ratio} times its size and {bounds.unpacked_bytes} bytes",
            hint="raise the bounds when this package is meant to be that large",
            wheel=name,
            bytes=unpacked,
        )


def _problem(entry: zipfile.ZipInfo) -> str:
    """Why an entry is refused, or ""."""
    text = entry.filename
    parts = text.removesuffix("/").split("/")
    mode = entry.external_attr >> 16
    # A zip that was not made on a Unix has no kind here.
    kind = stat.S_IFMT(mode)
    if text.startswith("/") or any(part in ("", ".", "..") for part in parts):
        return "leaves its place"
    if "\\" in text or not text.isprintable():
        return "has characters that no file name of a package needs"
    if any(len(part.encode("utf-8", "surrogatepass")) > _LONGEST_NAME for part in parts) or len(text) > 2048:
        return "has too long a name"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is neither a file nor a directory"
    if entry.flag_bits & 1:
        return "is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is compressed in a way that wheels are not"
    special = len(parts) == 2 and parts[0].endswith(".dist-info")
    return "is larger than any metadata" if special and entry.file_size > _LARGEST_METADATA else ""
