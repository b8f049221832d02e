"""`dsec template`: blueprints of environments, built once and run many times."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from dsec.cli import options as opt
from dsec.cli.output import moment, note, printable, put, put_json, put_table
from dsec.cli.session import Signals, conduct, durable
from dsec.client.aio import AsyncDsec
from dsec.errors import NotFound, StoreDamaged
from dsec.model.built import Built, Note, Tagged
from dsec.templates.dump import canonical, to_yaml

app = typer.Typer()
template = typer.Typer(help="Build templates, and see what they are.", no_args_is_help=True)
app.add_typer(template, name="template")

Reference = Annotated[
    str, typer.Argument(metavar="NAME[:TAG]", help="Or NAME@sha256:...", show_default=False)
]


def built_json(built: Built) -> dict[str, object]:
    """A built template as ``--json`` shows it."""
    return {
        "name": built.template.name,
        "digest": built.digest,
        "blueprint": built.blueprint,
        "base": built.base,
        "base_digest": built.base_digest,
        "layers": built.layers,
        "lock": built.lock,
        "packages": built.packages,
        "origin": built.origin,
        "built_at": built.built_at,
        "floating": built.floating,
        "unenforced": built.unenforced,
        "template": canonical(built.template),
    }


def tag_json(tagged: Tagged) -> dict[str, object]:
    """What a tag means as ``--json`` shows it."""
    return {"name": tagged.name, "tag": tagged.tag, "digest": tagged.digest, "at": tagged.at}


@template.command("build")
def build(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file.", show_default=False)],
    tag: Annotated[str, typer.Option("--tag", help="That means it afterwards.")] = "latest",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse versions that float and bases that change.")
    ] = False,
    update: Annotated[bool, typer.Option("--update", help="Lock dependencies anew.")] = False,
    verbose: opt.Verbose = False,
    as_json: opt.AsJson = False,
) -> None:
    """Build a template, and print its digest. The same file over the same base gives the same digest.

    What it declares and nothing enforces yet, and versions that float, are told on standard error.

    Examples:

        dsec template build agent.yaml

        dsec template build --strict --tag v2 agent.yaml
    """

    del verbose  # it has been heard

    async def work(signals: Signals) -> int:
        del signals
        async with durable(quiet=as_json) as engine:
            built = await engine.templates.build(file, tag=tag, strict=strict, update=update)
        _tell("floats", built.floating)
        _tell("declared, not enforced", built.unenforced)
        if as_json:
            put_json(built_json(built))
        else:
            put(f"{built.digest}\n")
        return 0

    conduct(work)


def _tell(what: str, notes: Sequence[Note]) -> None:
    for each in notes:
        where = f"line {each.line}: " if each.line else ""
        note(printable(f"{what}: {where}{each.field}: {each.text} ({each.why})"))


@template.command("promote")
def promote(
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Its id.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="That means it.", show_default=False)],
    as_json: opt.AsJson = False,
) -> None:
    """Make a template of a snapshot's files, and print its digest. Neither the snapshot nor its sandbox is needed afterwards.

    Examples:

        dsec template promote sn-... agent:grown
    """

    async def work(signals: Signals) -> int:
        del signals
        called, _, tag = name.partition(":")
        async with durable() as engine:
            taken = await engine.snapshots.get(snapshot)
            built = await engine.templates.promote(taken, called, tag=tag or "latest")
        if as_json:
            put_json(built_json(built))
        else:
            put(f"{built.digest}\n")
        return 0

    conduct(work)


@template.command("export")
def export(
    reference: Reference,
    file: Annotated[str, typer.Argument(metavar="FILE", help="That is written.", show_default=False)],
    as_json: opt.AsJson = False,
) -> None:
    """Write a template, with all that it is made of, to one file, for `dsec template import` elsewhere.

    Examples:

        dsec template export agent:v2 agent.dsec
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            await engine.templates.export(reference, file)
        if as_json:
            put_json({"exported": reference, "file": file})
        return 0

    conduct(work)


@template.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Of an export.", show_default=False)],
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag", help="That means it afterwards; latest, unless that means another.", show_default=False
        ),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Take in a template that `dsec template export` wrote, under its own name, and print its digest.

    Nothing in the file is believed: it is what its digests say, or refused.

    Examples:

        dsec template import agent.dsec --tag v2
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            built = await engine.templates.import_(file, tag=tag)
        if as_json:
            put_json(built_json(built))
        else:
            put(f"{built.digest}\n")
        return 0

    conduct(work)


@template.command("ls")
def list_(as_json: opt.AsJson = False) -> None:
    """List what every tag means.

    Examples:

        dsec template ls
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            found = await engine.templates.list()
        if as_json:
            put_json([tag_json(each) for each in found])
        else:
            _show(found)
        return 0

    conduct(work)


@template.command("history")
def history(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a template.", show_default=False)],
    as_json: opt.AsJson = False,
) -> None:
    """Show what the tags of a template have meant, oldest first.

    Examples:

        dsec template history agent
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            found = await engine.templates.history(name)
        if not found:
            raise _nothing(name)
        if as_json:
            put_json([tag_json(each) for each in found])
        else:
            _show(found)
        return 0

    conduct(work)


def _show(found: Sequence[Tagged]) -> None:
    rows = [(each.name, each.tag, each.digest, moment(each.at)) for each in found]
    put_table(("NAME", "TAG", "DIGEST", "SET"), rows)


@template.command("show")
def show(reference: Reference, as_json: opt.AsJson = False) -> None:
    """Show a built template, every field written out.

    Examples:

        dsec template show agent:v2
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            built = await engine.templates.get(reference)
        if as_json:
            put_json(built_json(built))
        else:
            _tell("floats", built.floating)
            _tell("declared, not enforced", built.unenforced)
            layers = "".join(f"#   {each}\n" for each in (*built.layers, built.base_digest))
            put(f"# {built.reference}\n# base {printable(built.base)}, layers, topmost first:\n{layers}")
            if built.origin:
                put(f"# made of snapshot {built.origin}: what the template says was so before\n")
            if built.packages:
                put("# packages, as they are locked:\n" + "".join(f"#   {each}\n" for each in built.packages))
            put(to_yaml(built.template))
        return 0

    conduct(work)


@template.command("diff")
def diff(one: Reference, other: Reference) -> None:
    """Compare two built templates, what they were made of included. Nothing is printed when they are the same.

    Examples:

        dsec template diff agent:v1 agent:v2
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            before, after = await engine.templates.get(one), await engine.templates.get(other)
        lines = difflib.unified_diff(_written(before), _written(after), one, other)
        put("".join(lines))
        return 0

    conduct(work)


def _written(built: Built) -> list[str]:
    made_of = [f"# {each}\n" for each in (*built.layers, built.base_digest)]
    return made_of + to_yaml(built.template).splitlines(keepends=True)


@template.command("tag")
def tag(
    reference: Reference,
    name: Annotated[str, typer.Argument(metavar="TAG", help="That means it then.", show_default=False)],
    as_json: opt.AsJson = False,
) -> None:
    """Let another tag mean a built template.

    Examples:

        dsec template tag agent@sha256:... stable
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            built = await engine.templates.tag(reference, name)
        if as_json:
            put_json(built_json(built))
        return 0

    conduct(work)


@template.command("rollback")
def rollback(reference: Reference, as_json: opt.AsJson = False) -> None:
    """Let a tag mean what it meant before, and print that digest.

    Examples:

        dsec template rollback agent
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            built = await engine.templates.rollback(reference)
        if as_json:
            put_json(built_json(built))
        else:
            put(f"{built.digest}\n")
        return 0

    conduct(work)


@template.command("check")
def check(reference: Reference, as_json: opt.AsJson = False) -> None:
    """Run a template twice and compare everything that a run can see at its start; leave with 1 when anything differs.

    Examples:

        dsec template check agent
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            found = await engine.templates.check(reference)
        if as_json:
            put_json(list(found))
        else:
            put(
                "".join(
                    printable(f"{each.what}: {each.first or '-'} != {each.second or '-'}") + "\n"
                    for each in found
                )
            )
        return 1 if found else 0

    conduct(work)


@template.command("rm")
def rm(
    references: Annotated[
        list[str], typer.Argument(metavar="NAME[:TAG]...", help="Tags.", show_default=False)
    ],
) -> None:
    """Take tags away. With the last tag of a name goes everything that was built under it. Sandboxes live on.

    Examples:

        dsec template rm agent:v1
    """

    async def work(signals: Signals) -> int:
        del signals
        async with durable() as engine:
            for each in references:
                await _remove(engine, each)
        return 0

    conduct(work)


async def _remove(engine: AsyncDsec, reference: str) -> None:
    """Raises: NotFound: there is no such tag, and nothing is done. BadRequest."""
    name, _, tag = reference.partition(":")
    there = True
    with suppress(StoreDamaged):  # removing may mend that
        there = any(
            (each.name, each.tag) == (name, tag or "latest") for each in await engine.templates.list()
        )
    await engine.templates.remove(reference)
    if not there:
        raise _nothing(reference)


def _nothing(reference: str) -> NotFound:
    return NotFound(
        f"there is no template {reference!r:.200}", hint="`dsec template ls` shows those that were built"
    )
