"""`dsec image`: what sandboxes stand on. Needs no engine: it works while others are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from dsec.cli import options as opt
from dsec.cli.output import moment, printable, put, put_json, put_table
from dsec.cli.progress import shown
from dsec.cli.session import Signals, check_home, conduct
from dsec.model.images import ImageInfo
from dsec.ports.engine import ImageService
from dsec.wiring import Settings, image_service

app = typer.Typer()
image = typer.Typer(help="See, get, verify and remove what sandboxes stand on.", no_args_is_help=True)
app.add_typer(image, name="image")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Such as system, or sha256:...", show_default=False)
]


def _service(quiet: bool = False) -> ImageService:
    check_home()
    return image_service(Settings(progress=shown(quiet)))


@image.command("ls")
def list_(as_json: opt.AsJson = False) -> None:
    """List stored images: their size, when they were last asked for, and how many need them.

    Examples:

        dsec image ls

        dsec image ls --json | jq '.[] | select(.held_by == []) | .digest'
    """

    async def work(signals: Signals) -> int:
        del signals
        found = await _service().list()
        if as_json:
            put_json(found)
        else:
            put_table(
                ("NAME", "DIGEST", "MB", "LAST USED", "HELD"), [row for each in found for row in _rows(each)]
            )
        return 0

    conduct(work)


def _rows(info: ImageInfo) -> Sequence[tuple[str, ...]]:
    facts = (info.digest, f"{info.size / 1e6:.1f}", moment(info.used_at), str(len(info.held_by)))
    return [(name, *facts) for name in info.names or ("-",)]


@image.command("get")
def get(name: Name, verbose: opt.Verbose = False, as_json: opt.AsJson = False) -> None:
    """Build or fetch an image, if it is not stored, and print its digest.

    Examples:

        dsec image get debian:trixie
    """

    del verbose  # it has been heard

    async def work(signals: Signals) -> int:
        del signals
        _put(await _service(as_json).get(name), as_json)
        return 0

    conduct(work)


@image.command("refresh")
def refresh(name: Name, verbose: opt.Verbose = False, as_json: opt.AsJson = False) -> None:
    """Build or fetch an image anew, and print its digest. Sandboxes and templates keep what they have.

    Examples:

        dsec image refresh debian:trixie
    """

    del verbose  # it has been heard

    async def work(signals: Signals) -> int:
        del signals
        _put(await _service(as_json).refresh(name), as_json)
        return 0

    conduct(work)


@image.command("verify")
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Default: all.", show_default=False)
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Read all of an image's file, and leave with 1 when it is not what was stored.

    Examples:

        dsec image verify

        dsec image verify system
    """

    async def work(signals: Signals) -> int:
        del signals
        service = _service(as_json)
        wanted = names or [each.digest for each in await service.list()]
        found = [await service.verify(each) for each in wanted]
        if as_json:
            put_json(found)
        else:
            put("".join(f"{each.digest} is sound\n" for each in found))
        return 0

    conduct(work)


@image.command("rm")
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Or sha256:...", show_default=False)],
    as_json: opt.AsJson = False,
) -> None:
    """Take names away, and images that no other name stands for; a digest means an image with all its names.

    An image that templates or engines need is refused (exit code 5), and they are named. Sandboxes that run on it go on.

    Examples:

        dsec image rm debian:trixie
    """

    async def work(signals: Signals) -> int:
        del signals
        service = _service(as_json)
        found = [await service.remove(each) for each in names]
        if as_json:
            put_json(found)
        return 0

    conduct(work)


@image.command("gc")
def gc(budget: opt.Budget = "", as_json: opt.AsJson = False) -> None:
    """Remove what nothing needs; with a budget also what nobody holds beyond it, the longest unused first.

    What was asked for within the last hour stays.

    Examples:

        dsec image gc --budget 20G
    """
    most = opt.size_of("budget", budget)

    async def work(signals: Signals) -> int:
        del signals
        freed = await _service(as_json).collect(most)
        if as_json:
            put_json(freed)
        else:
            lines = [f"removed {path}" for path in freed.paths] or ["nothing to remove"]
            put("".join(printable(line) + "\n" for line in [*lines, f"{freed.bytes / 1e6:.1f} MB of images"]))
        return 0

    conduct(work)


def _put(info: ImageInfo, as_json: bool) -> None:
    if as_json:
        put_json(info)
    else:
        put(f"{info.digest}\n")
