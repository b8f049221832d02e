"""Options that several commands have, and what they mean to the SDK."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from dsec.cli.attend import Asked
from dsec.cli.numbers import decimal, mib, size, whole
from dsec.cli.output import STDIN, STDOUT, is_tty
from dsec.client.requests import check_apart, volume_of
from dsec.errors import BadRequest, Unsupported
from dsec.model.checks import check_count
from dsec.model.images import MOST_BYTES
from dsec.model.sandbox import Limits, Volume

_WHAT = "Sandbox"
_HOW = "Command"

Template = Annotated[
    str,
    typer.Option(
        "--template",
        "-t",
        help="What to start from: base (whose image is `system`), a built template, or a snapshot (sn-...).",
        rich_help_panel=_WHAT,
    ),
]
LevelName = Annotated[
    str,
    typer.Option(
        "--level",
        help="Isolation: container or process; by default as the template says, or container.",
        show_default=False,
        rich_help_panel=_WHAT,
    ),
]
Net = Annotated[str, typer.Option("--net", help="Network: none (loopback only).", rich_help_panel=_WHAT)]
VolumeList = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        "-v",
        metavar="SRC:DST[:ro]",
        help="Shown inside: a host path, which begins with / or ., or else the volume of that name.",
        rich_help_panel=_WHAT,
    ),
]
Project = Annotated[str, typer.Option("--project", metavar="NAME", help="Whose volumes names mean.")]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory: 256 (MiB), 256M or 2G.",
        parser=mib,
        rich_help_panel=_WHAT,
    ),
]
Cpus = Annotated[
    float | None,
    typer.Option("--cpus", metavar="N", help="CPUs, such as 0.5.", parser=decimal, rich_help_panel=_WHAT),
]
Pids = Annotated[
    int | None,
    typer.Option("--pids", metavar="N", help="Processes and threads.", parser=whole(), rich_help_panel=_WHAT),
]
Disk = Annotated[
    int | None,
    typer.Option(
        "--disk",
        metavar="SIZE",
        help="Disk: 512 (MiB), 512M or 10G.",
        parser=mib,
        rich_help_panel=_WHAT,
    ),
]
Ttl = Annotated[
    float,
    typer.Option("--ttl", metavar="SECONDS", help="Destroyed then; 0 = never.", parser=decimal),
]
Idle = Annotated[
    float,
    typer.Option(
        "--idle", metavar="SECONDS", help="Destroyed after so long without use; 0 = never.", parser=decimal
    ),
]
HibernateName = Annotated[
    str,
    typer.Option(
        "--hibernate",
        metavar="auto|files|never",
        help="Whether it may be reduced to its files when nobody uses it; as the template says, or auto.",
    ),
]
ReadOnly = Annotated[
    bool,
    typer.Option("--read-only", help="Only workspace, home and /tmp can be written.", rich_help_panel=_WHAT),
]
EnvList = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="A variable.", rich_help_panel=_HOW),
]
User = Annotated[str, typer.Option("--user", "-u", help="Who runs it: user or root.", rich_help_panel=_HOW)]
Workdir = Annotated[
    str, typer.Option("--workdir", "-w", metavar="DIR", help="Where it runs.", rich_help_panel=_HOW)
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="Then its whole process tree is ended (exit 124).",
        parser=decimal,
        rich_help_panel=_HOW,
    ),
]
Interactive = Annotated[
    bool,
    typer.Option(
        "--interactive", "-i", help="Pass standard input on, also a terminal's.", rich_help_panel=_HOW
    ),
]
Tty = Annotated[
    bool | None,
    typer.Option(
        "--tty/--no-tty", help="A terminal of its own; default: when ours are.", rich_help_panel=_HOW
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="SIZE",
        help="Bytes that images may have, such as 500M or 20G.",
        show_default=False,
    ),
]
Cold = Annotated[bool, typer.Option("--cold", help="Only record it; the first command makes it.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Yours, for finding it.")
]


def _louder(wanted: bool) -> bool:
    log = logging.getLogger("dsec")
    if wanted and log.getEffectiveLevel() > logging.INFO:
        log.setLevel(logging.INFO)
    return wanted


Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Tell each step, where no terminal shows it.", callback=_louder),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Words = Annotated[
    list[str], typer.Argument(metavar="CMD...", help="Program and arguments.", show_default=False)
]
SandboxIdText = Annotated[str, typer.Argument(metavar="ID", help="Sandbox id (sb-...).", show_default=False)]
SandboxIdTexts = Annotated[
    list[str], typer.Argument(metavar="ID...", help="Sandbox ids.", show_default=False)
]


def size_of(field: str, text: str) -> int | None:
    """Bytes of ``20G`` and the like, in powers of 1,024; None of "".  Raises: BadRequest."""
    if not text:
        return None
    found = size(text)
    if found is None:
        raise BadRequest(f"{field}: {text!r:.100} is not a size", hint="such as 500M or 20G")
    check_count(field, found, 0, MOST_BYTES)
    return found


def pairs(field: str, given: Sequence[str] | None) -> dict[str, str]:
    """``NAME=VALUE`` each.  Raises: BadRequest."""
    found = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise BadRequest(
                f"{field}: {one!r} is not NAME=VALUE", hint="such as --env LANG=C or --label team=blue"
            )
        found[name] = value
    return found


def limits(memory: int | None, cpus: float | None, pids: int | None, disk: int | None) -> Limits | None:
    """The default limits, but for those that were given; None: none was.  Raises: BadRequest."""
    given = {"memory_mib": memory, "pids": pids, "disk_mib": disk}
    chosen = {name: value for name, value in given.items() if value is not None}
    if cpus is not None:
        if not 0.01 <= cpus <= 1024:
            raise BadRequest(
                f"cpus: {cpus!r} is not a number from 0.01 to 1024", hint="--cpus 0.5 is half of one CPU"
            )
        chosen["cpu_millis"] = round(cpus * 1000)
    return Limits(**chosen) if chosen else None


def volumes(given: Sequence[str] | None) -> tuple[Volume, ...]:
    """``SOURCE:TARGET[:ro]`` each.  Raises: BadRequest."""
    found = tuple([volume_of(text) for text in given or ()])
    check_apart(found)
    return found


def check_net(net: str) -> None:
    """Raises: Unsupported."""
    if net != "none":
        raise Unsupported(
            f"net: there is no network {net!r}", hint="sandboxes have loopback only: --net none"
        )


def asked(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str = "",
    user: str = "",
    timeout: float | None = None,
    interactive: bool = False,
    tty: bool | None = None,
) -> Asked:
    """A command with the streams that fit ours. Standard input is passed on unless it is a terminal and nobody asked for it.

    Raises: BadRequest.
    """
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise BadRequest("CMD: there is no command", hint="it comes last: dsec run -- echo hi")
    if timeout is not None and timeout <= 0:
        raise BadRequest(
            f"timeout: {timeout:g} is not above 0 seconds", hint="leave it out for no limit of time"
        )
    terminal = is_tty(STDIN) and is_tty(STDOUT) if tty is None else tty
    stdin = terminal or interactive or not is_tty(STDIN)
    return Asked(argv=words, env=env, cwd=cwd, user=user, timeout=timeout, tty=terminal, stdin=stdin)
