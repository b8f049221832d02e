"""`dsec events` and `dsec audit`: readings of the journal, also while another command has the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer

from dsec.cli import options as opt
from dsec.cli.exporting import audit_export
from dsec.cli.numbers import whole
from dsec.cli.output import moment, plain, printable, put, put_json, put_json_line
from dsec.cli.session import Signals, conduct, durable, elsewhere, engine_home
from dsec.errors import NotFound
from dsec.model.ids import SandboxId, parse_sandbox_id
from dsec.model.journal import Record
from dsec.model.sandbox import State
from dsec.stores.retention import ENGINE
from dsec.wiring import journal_reader, verify_journal

app = typer.Typer()
audit = typer.Typer(help="Verify, read and export the journal.", no_args_is_help=True)
app.add_typer(audit, name="audit")
audit.command("export")(audit_export)

_PAGE: Final = 1000
_POLL: Final = 0.25  # seconds
_LIVE: Final = frozenset({State.PENDING, State.RUNNING, State.PAUSED, State.STOPPING})


def record_json(record: Record) -> dict[str, object]:
    """A record as ``--json`` shows it."""
    return {
        "chain": record.chain,
        "seq": record.seq,
        "at": record.at,
        "act": record.act,
        "phase": record.phase,
        "ref": record.ref,
        "actor": record.actor,
        "payload": record.payload,
        "digest": record.digest,
    }


def record_line(record: Record) -> str:
    """A record for people, on one line: when, number, what, phase, by whom, which command, facts."""
    at = moment(record.at, milliseconds=True)
    facts = json.dumps(plain(record.payload), ensure_ascii=False)
    what = f"{record.act:<18} {record.phase.value:<6} {record.actor or '-':<8}"
    return printable(f"{at} {record.seq:>5} {what} {record.ref or '-'} {facts}") + "\n"


@app.command()
def events(
    sandbox: opt.SandboxIdText,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the sandbox has ended.")
    ] = False,
    after: Annotated[
        int, typer.Option("--after", metavar="SEQ", help="Only later records.", parser=whole(0))
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document a line.")] = False,
) -> None:
    """Show the records of a sandbox in the journal: what was done, by whom, and how it ended.

    Examples:

        dsec events sb-...

        dsec events --follow --json sb-... | jq -r .act
    """
    wanted = parse_sandbox_id(sandbox)
    show = _shower(as_json)

    async def work(signals: Signals) -> int:
        del signals
        if elsewhere():
            return await _told(wanted, after, show, follow=follow)
        seq = after
        with journal_reader(engine_home()) as reader:
            while True:
                live = (
                    reader.sandbox(wanted).state in _LIVE
                )  # before its records: the last of them is not missed
                while records := reader.records(wanted, after=seq, limit=_PAGE):
                    seq = records[-1].seq
                    show(records)
                if not (follow and live):
                    return 0
                await asyncio.sleep(_POLL)

    conduct(work)


async def _told(
    wanted: SandboxId, seq: int, show: Callable[[tuple[Record, ...]], None], *, follow: bool
) -> int:
    """The same, of an engine whose journal is elsewhere."""
    async with durable() as engine:
        sandbox = await engine.sandboxes.get(wanted)
        while True:
            live = (await sandbox.inspect()).state in _LIVE
            while records := await sandbox.events(after=seq, limit=_PAGE):
                seq = records[-1].seq
                show(records)
            if not (follow and live):
                return 0
            await asyncio.sleep(_POLL)


def _shower(as_json: bool) -> Callable[[tuple[Record, ...]], None]:
    def lines(records: tuple[Record, ...]) -> None:
        put("".join(map(record_line, records)))

    def documents(records: tuple[Record, ...]) -> None:
        for record in records:
            put_json_line(record_json(record))

    return documents if as_json else lines


@app.command("backup")
def backup(
    to: Annotated[Path, typer.Argument(metavar="DIR", help="Made; not there yet.", show_default=False)],
) -> None:
    """Copy what is recorded, and keys and projects, to a directory, whether or not a server runs.

    It holds the journal with its checkpoints, the key that signs them, and the control database. Files of sandboxes are not in it: `dsec snapshot-export` and `dsec template export` write those.

    Examples:

        dsec backup /backup/2026-12-01
    """
    backups = import_module("dsec.wiring.backups")  # slow to load
    backups.back_up(engine_home(), to.absolute())


@audit.command("verify")
def audit_verify(as_json: opt.AsJson = False) -> None:
    """Check every record against its chain and the signed checkpoints; names the first bad record of each chain, and cut tails.

    Exit code 1 when anything is wrong. Works whether or not an engine is open.

    Examples:

        dsec audit verify
    """
    findings = verify_journal(engine_home())
    if as_json:
        put_json({"sound": not findings, "findings": findings})
    elif findings:
        put("".join(printable(f"{one.chain} record {one.seq}: {one.problem}") + "\n" for one in findings))
    else:
        with journal_reader(engine_home()) as reader:
            dropped = reader.dropped()
        put("sound\n")
        if dropped:
            put(
                f"{dropped} chains were dropped to keep the journal within its bound: dsec audit log engine\n"
            )
    if findings:
        raise typer.Exit(1)


@audit.command("log")
def audit_log(
    chain: Annotated[
        str | None, typer.Argument(metavar="[CHAIN]", help="A sandbox id, or engine.", show_default=False)
    ] = None,
    after: Annotated[
        int, typer.Option("--after", metavar="SEQ", help="Only later records.", parser=whole(0))
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document a line.")] = False,
) -> None:
    """Print the records of one chain or of all of them, a line each.

    Examples:

        dsec audit log engine

        dsec audit log --json > journal.jsonl
    """
    show = _shower(as_json)
    with journal_reader(engine_home()) as reader:
        for name in _chains(reader.chains(), chain):
            if chain is None and not as_json:
                put(f"# {printable(name)}\n")
            seq = after
            while records := reader.records(name, after=seq, limit=_PAGE):
                seq = records[-1].seq
                show(records)


def _chains(have: tuple[str, ...], wanted: str | None) -> tuple[str, ...]:
    """All, or the one that is wanted.  Raises: NotFound."""
    if wanted is None:
        return have
    if wanted != ENGINE and wanted not in have:  # an engine that did nothing yet has no records, but a chain
        raise NotFound(
            f"there is no chain {wanted!r} in the journal",
            hint=f"a chain is {ENGINE!r} or the id of a sandbox: `dsec ls --all -q` lists those",
            chain=wanted,
            chains=len(have),
        )
    return (wanted,)
