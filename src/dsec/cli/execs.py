"""`dsec exec`, `dsec shell` and `dsec ps`: commands in sandboxes that last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Final

import typer

from dsec.cli import options as opt
from dsec.cli.attend import Asked, attend, read_stdin, told
from dsec.cli.codes import BROKEN_PIPE
from dsec.cli.output import STDERR, STDOUT, complain, duration, put, put_json, put_table, text_of, write_all
from dsec.cli.pools import show_pool
from dsec.cli.session import GLANCE, WAIT, Signals, conduct, durable, engine_home
from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.errors import BadRequest, Busy
from dsec.model.execs import ExecInfo, ExecResult
from dsec.model.ids import ExecId, SandboxId, parse_sandbox_id
from dsec.model.journal import Record
from dsec.model.sandbox import Problem, State
from dsec.wiring import journal_reader

app = typer.Typer()

_LIVE: Final = (State.RUNNING, State.PAUSED)
_SHELL: Final = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")


def result_json(result: ExecResult) -> dict[str, object]:
    """A result as ``--json`` shows it."""
    return {
        "id": result.id,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "oom": result.oom,
        "duration": result.duration,
        "stdout": text_of(result.stdout),
        "stderr": text_of(result.stderr),
        "truncated": result.truncated,
        "dropped": result.dropped,
    }


async def report(sandbox: AsyncSandbox, asked: Asked, signals: Signals) -> int:
    """Run it to its end and print the result as JSON; our exit code."""
    del signals  # they end us, and with us the command
    result = await _whole(sandbox, asked)
    put_json(result_json(result))
    return await told(sandbox, asked, result)


async def _whole(sandbox: AsyncSandbox, asked: Asked, *, scratch: bool = False) -> ExecResult:
    stdin: AsyncIterator[bytes] | None = read_stdin() if asked.stdin else None
    return await sandbox.exec(
        asked.argv,
        timeout=asked.timeout,
        env=asked.env,
        cwd=asked.cwd,
        user=asked.user,
        stdin=stdin,
        scratch=scratch,
    )


async def _in_copy(sandbox: AsyncSandbox, asked: Asked, as_json: bool) -> int:
    """Run it in a throw-away copy; its output when it has ended."""
    result = await _whole(sandbox, asked, scratch=True)
    if as_json:
        put_json(result_json(result))
    else:
        await asyncio.to_thread(_put_output, result)
    return await told(sandbox, asked, result)


def _put_output(result: ExecResult) -> None:
    try:
        write_all(STDOUT, result.stdout)
        write_all(STDERR, result.stderr)
    except BrokenPipeError:
        raise typer.Exit(BROKEN_PIPE) from None
    if result.truncated:
        complain(f"{result.dropped} bytes of output were dropped", "let the command write to a file")


@app.command("exec", context_settings={"allow_interspersed_args": False})
def exec_(
    sandbox: opt.SandboxIdText,
    command: opt.Words,
    env: opt.EnvList = None,
    user: opt.User = "",
    workdir: opt.Workdir = "",
    timeout: opt.Timeout = None,
    interactive: opt.Interactive = False,
    tty: opt.Tty = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running and print its exec id.")
    ] = False,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="In a throw-away copy of the sandbox; output comes at the end.")
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Run a command in a sandbox that was created before.

    Exit code, standard input, terminal and signals as for `dsec run`.

    Examples:

        dsec exec sb-... -- python3 -c 'print(6 * 7)'

        dsec exec -d sb-... -- sh -c 'sleep 60; echo done > result'

        dsec exec --scratch sb-... -- rm -rf /workspace
    """
    _check_choice(command, detach=detach, scratch=scratch, as_json=as_json, tty=tty, interactive=interactive)
    quiet = as_json or detach or scratch
    asked = opt.asked(
        command,
        env=opt.pairs("env", env),
        cwd=workdir,
        user=user,
        timeout=timeout,
        interactive=interactive,
        tty=False if quiet else tty,
    )

    async def work(signals: Signals) -> int:
        async with durable() as engine:
            found = await engine.sandboxes.get(sandbox)
            if detach:
                return await _leave(found, asked, as_json)
            if scratch:
                return await _in_copy(found, asked, as_json)
            return await (report if as_json else attend)(found, asked, signals)

    conduct(work)


def _check_choice(
    command: Sequence[str], *, detach: bool, scratch: bool, as_json: bool, tty: bool | None, interactive: bool
) -> None:
    """Raises: BadRequest: options that exclude one another, or one that stands behind the id."""
    if detach and scratch:
        raise BadRequest(
            "--detach, --scratch: choose one of them", hint="a throw-away copy ends with its command"
        )
    if tty and (detach or scratch or as_json):
        raise BadRequest(
            "--tty: not with --detach, --scratch or --json", hint="a terminal needs somebody who attends it"
        )
    if detach and interactive:
        raise BadRequest("--interactive: not with --detach", hint="who leaves cannot pass input on")
    if command[0].startswith("-") and command[0] != "--":
        raise BadRequest(
            f"CMD: {command[0]!r} looks like an option of dsec behind the ID",
            hint="options come before the ID; a program of that name is named after --",
        )


async def _leave(sandbox: AsyncSandbox, asked: Asked, as_json: bool) -> int:
    """Start it and go."""
    command = await sandbox.start(
        asked.argv, timeout=asked.timeout, env=asked.env, cwd=asked.cwd, user=asked.user
    )
    if as_json:
        put_json({"id": command.id, "sandbox": sandbox.id, "pid": command.pid})
    else:
        put(f"{command.id}\n")
    return 0


@app.command()
def shell(
    sandbox: opt.SandboxIdText, user: opt.User = "", workdir: opt.Workdir = "", env: opt.EnvList = None
) -> None:
    """A shell in a sandbox: bash where there is one. Without a terminal it runs what standard input says.

    Examples:

        dsec shell sb-...

        echo 'uname -r; id' | dsec shell -u root sb-...
    """
    asked = opt.asked(_SHELL, env=opt.pairs("env", env), cwd=workdir, user=user, interactive=True)

    async def work(signals: Signals) -> int:
        async with durable() as engine:
            return await attend(await engine.sandboxes.get(sandbox), asked, signals)

    conduct(work)


def exec_json(sandbox: str, info: ExecInfo) -> dict[str, object]:
    """A listed command as ``--json`` shows it."""
    return {
        "id": info.id,
        "sandbox": sandbox,
        "pid": info.pid,
        "argv": info.argv,
        "started_at": info.started_at,
        "running": info.exit is None,
        "exit_code": None if info.exit is None else info.exit.code,
        "signal": None if info.exit is None else info.exit.signal,
        "cause": None if info.exit is None else info.exit.cause,
    }


@app.command()
def ps(
    sandbox: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Only of this sandbox.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Ended commands too.")] = False,
    problems: Annotated[
        bool, typer.Option("--problems", help="Clean-ups that failed and are tried again.")
    ] = False,
    pool: Annotated[
        bool, typer.Option("--pool", help="Sandboxes that are kept ready, by the engine that answers.")
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List commands, failed clean-ups, or ready sandboxes.

    An engine that this command opens for itself keeps no sandboxes ready.

    Examples:

        dsec ps

        dsec ps -a sb-...

        dsec ps --problems
    """

    if problems + every + pool > 1 or (pool and sandbox is not None):
        raise BadRequest(
            "--problems, --all, --pool: choose one of them",
            hint="--all is for ended commands; --pool is of no one sandbox",
        )
    wanted = None if sandbox is None else parse_sandbox_id(sandbox)

    async def work(signals: Signals) -> int:
        del signals
        if pool:
            async with durable() as engine:
                show_pool(await engine.pool.info(), as_json)
            return 0
        if problems:
            async with durable() as engine:
                if wanted is not None:
                    await engine.sandboxes.get(wanted)
                found = await engine.problems()
            return _show_problems([one for one in found if wanted in (None, one.sandbox)], as_json)
        _show_execs(await _listed(wanted, every), as_json)
        return 0

    conduct(work)


Listed = list[tuple[SandboxId, ExecInfo]]


async def _listed(wanted: SandboxId | None, every: bool) -> Listed:
    """Commands; the running ones also while another command has the engine."""
    try:
        async with durable(WAIT if every else GLANCE) as engine:
            return await _asked(engine, wanted, every)
    except Busy:
        if every:
            raise
        return await asyncio.to_thread(_recorded, wanted)


async def _asked(engine: AsyncDsec, wanted: SandboxId | None, every: bool) -> Listed:
    ids = [wanted] if wanted else [info.id for info in await engine.sandboxes.list(_LIVE)]
    found: Listed = []
    for one_id in ids:
        execs = await (await engine.sandboxes.get(one_id)).execs()
        found += [(one_id, one) for one in execs if every or one.exit is None]
    return found


def _recorded(wanted: SandboxId | None) -> Listed:
    with journal_reader(engine_home()) as reader:
        ids = [reader.sandbox(wanted).id] if wanted else [info.id for info in reader.sandboxes(_LIVE)]
        return [(one_id, _open(record)) for one_id in ids for record in reader.running(one_id)]


def _open(record: Record) -> ExecInfo:
    argv = record.payload.get("argv")
    words = tuple(str(word) for word in argv) if isinstance(argv, list) else ()
    return ExecInfo(id=ExecId(record.ref), pid=0, started_at=record.at, exit=None, argv=words)


def _show_execs(found: Listed, as_json: bool) -> None:
    if as_json:
        return put_json([exec_json(sandbox, one) for sandbox, one in found])
    rows = [
        (
            one.id,
            sandbox,
            str(one.pid or "-"),
            duration(time.time() - one.started_at),
            "running" if one.exit is None else f"exit {one.exit.code}",
            " ".join(one.argv)[:80],
        )
        for sandbox, one in found
    ]
    return put_table(("EXEC", "SANDBOX", "PID", "AGE", "STATE", "COMMAND"), rows)


def _show_problems(found: Sequence[Problem], as_json: bool) -> int:
    """1 when there are any."""
    if as_json:
        put_json(found)
    elif found:
        rows = [
            (
                one.sandbox or "-",
                one.kind,
                one.what,
                duration(time.time() - one.since),
                str(one.attempts),
                duration(max(one.next_try - time.time(), 0.0)) if one.next_try else "-",
                one.error,
                one.hint,
            )
            for one in found
        ]
        put_table(("SANDBOX", "KIND", "WHAT", "SINCE", "ATTEMPTS", "NEXT IN", "ERROR", "WHAT TO DO"), rows)
    else:
        put("no problems\n")
    return 1 if found else 0
