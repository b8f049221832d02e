"""`dsec doctor`, `gc` and `bench`: this machine."""

from __future__ import annotations

import typer

from dsec.cli import options as opt
from dsec.cli.output import printable, put, put_json
from dsec.model.health import Layer, Report, Verdict
from dsec.wiring import examine

app = typer.Typer()


@app.command()
def doctor(as_json: opt.AsJson = False) -> None:
    """Tell which layers of isolation this machine has, and try every level.

    Layers are active, degraded or unavailable, with the reason and how to enable what is missing. Exit code 1 when no
    level works.

    Examples:

        dsec doctor

        dsec doctor --json | jq '.levels[] | select(.available) | .level'
    """
    report = examine()
    if as_json:
        put_json(report)
    else:
        put(_told(report))
    if not any(one.available for one in report.levels):
        raise typer.Exit(1)


def _told(report: Report) -> str:
    width = max(len(layer.name) for layer in report.layers)
    lines = [f"Linux {report.kernel}", "", "Layers of isolation"]
    lines += [_layer_line(layer, width) for layer in report.layers]
    lines += ["", "Levels"]
    for verdict in report.levels:
        lines += _verdict_lines(verdict)
    return "\n".join(printable(line) for line in lines) + "\n"


def _layer_line(layer: Layer, width: int) -> str:
    line = f"  {layer.name.ljust(width)}  {layer.status.value}"
    words = "; to enable: ".join(one for one in (layer.detail, layer.hint) if one)
    return f"{line} ({words})" if words else line


def _verdict_lines(verdict: Verdict) -> list[str]:
    if not verdict.available:
        hint = f"; to enable: {verdict.hint}" if verdict.hint else ""
        return [f"  {verdict.level.value}: unavailable ({verdict.reason}{hint})"]
    return [
        f"  {verdict.level.value}: active (tried in {verdict.seconds * 1000:.0f} ms)",
        f"    guarantees: {', '.join(sorted(verdict.flags))}",
        f"    does not guarantee: {', '.join(sorted(verdict.missing)) or 'nothing is missing'}",
    ]
