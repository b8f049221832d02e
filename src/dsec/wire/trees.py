"""The byte stream of ``TREE``: records of a whole directory tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsec.errors import ProtocolError
from dsec.model.files import FileType, TreePiece, TreeTag
from dsec.wire.entries import ENTRY, ENTRY_LEAST, make_entry, split_entry
from dsec.wire.frames import MAX_PATH, U32

_TAG_ENTRY, _TAG_CONTENT, _TAG_FILE_END, _TAG_TREE_END = 1, 2, 3, 4
_TAG_OF: Final = {TreeTag.FILE_END: _TAG_FILE_END, TreeTag.TREE_END: _TAG_TREE_END}
_MAX_ENTRY: Final = ENTRY_LEAST + 2 * MAX_PATH


def encode_tree(piece: TreePiece) -> bytes:
    """One tree record.  Raises: ProtocolError."""
    if piece.tag is TreeTag.CONTENT:
        return bytes((_TAG_CONTENT,)) + U32.pack(len(piece.content)) + piece.content
    if piece.tag is TreeTag.ENTRY:
        if piece.entry is None:
            raise ProtocolError("a tree entry without its entry")
        body = ENTRY.encode(split_entry(piece.entry))
        return bytes((_TAG_ENTRY,)) + U32.pack(len(body)) + body
    return bytes((_TAG_OF[piece.tag], piece.status))


def check_relative(name: str) -> None:
    """Raises: ProtocolError: absolute, empty, or with an empty, ``.`` or ``..`` part."""
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise ProtocolError(f"path {name!r} is not relative without '.' and '..'", path=name)


class TreeReader:
    """Cuts the byte stream of ``TREE`` into pieces; content is handed on as it comes, never collected."""

    __slots__ = ("_buffer", "_content", "_in_file", "_started", "done")

    def __init__(self) -> None:
        self._buffer = b""
        self._content = 0
        self._in_file = False
        self._started = False
        self.done = False

    def feed(self, data: bytes) -> Iterator[TreePiece]:
        """The pieces in ``data``; consume them all before the next call.  Raises: ProtocolError."""
        view = memoryview(self._buffer + data if self._buffer else data)
        at = 0
        while at < len(view):
            if self.done:
                raise ProtocolError(f"{len(view) - at} bytes after the end of the tree")
            if self._content:
                take = min(self._content, len(view) - at)
                self._content -= take
                yield TreePiece(TreeTag.CONTENT, content=bytes(view[at : at + take]))
                at += take
                continue
            piece, used = self._record(view[at:])
            if not used:
                break
            at += used
            if piece is not None:
                yield piece
        self._buffer = bytes(view[at:])

    def _record(self, view: memoryview) -> tuple[TreePiece | None, int]:
        """One record (None for the head of content) and its size; size 0 when it is not whole yet."""
        tag = view[0]
        if tag in (_TAG_FILE_END, _TAG_TREE_END):
            return (self._end(tag, view[1]), 2) if len(view) > 1 else (None, 0)
        if tag not in (_TAG_ENTRY, _TAG_CONTENT):
            raise ProtocolError(f"tree record with tag {tag}")
        if len(view) < 5:
            return None, 0
        (length,) = U32.unpack_from(view, 1)
        if tag == _TAG_CONTENT:
            if not self._in_file:
                raise ProtocolError("content in a tree outside a file")
            self._content = length
            return None, 5
        if length > _MAX_ENTRY:
            raise ProtocolError(f"tree entry of {length} bytes, at most {_MAX_ENTRY}")
        if len(view) < 5 + length:
            return None, 0
        return self._entry(bytes(view[5 : 5 + length])), 5 + length

    def _entry(self, body: bytes) -> TreePiece:
        if self._in_file:
            raise ProtocolError("a tree entry before the end of the file before it")
        entry = make_entry(*ENTRY.decode(body))
        if not self._started:
            if entry.name != ".":
                raise ProtocolError(f"a tree begins with {entry.name!r}, not '.'")
        else:
            check_relative(entry.name)
        self._started = True
        self._in_file = entry.type is FileType.FILE
        return TreePiece(TreeTag.ENTRY, entry=entry)

    def _end(self, tag: int, status: int) -> TreePiece:
        if status > 2:
            raise ProtocolError(f"end of a tree or file with status {status}")
        if tag == _TAG_FILE_END:
            if not self._in_file:
                raise ProtocolError("end of a file in a tree outside a file")
            self._in_file = False
            return TreePiece(TreeTag.FILE_END, status=status)
        if not self._started or (self._in_file and status == 0):
            raise ProtocolError("a tree ends before its root or inside a file")
        self.done = True
        return TreePiece(TreeTag.TREE_END, status=status)
