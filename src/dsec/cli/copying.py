"""`dsec cp`: files and directories, both ways, and tar archives through our own streams."""

from __future__ import annotations

import asyncio
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from dsec.cli import options as opt
from dsec.cli.attend import read_stdin
from dsec.cli.codes import BROKEN_PIPE
from dsec.cli.output import STDOUT, complain, put_json, write_all
from dsec.cli.session import Signals, conduct, durable
from dsec.client.aio import AsyncSandbox
from dsec.client.requests import closed
from dsec.errors import BadRequest, FileMissing
from dsec.model.files import FileType, Transfer
from dsec.model.ids import SandboxId, parse_sandbox_id

app = typer.Typer()

_STREAM: Final = "-"
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a copy: a path of a sandbox, or of this machine when ``sandbox`` is None ("-": our own stream)."""

    sandbox: SandboxId | None
    path: str

    @property
    def stream(self) -> bool:
        return self.sandbox is None and self.path == _STREAM


def side(field: str, text: str) -> Side:
    """``ID:PATH``, a local path (``./sb-x:y`` too), or ``-``.  Raises: BadRequest."""
    head, colon, path = text.partition(":")
    if not text:
        raise BadRequest(f"{field}: it is empty", hint="name a local path, ID:PATH, or '-'")
    if not colon or not head.startswith("sb-"):
        return Side(None, text)
    if not path:
        raise BadRequest(
            f"{field}: {text!r} names no path in the sandbox", hint="ID:PATH, such as ID:/workspace"
        )
    return Side(parse_sandbox_id(head), path)


@app.command()
def cp(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Local path, ID:PATH, or - for a tar archive.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="DST", help="Local path, ID:PATH, or - for a tar archive.")
    ],
    user: opt.User = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing of what was left out.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Copy files and directories into and out of a sandbox.

    A directory that exists as DST gets SRC inside it, as with cp -r. With - a tar archive is read from standard input
    and unpacked, or written to standard output.

    Examples:

        dsec cp ./src sb-...:/workspace

        dsec cp sb-...:/workspace/report.html .

        tar c . | dsec cp - sb-...:/workspace/in

        dsec cp sb-...:/workspace - | tar t
    """
    origin, goal = side("SRC", source), side("DST", target)
    if (origin.sandbox is None) == (goal.sandbox is None):
        raise BadRequest(
            "SRC, DST: one of them is in a sandbox, the other is not", hint="ID:PATH names a sandbox's"
        )
    if as_json and goal.stream:
        raise BadRequest(
            "--json: standard output is the archive", hint="leave --json out, or name a file as DST"
        )

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            sandbox = await engine.sandboxes.get(origin.sandbox or goal.sandbox or "")
            moved = await (_up if goal.sandbox else _down)(sandbox, origin, goal, user)
        _tell(moved, quiet, as_json)
        return 0

    conduct(work)


async def _up(sandbox: AsyncSandbox, origin: Side, goal: Side, user: str) -> Transfer:
    if origin.stream:
        return await sandbox.files.unpack(read_stdin(), goal.path, user=user)
    local = Path(origin.path)
    path = goal.path
    if path.endswith("/") or await _is_directory(sandbox, path, user):
        path = f"{path.rstrip('/')}/{(await asyncio.to_thread(local.resolve)).name}"
    return await sandbox.files.upload(local, path, user=user)


async def _is_directory(sandbox: AsyncSandbox, path: str, user: str) -> bool:
    try:
        return (await sandbox.files.stat(path, user=user)).type is FileType.DIRECTORY
    except FileMissing:
        return False


async def _down(sandbox: AsyncSandbox, origin: Side, goal: Side, user: str) -> Transfer:
    if goal.stream:
        return await _to_stdout(sandbox, origin.path, user)
    local = Path(goal.path)
    if goal.path.endswith("/") or await asyncio.to_thread(local.is_dir):
        name = Path(origin.path).name
        if name in ("", ".", ".."):
            name = ""
        local = local / name
    return await sandbox.files.download(origin.path, local, user=user)


async def _to_stdout(sandbox: AsyncSandbox, path: str, user: str) -> Transfer:
    if (await sandbox.files.stat(path, user=user)).type is FileType.FILE:
        raise BadRequest(
            f"SRC: {path!r} is a file, and an archive is made of a directory",
            hint=f"dsec exec {sandbox.id} -- cat {shlex.quote(path)}",
            path=path,
        )
    sys.stdout.flush()
    size = 0
    pieces = sandbox.files.pack(path, user=user)
    try:
        async for piece in pieces:
            size += len(piece)
            await asyncio.to_thread(write_all, STDOUT, piece)
    except BrokenPipeError:
        raise typer.Exit(BROKEN_PIPE) from None
    finally:
        await closed(pieces)  # while the engine is open: it records how much was taken
    return Transfer(bytes=size)


def _tell(moved: Transfer, quiet: bool, as_json: bool) -> None:
    if as_json:
        put_json(moved)
    elif moved.skipped_count and not quiet:
        some = [f"{path}: {why}" for path, why in moved.skipped[:_SHOWN]]
        more = ["..."] if moved.skipped_count > _SHOWN else []
        complain(f"{moved.skipped_count} entries were left out", "; ".join(some + more))
