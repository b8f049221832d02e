"""``docs/reference/benchmarks.md`` from the results that were kept: no number in it is typed by hand.

``python -m benchmarks.report`` replaces what stands between the two markers; ``--check`` only says whether it would
change anything (exit code 1).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.bars import BARS, Bar
from benchmarks.common import QUIET_LOAD, RESULTS, ROOT

PAGE: Final = ROOT / "docs" / "reference" / "benchmarks.md"
BEGIN: Final = "<!-- figures: begin (python -m benchmarks.report) -->"
END: Final = "<!-- figures: end -->"

Result = Mapping[str, Any]


def load(directory: Path) -> dict[str, Result]:
    """Results by the name of their file, in order.  Raises: ValueError: a file that is not a result."""
    found: dict[str, Result] = {}
    for path in sorted(directory.glob("*.json")):
        result = json.loads(path.read_text())
        missing = {"benchmark", "claim", "machine", "samples", "series", "figures"} - result.keys()
        if missing:
            raise ValueError(f"{path} is not a result: {', '.join(sorted(missing))} missing")
        found[path.stem] = result
    return found


def verdict(bar: Bar, results: Mapping[str, Result]) -> tuple[str, str]:
    """What was measured, and whether it reaches the bar: ``yes``, ``no``, or why there is nothing to say."""
    result = results.get(bar.result)
    if result is None:
        return "–", "not measured"
    figures: Mapping[str, float] = result["figures"]
    if bar.figure not in figures:
        reasons = [f"{name}: {why}" for name, why in result.get("unavailable", {}).items()]
        return "–", f"not measured ({'; '.join(reasons) or 'no such figure'})"
    measured = number(figures[bar.figure], bar.unit)
    if result["samples"] < bar.least:
        return measured, f"too few samples: {result['samples']} of {bar.least}"
    for name, least in bar.requires.items():
        if figures.get(name, 0.0) < least:
            return measured, f"{name} is {figures.get(name, 0.0):g}, not {least:g}"
    return measured, "yes" if bar.met(figures[bar.figure]) else "**no**"


def number(value: float, unit: str) -> str:
    """A figure with three significant digits and its unit."""
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()


def bars_table(results: Mapping[str, Result]) -> list[str]:
    """Every bar, what was measured, and whether that reaches it."""
    lines = ["| what | bar | measured | met |", "|---|---|---|---|"]
    for bar in BARS:
        measured, met = verdict(bar, results)
        sign = "≤" if bar.sign == "<=" else "≥"
        lines.append(f"| {bar.what} | {sign} {number(bar.bound, bar.unit)} | {measured} | {_cell(met)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def machines_table(results: Mapping[str, Result]) -> list[str]:
    """Where each result was taken."""
    lines = [
        "| result | date | commit | kernel | CPUs | memory | cgroups | Python | load before, after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        at = result["machine"]
        before, after = at["load_before"], at["load_after"]
        loud = " (not quiet)" if before > QUIET_LOAD else ""
        loud += f", nice {at['nice']}" if at.get("nice") else ""
        facts = (
            name,
            at["date"],
            f"`{at['commit']}`",
            at["kernel"],
            at["cpus"],
            f"{at['memory_mib']:,} MiB",
            at["cgroups"],
            at["python"],
            f"{before}, {after}{loud}",
        )
        lines.append("| " + " | ".join(map(str, facts)) + " |")
    return lines


def details(name: str, result: Result) -> list[str]:
    """All lines and figures of one result."""
    lines = [f"### {name}", "", f"{result['claim']}.", "", f"`{result['machine']['command']}`", ""]
    if result["series"]:
        lines += ["| what | n | p50 | p90 | p99 | least | most | unit |", "|---|---|---|---|---|---|---|---|"]
        lines += [_line(each) for each in result["series"]] + [""]
    lines += [
        f"- {_cell(str(key))}: not measured: {_cell(why)}" for key, why in result["unavailable"].items()
    ]
    if result["unavailable"]:
        lines.append("")
    if result["figures"]:
        figures = (f"{key} {number(value, '')}" for key, value in result["figures"].items())
        lines += ["Figures: " + ", ".join(figures) + "."]
    return [*lines, ""]


def _line(each: Mapping[str, Any]) -> str:
    name = _cell(each["what"].strip())
    if each["what"].startswith(" "):
        name = f"– {name}"
    if each["peer"]:
        name = f"*{name}*"
    values = (number(each[key], "") for key in ("p50", "p90", "p99", "least", "most"))
    return f"| {name} | {each['n']} | {' | '.join(values)} | {each['unit']} |"


def body(results: Mapping[str, Result]) -> str:
    """All that stands between the markers."""
    if not results:
        return "There are no results yet: `make bench` makes them.\n"
    lines = ["## Bars", "", *bars_table(results), "", "## Where and when", "", *machines_table(results), ""]
    lines += ["## Details", "", "Lines in italics are peers: they are not ours.", ""]
    for name, result in results.items():
        lines += details(name, result)
    return "\n".join(lines).rstrip() + "\n"


def replaced(page: str, text: str) -> str:
    """The page with ``text`` between the markers.  Raises: ValueError: the markers are not there, once each, in order."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page does not hold {BEGIN} and {END}, once each and in this order")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when it would")
    options = parser.parse_args(arguments)
    page = options.page.read_text()
    wanted = replaced(page, body(load(options.results)))
    if options.check:
        return int(page != wanted)
    options.page.write_text(wanted)
    print("\n".join(bars_table(load(options.results))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
