"""`dsec key` and `dsec project`: who may use a server, and how much they may have."""

from __future__ import annotations

import time
from dataclasses import asdict, fields, replace
from importlib import import_module
from typing import Annotated

import typer

from dsec.cli import options as opt
from dsec.cli.output import duration, note, printable, put, put_json, put_table
from dsec.cli.session import Signals, conduct, durable, engine_home, taken
from dsec.model.tenants import Coinage, KeyInfo, ProjectInfo, Quota, Scope
from dsec.model.volumes import DEFAULT_PROJECT

app = typer.Typer()
key = typer.Typer(no_args_is_help=True)
app.add_typer(key, name="key", help="Keys: who may use a server, and as what.")
project = typer.Typer(no_args_is_help=True)
app.add_typer(project, name="project", help="Projects, and what they may have.")

Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of keys (ky-...).", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the project.", show_default=False)]
Of = Annotated[str, typer.Option("--project", metavar="NAME", help="Only those of this project.")]


def key_json(info: KeyInfo) -> dict[str, object]:
    """A key as ``--json`` shows it."""
    return {name: value for name, value in asdict(info).items() if name != "sandbox"}


@key.command("create")
def create(
    scope: Annotated[
        Scope,
        typer.Option("--scope", help="`developer`: everything within one project. `admin`: everything."),
    ] = Scope.DEVELOPER,
    of: Annotated[
        str, typer.Option("--project", metavar="NAME", help="Its project; made if it is not there.")
    ] = DEFAULT_PROJECT,
    label: Annotated[str, typer.Option("--label", help="Your own words.")] = "",
    ttl: Annotated[
        float, typer.Option("--ttl", min=0, help="Seconds for which it is good; 0 = until it is revoked.")
    ] = 0.0,
    e2b: Annotated[bool, typer.Option("--e2b", help="Written as SDKs of E2B want it.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Make a key, and print it. It is shown this once: only its SHA-256 is kept.

    Examples:

        dsec key create --project research --label ci
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            made = await engine.keys.create(
                scope, project=of, label=label, ttl=ttl, coinage=Coinage.E2B if e2b else Coinage.DSEC
            )
        if as_json:
            put_json({"key": made.key, **key_json(made.info)})
        else:
            put(f"{made.key}\n")
            note(f"{made.info.id}: {made.info.scope} of project {made.info.project}; it is not shown again")
        return 0

    conduct(work)


@key.command("ls")
def list_(of: Of = "", as_json: opt.AsJson = False) -> None:
    """List keys by what they are called; none of them is shown.

    Examples:

        dsec key ls --project research
    """

    async def work(signals: Signals) -> int:
        del signals
        found: list[KeyInfo] = []
        async with durable() as engine:
            while page := await engine.keys.list(of, after=found[-1].id if found else ""):
                found += page
        if as_json:
            put_json([key_json(info) for info in found])
        else:
            now = time.time()
            rows = [_row(info, now) for info in found]
            put_table(("ID", "SCOPE", "PROJECT", "LABEL", "AGE", "USED", "STATE"), rows)
        return 0

    conduct(work)


def _row(info: KeyInfo, now: float) -> tuple[str, ...]:
    over = bool(info.expires_at) and now >= info.expires_at
    return (
        info.id,
        info.scope.value,
        info.project,
        printable(info.label) or "-",
        duration(now - info.created_at),
        f"{duration(now - info.used_at)} ago" if info.used_at else "never",
        "revoked" if info.revoked_at else "expired" if over else "good",
    )


@key.command("rm")
def rm(ids: Ids) -> None:
    """Revoke keys: from now on they are no good. Twice is no error.

    Examples:

        dsec key rm ky-abcdefghijklmnopqrstuvwxyz
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            for each in ids:
                await engine.keys.revoke(each)
        return 0

    conduct(work)


@key.command("token")
def token(
    sandbox: opt.SandboxIdText,
    ttl: Annotated[
        float, typer.Option("--ttl", min=0, help="Seconds for which it is good; 0 = as long as the sandbox.")
    ] = 0.0,
    as_json: opt.AsJson = False,
) -> None:
    """Make a key that is good for one sandbox alone and ends with it, and print it.

    Examples:

        dsec key token sb-...
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            made = await (await engine.sandboxes.get(sandbox)).token(ttl=ttl)
        if as_json:
            put_json({"key": made.key, **key_json(made.info)})
        else:
            put(f"{made.key}\n")
        return 0

    conduct(work)


@key.command("begin-anew")
def begin_anew() -> None:
    """Go on without the keys and quotas of a control database that is lost. All keys have to be made again.

    The server must not run. A database that is there is left as it is.

    Examples:

        dsec key begin-anew
    """

    async def work(signals: Signals) -> int:
        del signals
        wiring = import_module("dsec.wiring.tenants")  # loads an engine, which no other command here needs
        with taken():
            await wiring.go_on_without(engine_home())
        return 0

    conduct(work)


@project.command("ls")
def projects(as_json: opt.AsJson = False) -> None:
    """List projects and what they may have; 0 = no bound.

    Examples:

        dsec project ls
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            found = await engine.projects.list()
        if as_json:
            put_json([asdict(info) for info in found])
        else:
            names = [field.name for field in fields(Quota)]
            rows = [(info.name, *(f"{getattr(info.quota, name):g}" for name in names)) for info in found]
            put_table(("NAME", *(name.upper() for name in names)), rows)
        return 0

    conduct(work)


@project.command("show")
def show(name: Name, as_json: opt.AsJson = False) -> None:
    """Show what a project may have; 0 = no bound.

    Examples:

        dsec project show research
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            _tell(await engine.projects.get(name), as_json)
        return 0

    conduct(work)


def _tell(info: ProjectInfo, as_json: bool) -> None:
    if as_json:
        put_json(asdict(info))
    else:
        put("".join(f"{field}: {value:g}\n" for field, value in asdict(info.quota).items()))


Bound = Annotated[int | None, typer.Option(min=0, help="0 = no bound.", show_default=False)]


@project.command("set")
def set_(
    name: Name,
    sandboxes: Bound = None,
    dormant: Bound = None,
    cpu_millis: Bound = None,
    memory_mib: Bound = None,
    disk_mib: Bound = None,
    journal_mib: Bound = None,
    rate: Annotated[
        float | None, typer.Option(min=0, help="Requests a second; 0 = no bound.", show_default=False)
    ] = None,
    share: Annotated[
        int | None, typer.Option(min=1, help="Its weight when creations wait.", show_default=False)
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Set what a project may have from now on; what is not named stays. It is made if it is not there.

    Examples:

        dsec project set research --sandboxes 50 --memory-mib 16384 --rate 20
    """
    given = {
        "sandboxes": sandboxes,
        "dormant": dormant,
        "cpu_millis": cpu_millis,
        "memory_mib": memory_mib,
        "disk_mib": disk_mib,
        "journal_mib": journal_mib,
        "rate": rate,
        "share": share,
    }
    changed = {field: value for field, value in given.items() if value is not None}

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            known = {info.name: info.quota for info in await engine.projects.list()}
            if name not in known:
                note(f"there was no project {printable(name)}: it is made")
            quota = replace(known.get(name, Quota()), **changed)  # type: ignore[arg-type]
            _tell(await engine.projects.set(name, quota), as_json)
        return 0

    conduct(work)
