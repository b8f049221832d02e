"""What commands print: whole JSON documents, tables, and errors."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Final

import typer

from dsec.cli.codes import BROKEN_PIPE
from dsec.cli.wording import worded
from dsec.errors import DsecError

STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2
_GAP: Final = "  "
_WRITE: Final = 1 << 16
_STREAMS: Final = {STDOUT: "standard output", STDERR: "standard error"}
# Of a message: what it quotes may be of any size.
_LINES: Final = 100  # the first ones, and as many of the last
_SHOWN: Final = 10_000  # characters of these
_LINE: Final = 2000  # characters of one


def is_tty(fd: int) -> bool:
    """Whether it is a terminal; a closed one is not."""
    try:
        return os.isatty(fd)
    except OSError:
        return False


def plain(value: object) -> object:
    """As JSON can hold it: dataclasses by field, sets sorted, paths and enums as text, bytes as base64."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, str | Path):
        return unicode(str(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Mapping):
        return {unicode(str(key)): plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(str(one) for one in value)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def unicode(text: str) -> str:
    """Undecodable bytes, which Python keeps as lone surrogates, as escapes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def text_of(data: bytes) -> dict[str, str]:
    """Bytes for a JSON document: as text when they are UTF-8, else as base64; ``encoding`` says which."""
    try:
        return {"data": data.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"data": b64encode(data).decode(), "encoding": "base64"}


def write_all(fd: int, data: bytes) -> None:
    """All of ``data``, also to a descriptor that does not block.  Raises: OSError: it names the stream."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view[:_WRITE]) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError as error:
            error.filename = _STREAMS.get(fd)
            raise


def put(text: str) -> None:
    """Text to standard output, at once and whole. A reader that has gone ends the command as SIGPIPE would."""
    sys.stdout.flush()
    try:
        write_all(STDOUT, text.encode("utf-8", "surrogateescape"))
    except BrokenPipeError:
        raise typer.Exit(BROKEN_PIPE) from None


def put_json(value: object) -> None:
    """One JSON document, encoded before its first byte is written."""
    put(json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")


def put_json_line(value: object) -> None:
    """One JSON document on one line."""
    put(json.dumps(plain(value), ensure_ascii=False) + "\n")


def put_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as what is in them: nothing is cut, so that ids can be copied and lines parsed."""
    shown = [tuple(printable(cell) for cell in row) for row in (heads, *rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(heads))]
    lines = [
        _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    put("\n".join(lines) + "\n")


def printable(text: str) -> str:
    """Control characters as escapes: what a sandbox chose must not steer the terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def complain(message: str, hint: str = "") -> None:
    """``dsec: message`` on standard error, the hint below it. Further lines of either are indented."""
    lines = _indented("dsec: ", message)
    if hint:
        lines += _indented("      hint: ", hint)
    try:
        write_all(STDERR, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
    except OSError:
        return  # nobody listens; the exit code still tells


def note(message: str) -> None:
    """``dsec: message`` on standard error: news, nothing wrong."""
    complain(message)


def _indented(head: str, text: str) -> list[str]:
    """The lines of a text, the first one behind ``head``: as many as a person reads; what is left out is counted."""
    lines = text.expandtabs().replace("\r\n", "\n").rstrip("\n").split("\n")
    begin = _within(lines)
    end = _within(lines[len(begin) :][::-1])[::-1]
    left = len(lines) - len(begin) - len(end)
    first, *others = [*begin, *([f"... ({left} lines are left out) ..."] if left else []), *end]
    return [f"{head}{first}", *(f"{' ' * len(head)}{line}".rstrip() for line in others)]


def _within(lines: Sequence[str]) -> list[str]:
    """The first of the lines, printable, within the bounds."""
    shown: list[str] = []
    room = _SHOWN
    for line in lines[:_LINES]:
        short = _short(printable(line))
        room -= len(short)
        if room < 0:
            break
        shown.append(short)
    return shown


def _short(line: str) -> str:
    if len(line) <= _LINE:
        return line
    half = _LINE // 2
    return f"{line[:half]} ... ({len(line) - 2 * half} characters) ... {line[-half:]}"


def complain_of(error: DsecError, command: str = "") -> None:
    """An error of ours, in the words of the command line."""
    complain(*worded(error, command))


def moment(seconds: float, *, milliseconds: bool = False) -> str:
    """A time in seconds since the epoch for people: ISO 8601, UTC; "-" for none."""
    if not seconds:
        return "-"
    at = datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec="milliseconds" if milliseconds else "seconds").replace("+00:00", "Z")


def duration(seconds: float) -> str:
    """Short words for a time span."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
