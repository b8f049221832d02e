"""A file system entry as a field of a payload."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from dsec.errors import ProtocolError
from dsec.model.files import Entry, FileType
from dsec.wire.layouts import PATH, Layout, Part

_TYPES: Final = (
    FileType.FILE,
    FileType.DIRECTORY,
    FileType.SYMLINK,
    FileType.FIFO,
    FileType.SOCKET,
    FileType.CHAR_DEVICE,
    FileType.BLOCK_DEVICE,
)
_NUMBER_OF: Final = {kind: number for number, kind in enumerate(_TYPES, 1)}
ENTRY: Final = Layout(PATH, "BIQIIqQI", PATH)
ENTRY_LEAST: Final = 49


def make_entry(
    name: bytes,
    kind: int,
    mode: int,
    size: int,
    uid: int,
    gid: int,
    mtime_ns: int,
    inode: int,
    links: int,
    target: bytes,
) -> Entry:
    if not 1 <= kind <= len(_TYPES) or mode > 0o7777:
        raise ProtocolError(f"an entry has type {kind} and mode {mode:#o}")
    return Entry(
        name=os.fsdecode(name),
        type=_TYPES[kind - 1],
        mode=mode,
        size=size,
        uid=uid,
        gid=gid,
        mtime_ns=mtime_ns,
        inode=inode,
        links=links,
        target=os.fsdecode(target),
    )


def split_entry(entry: Entry) -> tuple[Any, ...]:
    return (
        os.fsencode(entry.name),
        _NUMBER_OF[entry.type],
        entry.mode,
        entry.size,
        entry.uid,
        entry.gid,
        entry.mtime_ns,
        entry.inode,
        entry.links,
        os.fsencode(entry.target),
    )


class EntryPart(Part):
    """One ``entry`` as a field."""

    __slots__ = ()

    def __init__(self) -> None:
        self.count = 1

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        ENTRY.put(split_entry(values[0]), out)

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        fields: list[Any] = []
        at = ENTRY.take(data, at, fields)
        out.append(make_entry(*fields))
        return at
