"""`dsec create`, `ls`, `inspect`, `pause`, `resume`, `hibernate` and `rm`: sandboxes that last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated

import typer

from dsec.cli import options as opt
from dsec.cli.codes import exit_code
from dsec.cli.origins import bases_explained, origin
from dsec.cli.output import complain_of, duration, moment, plain, printable, put, put_json, put_table
from dsec.cli.session import GLANCE, Signals, announce_build, conduct, durable, engine_home
from dsec.cli.wording import worded
from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.errors import BadRequest, Busy, DsecError
from dsec.model.ids import SandboxId, is_snapshot, parse_sandbox_id
from dsec.model.sandbox import RESERVED, Level, SandboxInfo, State
from dsec.model.volumes import DEFAULT_PROJECT
from dsec.wiring import journal_reader

app = typer.Typer()
Act = Callable[[AsyncDsec, str], Awaitable[None]]


def info_json(info: SandboxInfo) -> dict[str, object]:
    """A sandbox as ``--json`` shows it."""
    spec = info.spec
    return {
        "id": info.id,
        "state": info.state,
        "level": spec.level,
        "base": spec.base,
        "template": spec.template,
        "flags": info.flags,
        "created_at": info.created_at,
        "expires_at": info.expires_at,
        "ended_at": info.ended_at,
        "reason": info.reason,
        "residence": info.residence,
        "session_id": info.session_id,
        "workdir": info.workdir,
        "limits": spec.limits,
        "idle": spec.idle,
        "hibernate": spec.hibernate,
        "read_only": spec.read_only,
        "project": spec.project,
        "volumes": spec.volumes,
        "env": spec.env,
        "labels": given_labels(info),
    }


def given_labels(info: SandboxInfo) -> dict[str, str]:
    """The caller's own; by others DSec finds its sandboxes."""
    return {name: value for name, value in info.spec.labels.items() if not name.startswith(RESERVED)}


@app.command()
def create(
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
    ttl: opt.Ttl = 0.0,
    idle: opt.Idle = 0.0,
    label: opt.Labels = None,
    cold: opt.Cold = False,
    hibernate: opt.HibernateName = "",
    as_json: opt.AsJson = False,
) -> None:
    """Create a sandbox that lasts, and print its id. It lives on until it is removed or its time is up.

    Examples:

        id=$(dsec create --ttl 3600)

        dsec create --memory 256 --label team=blue --json

        dsec create -t sn-...
    """
    opt.check_net(net)
    volumes = opt.volumes(volume)
    limits = opt.limits(memory, cpus, pids, disk)
    given = {"env": opt.pairs("env", env), "labels": opt.pairs("label", label)}
    announce_build(level or Level.CONTAINER)

    async def work(signals: Signals) -> int:
        del signals
        async with durable(quiet=as_json) as engine:
            with bases_explained(template):
                sandbox = await engine.sandboxes.create(
                    await origin(engine, template),
                    level=level or None,
                    ttl=ttl,
                    idle=idle,
                    limits=limits,
                    read_only=read_only,
                    volumes=volumes,
                    project=project,
                    hibernate=hibernate or None,
                    cold=cold,
                    **given,
                )
        if as_json:
            put_json(info_json(sandbox.info))
        else:
            put(f"{sandbox.id}\n")
        return 0

    conduct(work)


@app.command("ls")
def list_(
    every: Annotated[bool, typer.Option("--all", "-a", help="Also those that are gone.")] = False,
    state: Annotated[list[str] | None, typer.Option("--state", "-s", help="Only in this state.")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Only with this label.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only ids.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List sandboxes, oldest first.

    Examples:

        dsec ls

        dsec ls --all --json

        dsec rm $(dsec ls -q --label team=blue)
    """
    states, labels = _states(state, every), opt.pairs("label", label)

    async def work(signals: Signals) -> int:
        del signals
        infos = await _listed(states)
        shown = [info for info in infos if labels.items() <= dict(info.spec.labels).items()]
        if as_json:
            put_json([info_json(info) for info in shown])
        elif quiet:
            put("".join(f"{info.id}\n" for info in shown))
        else:
            _show(shown)
        return 0

    conduct(work)


async def _listed(states: Sequence[State]) -> tuple[SandboxInfo, ...]:
    """As the engine knows them, or while another command has the engine, as they are recorded."""
    try:
        async with durable(GLANCE) as engine:
            return await engine.sandboxes.list(states)
    except Busy:
        wanted = states or tuple(state for state in State if state is not State.GONE)
        return await asyncio.to_thread(recorded, wanted)


def recorded(states: Sequence[State]) -> tuple[SandboxInfo, ...]:
    """Recorded sandboxes in these states, oldest first."""
    with journal_reader(engine_home()) as reader:
        return reader.sandboxes(states)


def _states(given: Sequence[str] | None, every: bool) -> tuple[State, ...]:
    """Raises: BadRequest."""
    try:
        return tuple(State(one) for one in given or (tuple(State) if every else ()))
    except ValueError:
        wrong = next(one for one in given or () if one not in tuple(State))
        raise BadRequest(
            f"state: there is no state {wrong!r}", hint=f"choose from {', '.join(State)}", state=wrong
        ) from None


def _show(infos: Sequence[SandboxInfo]) -> None:
    now = time.time()
    rows = [
        (
            info.id,
            info.state.value,
            info.spec.level.value,
            duration(now - info.created_at),
            duration(info.expires_at - now) if info.expires_at and not info.ended_at else "-",
            ",".join(f"{name}={value}" for name, value in given_labels(info).items()) or "-",
            info.reason or "-",
        )
        for info in infos
    ]
    put_table(("ID", "STATE", "LEVEL", "AGE", "TTL", "LABELS", "REASON"), rows)


@app.command()
def inspect(sandbox: opt.SandboxIdText, as_json: opt.AsJson = False) -> None:
    """Show what is known of a sandbox: its state, limits, figures, and what its level guarantees.

    Times are ISO 8601 in UTC; with --json they are numbers, seconds since the epoch.

    Examples:

        dsec inspect sb-...

        dsec inspect sb-... --json | jq .metrics.memory_bytes
    """

    async def work(signals: Signals) -> int:
        del signals
        document = await _inspected(parse_sandbox_id(sandbox))
        if as_json:
            put_json(document)
        else:
            put("".join(f"{name}: {printable(words(value))}\n" for name, value in readable(document).items()))
        return 0

    conduct(work)


def readable(document: Mapping[str, object]) -> dict[str, object]:
    """The same with moments for people: seconds since the epoch are for programs, which read ``--json``."""
    return {
        name: moment(value) if name.endswith("_at") and isinstance(value, int | float) else value
        for name, value in document.items()
    }


async def _inspected(id: SandboxId) -> dict[str, object]:
    """What is known, with figures unless another command has the engine."""
    try:
        async with durable(GLANCE) as engine:
            found = await engine.sandboxes.get(id)
            live = found.info.state in (State.RUNNING, State.PAUSED)
            return {**info_json(found.info), "metrics": await found.metrics() if live else None}
    except Busy:
        return {**info_json(await asyncio.to_thread(_one, id)), "metrics": None}


def _one(id: SandboxId) -> SandboxInfo:
    with journal_reader(engine_home()) as reader:
        return reader.sandbox(id)


def words(value: object) -> str:
    """A value of a document, for people."""
    value = plain(value)
    if isinstance(value, dict):
        return " ".join(f"{name}={one}" for name, one in value.items()) or "-"
    if isinstance(value, list):
        return " ".join(str(words(one)) for one in value) or "-"
    return "-" if value in ("", None) else str(value)


@app.command()
def pause(sandboxes: opt.SandboxIdTexts, as_json: opt.AsJson = False) -> None:
    """Stop all processes of sandboxes; they keep their memory and use no CPU.

    Examples:

        dsec pause sb-...
    """
    _each(sandboxes, _pause, as_json)


async def _pause(sandbox: AsyncSandbox) -> None:
    await sandbox.pause()


@app.command()
def resume(sandboxes: opt.SandboxIdTexts, as_json: opt.AsJson = False) -> None:
    """Let paused sandboxes go on, and wake dormant ones. Time-outs of commands did not run meanwhile.

    Examples:

        dsec resume sb-...
    """
    _each(sandboxes, _resume, as_json)


async def _resume(sandbox: AsyncSandbox) -> None:
    await sandbox.resume()


@app.command()
def hibernate(sandboxes: opt.SandboxIdTexts, as_json: opt.AsJson = False) -> None:
    """Keep the files of sandboxes, and nothing else of them. Their processes end; the next command wakes them.

    Examples:

        dsec hibernate sb-...
    """
    _each(sandboxes, _hibernate, as_json)


async def _hibernate(sandbox: AsyncSandbox) -> None:
    await sandbox.hibernate()


@app.command()
def rm(
    sandboxes: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="Ids of sandboxes or snapshots.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Every sandbox of this engine.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """End sandboxes and remove everything of them, or remove snapshots. What is gone already is no error.

    Examples:

        dsec rm sb-... sb-...

        dsec rm --all
    """
    if not sandboxes and not every:
        raise BadRequest(
            "ID: nothing is named that could be removed",
            hint="name sandboxes or snapshots (`dsec ls` and `dsec snapshots` list them), or say --all for every sandbox",
        )
    if sandboxes and every:
        raise BadRequest("ID: with --all nothing is named", hint="either name some, or say --all")
    _every(sandboxes, _remove, as_json)


async def _remove(engine: AsyncDsec, id: str) -> None:
    if is_snapshot(id):
        await engine.snapshots.remove(id)
    else:
        await (await engine.sandboxes.get(id)).destroy()


def _each(ids: Sequence[str] | None, act: Callable[[AsyncSandbox], Awaitable[None]], as_json: bool) -> None:
    async def one(engine: AsyncDsec, id: str) -> None:
        await act(await engine.sandboxes.get(id))

    _every(ids, one, as_json)


def _every(ids: Sequence[str] | None, act: Act, as_json: bool) -> None:
    """The act on every one, whatever becomes of the others; the exit code is that of the first error."""

    async def work(signals: Signals) -> int:
        del signals
        done, codes = [], []
        async with durable() as engine:
            wanted = list(dict.fromkeys(ids)) if ids else [info.id for info in await engine.sandboxes.list()]
            for one in wanted:
                error = await _tried(engine, one, act)
                done.append({"id": one, "error": error and {"code": error.code, "message": worded(error)[0]}})
                if error is not None:
                    complain_of(error)
                    codes.append(exit_code(error.code))
        if as_json:
            put_json(done)
        return codes[0] if codes else 0

    conduct(work)


async def _tried(engine: AsyncDsec, id: str, act: Act) -> DsecError | None:
    try:
        await act(engine, id)
    except DsecError as error:
        return error
    return None
