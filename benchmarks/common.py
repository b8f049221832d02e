"""What all benchmarks share: their options, what they say of the machine, the table and the JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Series
from dsec.errors import DsecError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TRUE = ("/bin/true",)
WIDTH = 120  # of tables that go to a file or pipe
QUIET_LOAD = 1.0  # above it, other work shares the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a benchmark found.

    Attributes:
        samples: how much was measured; a bar asks for a least number.
        figures: the numbers that bars are compared with, by name.
        unavailable: what could not be measured, and why.
    """

    samples: int
    series: tuple[Series, ...]
    figures: Mapping[str, float]
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A benchmark: ``measure`` gets the parsed options."""

    name: str
    claim: str
    n: int
    measure: Callable[[argparse.Namespace], Findings]
    n_help: str = "measurements of each kind"
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def main(script: Script) -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{script.name}", description=script.claim)
    parser.add_argument("--n", type=_positive, default=script.n, help=f"{script.n_help} (default {script.n})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the JSON in FILE too")
    parser.add_argument("--quiet", action="store_true", help="no table, only JSON")
    script.options(parser)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    try:
        findings = script.measure(options)
    except DsecError as error:
        sys.exit(f"{parser.prog}: {error.message}" + (f" ({error.hint})" if error.hint else ""))
    result = {
        "benchmark": script.name,
        "claim": script.claim,
        "machine": machine() | {"load_before": round(before, 2), "load_after": round(os.getloadavg()[0], 2)},
        **asdict(findings),
    }
    if not options.quiet:
        show(result, findings)
    text = json.dumps(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def warm_up(n: int) -> int:
    """Rounds to run before the first that counts."""
    return max(1, min(20, n))


def machine() -> dict[str, object]:
    """Where and when figures were taken, and by what."""
    return {
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "cgroups": _cgroups(),
        "python": platform.python_version(),
        "nice": os.nice(0),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"


def _cgroups() -> str:
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    return "v2" if controllers.exists() else "v1"


def commit() -> str:
    """The commit that is checked out, with ``+`` when what is measured differs from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "src", "native", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def show(result: Mapping[str, object], findings: Findings) -> None:
    """The table for people."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = Table(title=str(result["claim"]), title_justify="left")
    table.add_column("what", no_wrap=True)
    for name in ("n", "p50", "p90", "p99", "least", "most", "unit"):
        table.add_column(name, justify="right")
    for each in findings.series:
        numbers = (f"{value:.3f}" for value in (each.p50, each.p90, each.p99, each.least, each.most))
        table.add_row(each.what, str(each.n), *numbers, each.unit, style="dim" if each.peer else None)
    console.print(table)
    for name, value in findings.figures.items():
        console.print(f"  {name} = {value:.4g}")
    for name, why in findings.unavailable.items():
        console.print(f"  {name}: unavailable: {why}", markup=False)
    _warn(console, result)


def _warn(console: Console, result: Mapping[str, object]) -> None:
    facts = result["machine"]
    if isinstance(facts, dict) and max(facts["load_before"], facts["load_after"]) > QUIET_LOAD:
        loads = f"{facts['load_before']} before, {facts['load_after']} after"
        console.print(f"  the machine was not quiet: load {loads}; compare ratios only")
