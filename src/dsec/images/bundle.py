"""Files that hold trees and a few facts about them, to be carried from one machine to another.

``dsec bundle 1`` and a newline; eight bytes, the length of the manifest; the manifest, JSON; the archives of the trees
(:mod:`dsec.images.tree_archive`, through gzip) in the order in which the manifest names them; SHA-256 of all before. The same trees and facts
give the same bytes, with the same release of zlib.

The sum at the end is against damage. Against lies nothing in a bundle is believed: trees are unpacked where they can do no harm, and known by
the digest that is computed then.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from dsec.errors import BadRequest, TooLarge
from dsec.images.tools import Check, unstoppable
from dsec.images.tree_archive import write_tree
from dsec.images.unpack import MAX_BYTES, MAX_ENTRIES, run_child

MAGIC: Final = b"dsec bundle 1\n"
SUM_BYTES: Final = 32
_LENGTH_BYTES: Final = 8
_MANIFEST_BYTES: Final = 4 * 2**20
_TREES: Final = 64
_LEVEL: Final = 1  # of gzip: more takes twice the time for a tenth of the bytes
_CHUNK: Final = 2**20
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HINT: Final = "it was damaged on its way, or somebody made it to do harm: get it from its maker again"


@dataclass(frozen=True, slots=True)
class Part:
    """Where the archive of a tree is in a bundle: bytes."""

    digest: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """One that is whole. ``kind``: of what. ``about``: facts, of which none was checked. ``parts``: its trees."""

    path: Path
    kind: str
    about: Mapping[str, Any]
    parts: tuple[Part, ...]

    def part(self, digest: str) -> Part:
        """Raises: BadRequest: it has no such tree."""
        found = next((part for part in self.parts if part.digest == digest), None)
        if found is None:
            raise _refused(f"it lacks the tree {digest:.80}")
        return found


def pack_tree(tree: Path, target: Path, check: Check) -> None:
    """Write the archive of a tree that nobody changes as a new file. Blocking.  Raises: OSError."""
    with target.open("xb") as file, gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
        write_tree(tree, cast("BinaryIO", packed), check)


def head(kind: str, about: Mapping[str, Any], trees: Sequence[tuple[str, int]]) -> bytes:
    """What a bundle begins with.

    Args:
        trees: of each its digest, and the bytes of its archive.
    """
    listed = [{"digest": digest, "size": size} for digest, size in trees]
    whole = {"kind": kind, "about": about, "trees": listed}
    manifest = json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()
    return MAGIC + len(manifest).to_bytes(_LENGTH_BYTES, "big") + manifest


def read_bundle(path: Path, kind: str, *, check: Check = unstoppable) -> Bundle:
    """Look into a bundle; all of it is read. Blocking.

    Raises:
        BadRequest: it is none, damaged, or of another kind. OSError.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BadRequest(
                f"this is no exported {kind}", hint=f"name a file that an export of a {kind} wrote"
            )
        size = int.from_bytes(file.read(_LENGTH_BYTES), "big")
        if size > _MANIFEST_BYTES:
            raise _refused(f"its manifest claims {size} bytes")
        manifest = _parsed(file.read(size))
        bundle = _bundle(path, manifest, len(MAGIC) + _LENGTH_BYTES + size)
        end = bundle.parts[-1].offset + bundle.parts[-1].size
        found = path.stat().st_size
        if found != end + SUM_BYTES:
            raise _refused(f"it has {found} bytes, not {end + SUM_BYTES}")
        if _sum(file, end, check) != file.read():
            raise _refused("its sum is wrong")
    if bundle.kind != kind:
        raise BadRequest(
            f"the file holds a {bundle.kind!r:.50}, not a {kind}",
            hint="import it as what it is",
            kind=bundle.kind[:50],
        )
    return bundle


def unpack_part(
    bundle: Bundle,
    part: Part,
    tree: Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_entries: int = MAX_ENTRIES,
    check: Check = unstoppable,
) -> None:
    """Make the tree that a part holds in an empty directory. Whether it is the one it should be is not known then. Blocking; needs root.

    Raises:
        BadRequest: it is damaged or hostile. TooLarge, StorageFull, Busy, RuntimeUnavailable.
    """
    with bundle.path.open("rb") as file:
        job = {
            "root": str(tree),
            "fd": file.fileno(),
            "offset": part.offset,
            "size": part.size,
            "max_bytes": max_bytes,
            "max_entries": max_entries,
        }
        run_child("tree_unpacker", job, [file.fileno()], check)


def _sum(file: BinaryIO, end: int, check: Check) -> bytes:
    """Of the first ``end`` bytes; the file stands behind them then."""
    file.seek(0)
    found = hashlib.sha256()
    while end:
        check()
        data = file.read(min(_CHUNK, end))
        found.update(data)
        end -= len(data)
        if not data:
            break
    return found.digest()


def _parsed(manifest: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise _refused(f"its manifest is no JSON: {error!s:.100}") from error
    if not isinstance(value, dict):
        raise _refused("its manifest is no object")
    return value


def _bundle(path: Path, manifest: Mapping[str, Any], offset: int) -> Bundle:
    kind, about, trees = (manifest.get(name) for name in ("kind", "about", "trees"))
    if not (isinstance(kind, str) and isinstance(about, dict) and isinstance(trees, list) and trees):
        raise _refused("its manifest lacks a part")
    if len(trees) > _TREES:
        raise TooLarge(f"a bundle of {len(trees)} trees", hint=f"{_TREES} at most", limit=_TREES)
    parts: list[Part] = []
    for each in trees:
        digest, size = (each.get("digest"), each.get("size")) if isinstance(each, dict) else (None, None)
        if not (
            isinstance(digest, str) and _DIGEST.fullmatch(digest) and type(size) is int and 0 < size < 2**48
        ):
            raise _refused("its manifest names a tree that is none")
        parts.append(Part(digest, offset, size))
        offset += size
    if len({part.digest for part in parts}) != len(parts):
        raise _refused("its manifest names a tree twice")
    return Bundle(path, kind, about, tuple(parts))


def _refused(why: str) -> BadRequest:
    return BadRequest(f"this is no bundle: {why}", hint=_HINT)
