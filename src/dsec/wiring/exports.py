"""An export of the journal, put together: where it reads, how it writes, where it goes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.control.exporting import Exporter, Source, Task
from dsec.errors import BadRequest
from dsec.model.checks import check_count
from dsec.observe.cursor import CursorFile
from dsec.observe.destination import (
    STREAM,
    Destination,
    Headers,
    check_secret,
    parse_destination,
    tls_context,
)
from dsec.observe.events import Origin
from dsec.observe.file_sink import FileSink, StreamSink
from dsec.observe.formats import FORMATS, LEAST_BYTES, Format
from dsec.observe.sink import Sink
from dsec.observe.text import ascii_only
from dsec.stores.tailing import JournalTail
from dsec.wiring.journals import remembered
from dsec.wiring.state import JOURNAL

EXPORTS: Final = "exports"
_SYSLOG_BYTES: Final = 8192  # what receivers take as a rule
_MOST_BYTES: Final = 2**24
_DATAGRAM: Final = 60_000
_HEAD: Final = 512  # what stands before an event in a message
_POSITION: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is asked for; see `dsec audit export --help`."""

    form: str = "jsonl"
    to: str = STREAM
    chain: str = ""
    since: float = 0.0
    after: int = 0
    follow: bool = False
    name: str = ""
    event_bytes: int = 0
    header_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    patience: float = 60.0


def exporter(
    home: Path,
    asked: Export,
    *,
    version: str,
    write: Callable[[bytes], None],
    report: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> tuple[Exporter, Sink]:
    """Of the journal of a durable engine, whether or not it is open somewhere.

    Args:
        write: to standard output.
        report: told what does not work, for people.

    Raises:
        BadRequest, Denied, Busy: what is asked for cannot be done.
    """
    form, destination = _format(asked.form), parse_destination(asked.to)
    origin = Origin(host=ascii_only(socket.gethostname(), 100).replace(" ", "_") or "-", version=version)
    sink = _sink(destination, asked, form, origin, write, environment)
    check_count("after", asked.after, 0, _POSITION)
    task = Task(
        form=form,
        origin=origin,
        chain=asked.chain,
        after=asked.after,
        since=asked.since,
        follow=asked.follow,
        limit=_limit(destination, asked.event_bytes),
        patience=asked.patience,
    )
    cursor = _cursor(home, asked.name) if asked.name else None
    return Exporter(task, lambda: _source(home / JOURNAL), sink, cursor=cursor, report=report), sink


def _source(directory: Path) -> Source:
    """The journal of a home. Blocking."""
    url = remembered(directory)
    if not url:
        return JournalTail(directory)
    from dsec.stores.postgres.tailing import PostgresTail

    return PostgresTail(url)


def _cursor(home: Path, name: str) -> CursorFile:
    """Raises: BadRequest: there is no engine whose export it could be. Busy."""
    if not home.is_dir():
        raise BadRequest(
            f"name: there is no engine in {home} yet", hint="start it first: `dsec create` or `dsec serve`"
        )
    return CursorFile(home / EXPORTS, name)


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise BadRequest(
            f"format: there is no format {name[:40]!r}", hint=f"choose one of {', '.join(sorted(FORMATS))}"
        )
    return FORMATS[name]


def _limit(destination: Destination, asked: int) -> int:
    """Bytes that an event may have; what stands around it in a message comes on top."""
    if asked:
        most = _DATAGRAM if destination.scheme == "syslog" else _MOST_BYTES
        check_count("event-bytes", asked, LEAST_BYTES, most)
        return asked
    return _SYSLOG_BYTES - _HEAD if destination.scheme.startswith("syslog") else 0


def _sink(
    destination: Destination,
    asked: Export,
    form: Format,
    origin: Origin,
    write: Callable[[bytes], None],
    environment: Mapping[str, str],
) -> Sink:
    """Only what this destination needs is loaded."""
    scheme = destination.scheme
    if scheme == STREAM:
        return StreamSink(write)
    if scheme == "file":
        return FileSink(destination.path, form.opening)
    if scheme.startswith("syslog"):
        from dsec.observe.syslog import Messages, TcpSink, UdpSink

        messages = Messages(origin.host)
        if scheme == "syslog":
            return UdpSink(destination.host, destination.port, messages)
        tls = tls_context(asked.ca, asked.certificate) if scheme == "syslog+tls" else None
        return TcpSink(destination.host, destination.port, messages, tls=tls)
    from dsec.observe.http_sink import HttpSink

    headers = Headers(asked.header_file, environment)
    check_secret(destination, headers())
    tls = tls_context(asked.ca, asked.certificate) if scheme == "https" else None
    return HttpSink(destination.url, form.content_type, headers, tls=tls)
