"""`dsec volume`: files that sandboxes use one after the other."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dsec.cli import options as opt
from dsec.cli.numbers import mib
from dsec.cli.output import duration, printable, put, put_json, put_table
from dsec.cli.sandboxes import readable, words
from dsec.cli.session import Signals, conduct, durable
from dsec.model.sandbox import MIB
from dsec.model.volumes import DEFAULT_PROJECT, DEFAULT_SIZE_MIB, VolumeInfo

app = typer.Typer()
volume = typer.Typer(no_args_is_help=True)
app.add_typer(volume, name="volume", help="Files that sandboxes use one after the other.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the volume.", show_default=False)]


def volume_json(info: VolumeInfo) -> dict[str, object]:
    """A volume as ``--json`` shows it."""
    return {
        "id": info.id,
        "project": info.project,
        "name": info.name,
        "size_mib": info.size_mib,
        "used_bytes": info.used_bytes,
        "created_at": info.created_at,
        "writer": info.writer or "",
        "readers": info.readers,
    }


@volume.command("create")
def create(
    name: Name,
    size: Annotated[
        int,
        typer.Option(
            "--size", metavar="SIZE", help="What it may come to hold: 1024 (MiB), 500M or 10G.", parser=mib
        ),
    ] = DEFAULT_SIZE_MIB,
    project: opt.Project = DEFAULT_PROJECT,
    as_json: opt.AsJson = False,
) -> None:
    """Make an empty volume, and print its name. It takes room as it fills, and lasts until it is removed.

    Examples:

        dsec volume create data --size 2G

        dsec create -v data:/data
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            info = await engine.volumes.create(name, size_mib=size, project=project)
        if as_json:
            put_json(volume_json(info))
        else:
            put(f"{info.name}\n")
        return 0

    conduct(work)


@volume.command("ls")
def list_(
    project: opt.Project = DEFAULT_PROJECT,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only names.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List the volumes of a project.

    Examples:

        dsec volume ls
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            found = await engine.volumes.list(project=project)
        if as_json:
            put_json([volume_json(info) for info in found])
        elif quiet:
            put("".join(f"{info.name}\n" for info in found))
        else:
            _show(found)
        return 0

    conduct(work)


def _show(infos: tuple[VolumeInfo, ...]) -> None:
    now = time.time()
    rows = [
        (
            info.name,
            f"{info.size_mib} MiB",
            f"{info.used_bytes / MIB:.1f} MiB" if info.used_bytes >= 0 else "-",
            duration(now - info.created_at),
            info.writer or "-",
            str(len(info.readers)),
        )
        for info in infos
    ]
    put_table(("NAME", "SIZE", "USED", "AGE", "WRITER", "READERS"), rows)


@volume.command("inspect")
def inspect(name: Name, project: opt.Project = DEFAULT_PROJECT, as_json: opt.AsJson = False) -> None:
    """Show what is known of a volume: what it holds, and which sandboxes use it now.

    Examples:

        dsec volume inspect data --json
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            document = volume_json(await engine.volumes.get(name, project=project))
        if as_json:
            put_json(document)
        else:
            told = readable(document).items()
            put("".join(f"{key}: {printable(words(value))}\n" for key, value in told))
        return 0

    conduct(work)


@volume.command("rm")
def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Of the volumes.", show_default=False)
    ],
    project: opt.Project = DEFAULT_PROJECT,
) -> None:
    """Remove volumes with all their files. What is gone already is no error; one that a sandbox uses is left.

    Examples:

        dsec volume rm data
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            for name in names:
                await engine.volumes.remove(name, project=project)
        return 0

    conduct(work)
