"""An image in one tar file, taken apart: no name in it ever becomes a path here."""

from __future__ import annotations

import posixpath
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest, TooLarge
from dsec.images.members import CHUNK, UNREADABLE, Refused, Stream, decompressed, entries, shown

_ENTRIES: Final = 10_000
_GZIP: Final = b"\x1f\x8b"
_RATIO: Final = 200
_HOPS: Final = 4


def take_apart(archive: Path, into: Path, *, max_bytes: int) -> Mapping[str, Path]:
    """Its files by their names, each stored under a number in the empty directory ``into``. Links are names of files too.

    Args:
        archive: plain or gzip.

    Raises:
        BadRequest, TooLarge, OSError.
    """
    try:
        with archive.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            limit = min(max_bytes, archive.stat().st_size * _RATIO) if packed else max_bytes
            return _take_apart(Stream(decompressed(file, packed=packed), limit), into)
    except Refused as error:
        kind = TooLarge if error.code == TooLarge.code else BadRequest
        raise kind(
            f"{archive} is no image: {error}",
            hint="make it with: docker save, or skopeo copy",
            path=str(archive),
        ) from error
    except UNREADABLE as error:
        raise BadRequest(
            f"{archive} cannot be read as a tar archive: {error}",
            hint="make it with: docker save, or skopeo copy",
            path=str(archive),
        ) from error


def _take_apart(stream: Stream, into: Path) -> Mapping[str, Path]:
    files: dict[str, Path] = {}
    links: dict[str, str] = {}
    with entries(stream) as tar:
        for count, member in enumerate(tar):
            if count >= _ENTRIES:
                raise Refused(f"it has more than {_ENTRIES} entries", "too_large")
            name = _plain(member.name)
            if member.issym():
                links[name] = _plain(posixpath.join(posixpath.dirname(name), member.linkname))
            elif member.islnk():
                links[name] = _plain(member.linkname)
            elif member.isreg():
                if member.size > stream.limit or member.issparse():
                    raise Refused(f"entry {shown(member.name)} claims {member.size} bytes", "too_large")
                files[name] = into / str(count)
                source = tar.extractfile(member)
                assert source is not None
                with files[name].open("xb") as target:
                    shutil.copyfileobj(source, target, CHUNK)
    return files | {name: found for name, target in links.items() if (found := _follow(target, files, links))}


def _plain(name: str) -> str:
    return posixpath.normpath(f"/{name}").lstrip("/")


def _follow(target: str, files: Mapping[str, Path], links: Mapping[str, str]) -> Path | None:
    for _ in range(_HOPS):
        if target in files:
            return files[target]
        target = links.get(target, "")
    return None
