"""`dsec snapshot`, `snapshots`, `fork` and `rollback`: what sandboxes were, and more sandboxes made of that."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dsec.cli import options as opt
from dsec.cli.numbers import whole
from dsec.cli.output import duration, put, put_json, put_table
from dsec.cli.sandboxes import info_json
from dsec.cli.session import Signals, conduct, durable
from dsec.model.snapshots import SnapshotInfo

app = typer.Typer()

Kind = Annotated[str, typer.Option("--kind", help="What is kept.")]


def snapshot_json(info: SnapshotInfo) -> dict[str, object]:
    """A snapshot as ``--json`` shows it."""
    return {
        "id": info.id,
        "sandbox": info.sandbox,
        "kind": info.kind,
        "level": info.spec.level,
        "base": info.spec.base,
        "created_at": info.created_at,
        "paused": info.paused,
    }


@app.command()
def snapshot(sandbox: opt.SandboxIdText, kind: Kind = "files", as_json: opt.AsJson = False) -> None:
    """Keep the files of a sandbox as they are now, and print the snapshot's id. The sandbox stands still for milliseconds.

    A sandbox that begins with it: `dsec create -t ID`. To remove it: `dsec rm ID`.

    Examples:

        snap=$(dsec snapshot sb-...)

        dsec create -t "$snap"
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            info = await (await engine.sandboxes.get(sandbox)).snapshot(kind)
        if as_json:
            put_json(snapshot_json(info))
        else:
            put(f"{info.id}\n")
        return 0

    conduct(work)


@app.command()
def snapshots(
    sandbox: Annotated[
        str, typer.Argument(metavar="[ID]", help="Only of this sandbox (sb-...).", show_default=False)
    ] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only ids.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List snapshots, oldest first.

    Examples:

        dsec snapshots

        dsec rm $(dsec snapshots -q sb-...)
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            found = await engine.snapshots.list(sandbox)
        if as_json:
            put_json([snapshot_json(info) for info in found])
        elif quiet:
            put("".join(f"{info.id}\n" for info in found))
        else:
            now = time.time()
            rows = [
                (info.id, info.sandbox, info.kind.value, info.spec.base, duration(now - info.created_at))
                for info in found
            ]
            put_table(("ID", "SANDBOX", "KIND", "BASE", "AGE"), rows)
        return 0

    conduct(work)


@app.command("snapshot-export")
def export(
    snapshot: Annotated[
        str, typer.Argument(metavar="SNAPSHOT", help="Snapshot id (sn-...).", show_default=False)
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", help="That is written.", show_default=False)],
    as_json: opt.AsJson = False,
) -> None:
    """Write a snapshot, with all that its files lie over, to one file, for `dsec snapshot-import` elsewhere.

    Examples:

        dsec snapshot-export sn-... work.dsec
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            await engine.snapshots.export(await engine.snapshots.get(snapshot), file)
        if as_json:
            put_json({"exported": snapshot, "file": file})
        return 0

    conduct(work)


@app.command("snapshot-import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Of an export.", show_default=False)],
    as_json: opt.AsJson = False,
) -> None:
    """Take in a snapshot that `dsec snapshot-export` wrote, as a new one, and print its id.

    Nothing in the file is believed: it is what its digests say, or refused.

    Examples:

        dsec create -t "$(dsec snapshot-import work.dsec)"
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            info = await engine.snapshots.import_(file)
        if as_json:
            put_json(snapshot_json(info))
        else:
            put(f"{info.id}\n")
        return 0

    conduct(work)


@app.command()
def fork(
    sandbox: opt.SandboxIdText,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", help="How many.", parser=whole())] = 1,
    kind: Kind = "files",
    as_json: opt.AsJson = False,
) -> None:
    """Make sandboxes whose files begin as those of another are now. Their ids are printed: all are made, or none.

    Examples:

        dsec fork -n 4 sb-...
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            children = await (await engine.sandboxes.get(sandbox)).fork(count, kind=kind)
        if as_json:
            put_json([info_json(child.info) for child in children])
        else:
            put("".join(f"{child.id}\n" for child in children))
        return 0

    conduct(work)


@app.command()
def rollback(
    sandbox: opt.SandboxIdText,
    snapshot: Annotated[
        str, typer.Argument(metavar="SNAPSHOT", help="Snapshot id (sn-...).", show_default=False)
    ],
    as_json: opt.AsJson = False,
) -> None:
    """Make the files of a sandbox those of a snapshot again. All its processes end first.

    Examples:

        dsec rollback sb-... sn-...
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            info = await (await engine.sandboxes.get(sandbox)).rollback(snapshot)
        if as_json:
            put_json(info_json(info))
        return 0

    conduct(work)
