"""`dsec audit export`: the journal for other systems."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import dsec
from dsec.cli.codes import BROKEN_PIPE, SIGNALLED
from dsec.cli.numbers import whole
from dsec.cli.output import STDOUT, note, write_all
from dsec.cli.session import Signals, conduct, engine_home
from dsec.control.exporting import Exporter
from dsec.observe.sink import Sink
from dsec.wiring.exports import Export, exporter

_WHERE = "Where to"
_WHAT = "What"


def moment_of(text: str | float) -> float:
    """Seconds since the epoch of ``2026-11-30T12:00:00Z`` or of a number.  Raises: typer.BadParameter."""
    if isinstance(text, float):
        return text
    try:
        if text.replace(".", "", 1).isdigit() and text.isascii() and len(text) < 20:
            return float(text)
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r:.60} is not a time: write 2026-11-30T12:00:00Z, or seconds since the epoch"
        ) from None


_Form = Annotated[
    str,
    typer.Option("--format", metavar="FORMAT", help="jsonl, ocsf (1.5.0) or cef.", rich_help_panel=_WHAT),
]
_Chain = Annotated[
    str,
    typer.Option(
        "--chain",
        metavar="ID",
        help="Only this chain: a sandbox id, or engine.",
        show_default=False,
        rich_help_panel=_WHAT,
    ),
]
_Since = Annotated[
    float,
    typer.Option(
        "--since",
        metavar="TIME",
        help="Begin with what is not older: 2026-11-30T12:00:00Z, or seconds since the epoch.",
        parser=moment_of,
        show_default=False,
        rich_help_panel=_WHAT,
    ),
]
_After = Annotated[
    int,
    typer.Option(
        "--after",
        metavar="POSITION",
        help="Begin behind this position.",
        parser=whole(0),
        show_default=False,
        rich_help_panel=_WHAT,
    ),
]
_Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on for ever.", rich_help_panel=_WHAT)]
_To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DESTINATION",
        help="A file, - (standard output), syslog://HOST:514 (UDP), syslog+tcp://, syslog+tls://, http:// or https://.",
        rich_help_panel=_WHERE,
    ),
]
_Name = Annotated[
    str,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Remember under this name how far it came, and go on from there: --since and --after then only say where the first one begins.",
        show_default=False,
        rich_help_panel=_WHERE,
    ),
]
_HeaderFile = Annotated[
    Path | None,
    typer.Option(
        "--header-file",
        metavar="FILE",
        help="Lines `Name: value` to add to requests, such as Authorization; only you may read it. $DSEC_EXPORT_HEADERS does the same.",
        rich_help_panel=_WHERE,
    ),
]
_Authority = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Certificates (PEM) by which the receiver is verified, instead of the system's.",
        rich_help_panel=_WHERE,
    ),
]
_Certificate = Annotated[
    Path | None,
    typer.Option(
        "--cert",
        metavar="FILE",
        help="Our certificate with its key (PEM), for receivers that want one.",
        rich_help_panel=_WHERE,
    ),
]
_EventBytes = Annotated[
    int,
    typer.Option(
        "--event-bytes",
        metavar="N",
        help="Leave the payload out of longer events, and tell its digest; by default 7680 for syslog, else none is too long.",
        parser=whole(0),
        show_default=False,
        rich_help_panel=_WHERE,
    ),
]


def audit_export(
    form: _Form = "jsonl",
    chain: _Chain = "",
    since: _Since = 0.0,
    after: _After = 0,
    follow: _Follow = False,
    to: _To = "-",
    name: _Name = "",
    header_file: _HeaderFile = None,
    ca: _Authority = None,
    certificate: _Certificate = None,
    event_bytes: _EventBytes = 0,
) -> None:
    """Write the journal for other systems: files, syslog, a SIEM. Every event at least once, each with an id that never changes.

    Works whether or not an engine is open. SIGHUP begins a file anew; SIGTERM ends after what is under way.

    Examples:

        dsec audit export --format ocsf > events.jsonl

        dsec audit export --name siem --format ocsf --follow --to https://collector.example/ingest

        dsec audit export --name syslog --format cef --follow --to syslog+tls://logs.example:6514
    """
    asked = Export(
        form=form,
        to=to,
        chain=chain,
        since=since,
        after=after,
        follow=follow,
        name=name,
        event_bytes=event_bytes,
        header_file=header_file,
        ca=ca,
        certificate=certificate,
    )

    async def work(signals: Signals) -> int:
        make = partial(exporter, engine_home(), asked, version=dsec.__version__, write=_write, report=note)
        export, sink = await asyncio.to_thread(make)
        ender = Ender(export, sink, asyncio.current_task())
        with signals.to(ender.take):
            await export.run()
        if to != "-":
            note(f"{export.exported} events exported, up to position {export.position}")
        return SIGNALLED + ender.signo if ender.signo else 0

    conduct(work)


class Ender:
    """What signals do to an export: SIGHUP begins its file anew, the first other one ends it in order, a second one at once."""

    def __init__(self, export: Exporter, sink: Sink, task: asyncio.Task[int] | None) -> None:
        self._export = export
        self._sink = sink
        self._task = task
        self.signo = 0

    async def take(self, signo: int) -> None:
        """One signal."""
        if signo == signal.SIGHUP:
            self._sink.reopen()
        elif self.signo:
            if self._task is not None:
                self._task.cancel()
        else:
            self.signo = signo
            self._export.stop()


def _write(data: bytes) -> None:
    try:
        write_all(STDOUT, data)
    except BrokenPipeError:
        raise typer.Exit(BROKEN_PIPE) from None
