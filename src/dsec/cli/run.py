"""`dsec run`: one command in a sandbox that exists only for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import typer

from dsec.cli import options as opt
from dsec.cli.attend import attend
from dsec.cli.execs import report
from dsec.cli.origins import bases_explained, origin
from dsec.cli.session import Signals, announce_build, conduct, durable, private
from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.client.requests import BASE
from dsec.model.ids import is_snapshot
from dsec.model.sandbox import Level, Limits, Volume
from dsec.model.volumes import DEFAULT_PROJECT

app = typer.Typer()


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: opt.Words,
    template: opt.Template = "base",
    level: opt.LevelName = "",
    net: opt.Net = "none",
    volume: opt.VolumeList = None,
    project: opt.Project = DEFAULT_PROJECT,
    memory: opt.Memory = None,
    cpus: opt.Cpus = None,
    pids: opt.Pids = None,
    disk: opt.Disk = None,
    read_only: opt.ReadOnly = False,
    env: opt.EnvList = None,
    user: opt.User = "",
    workdir: opt.Workdir = "",
    timeout: opt.Timeout = None,
    interactive: opt.Interactive = False,
    tty: opt.Tty = None,
    as_json: opt.AsJson = False,
) -> None:
    """Run one command in a sandbox of its own.

    The sandbox is destroyed when the command ends. Its exit code is ours: 128 + n when signal n ended it, 124 when its time
    was up. Standard input is passed on unless it is a terminal; with a terminal on both sides the command gets one too.
    Signals are passed on. Snapshots, and volumes with a name, belong to the engine of lasting sandboxes, which other commands find
    busy meanwhile.

    Examples:

        dsec run -- echo hi

        dsec run --timeout 10 --memory 256 -v ./src:/workspace/src:ro -- python3 src/main.py

        dsec run -v data:/data -- sh -c 'date >> /data/log'

        tar c . | dsec run -- tar x -v
    """
    opt.check_net(net)
    volumes = opt.volumes(volume)
    limits = opt.limits(memory, cpus, pids, disk)
    asked = opt.asked(
        command,
        env=opt.pairs("env", env),
        cwd=workdir,
        user=user,
        timeout=timeout,
        interactive=interactive,
        tty=False if as_json else tty,
    )

    announce_build(level or Level.CONTAINER)

    async def work(signals: Signals) -> int:
        async with _sandbox(template, level, limits, read_only, volumes, project, as_json) as sandbox:
            return await (report if as_json else attend)(sandbox, asked, signals)

    conduct(work)


@contextlib.asynccontextmanager
async def _sandbox(
    template: str,
    level: str,
    limits: Limits | None,
    read_only: bool,
    volumes: Sequence[Volume],
    project: str,
    quiet: bool,
) -> AsyncIterator[AsyncSandbox]:
    """It ends with the block; named volumes are those of the engine of lasting sandboxes."""
    async with _engine(template, volumes, quiet) as engine:
        with bases_explained(template):
            start = await origin(engine, template)
            sandbox = await engine.sandboxes.create(
                start,
                level=level or None,
                limits=limits,
                read_only=read_only,
                volumes=volumes,
                project=project,
            )
        async with sandbox:
            yield sandbox


@contextlib.asynccontextmanager
async def _engine(template: str, volumes: Sequence[Volume], quiet: bool) -> AsyncIterator[AsyncDsec]:
    """A private one, unless it starts from a snapshot, or something that is shown has a name."""
    if not is_snapshot(template) and not any(volume.name for volume in volumes):
        async with private(quiet=quiet) as engine:
            if template == BASE or not await _names_volumes(engine, template):
                yield engine
                return
    async with durable(quiet=quiet) as engine:
        yield engine


async def _names_volumes(engine: AsyncDsec, template: str) -> bool:
    """Raises: NotFound, BadRequest: the template."""
    with bases_explained(template):
        built = await engine.templates.get(template)
    return any(volume.name for volume in built.template.volumes)
