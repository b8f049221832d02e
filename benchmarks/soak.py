"""``make soak``: a server is killed again and again while many ask it for everything; the first violation ends the run, and is told.

``python -m benchmarks.soak [--minutes 10 | --rounds N] [--database sqlite|postgresql] [--level container|process|both] [--seed N [--first ROUND]]``, as
root. What each run came to is added to ``benchmarks/soak.json``, of which ``scripts/soak_reference.py`` makes a page. See docs/how-to/soak.md.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, machine
from dsec.testing.soak.house import Told
from dsec.testing.soak.run import LEVELS, Wish, soak

TOTAL = ROOT / "benchmarks" / "soak.json"
KEPT = 50  # runs and violations that are told one by one; all are counted
LONGEST = 2000  # characters of a violation that are kept


def added(total: dict[str, Any], wish: Wish, told: Told) -> dict[str, Any]:
    """The total with one run more."""
    sums = total.get("sums", {})
    restarts = sorted(told.restarts)
    facts = machine()
    run = {
        "date": facts["date"],
        "commit": facts["commit"],
        "kernel": facts["kernel"],
        "cpus": facts["cpus"],
        "memory_mib": facts["memory_mib"],
        "database": wish.database,
        "level": wish.level,
        "seed": wish.seed,
        "first": wish.first,
        "rounds": told.rounds,
        "seconds": round(told.seconds),
        "acts": sum(told.acts.values()),
        "restart_p50_s": round(restarts[len(restarts) // 2], 2) if restarts else 0,
        "restart_most_s": round(max(restarts, default=0), 2),
        "violations": len(told.wrong),
    }
    violations = [
        {"date": facts["date"], "commit": facts["commit"], "seed": wish.seed, "what": text[:LONGEST]}
        for text in told.wrong
    ]
    return {
        "sums": {
            "runs": sums.get("runs", 0) + 1,
            "rounds": sums.get("rounds", 0) + told.rounds,
            "seconds": sums.get("seconds", 0) + round(told.seconds),
            "restarts": sums.get("restarts", 0) + len(restarts),
            "restart_most_s": max(sums.get("restart_most_s", 0), run["restart_most_s"]),
            "violations": sums.get("violations", 0) + len(told.wrong),
            "kills": _sum(sums.get("kills", {}), told.kills),
            "failpoints": _sum(sums.get("failpoints", {}), told.failpoints),
            "acts": _sum(sums.get("acts", {}), told.acts),
            "refused": _sum(sums.get("refused", {}), told.refused),
        },
        "runs": [*total.get("runs", []), run][-KEPT:],
        "violations": [*total.get("violations", []), *violations][-KEPT:],
    }


def _sum(before: dict[str, int], more: Counter[str]) -> dict[str, int]:
    return dict(sorted((Counter(before) + more).items()))


def publish(path: Path, wish: Wish, told: Told) -> None:
    """Add a run to the total; runs that end at the same time wait for one another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        total = json.loads(path.read_text()) if path.exists() else {}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(added(total, wish, told), indent=1) + "\n")
        fresh.replace(path)
    finally:
        os.close(directory)


def wish_of(words: list[str] | None = None) -> tuple[Wish, Path | None]:
    """What the command line asks for, and where the total is kept; None = nowhere."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="go on for so long (default 10)")
    parser.add_argument("--rounds", type=int, default=0, help="so many rounds, however long they take")
    parser.add_argument("--home", type=int, default=20, help="rounds of one home (default 20)")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument(
        "--level", choices=tuple(LEVELS), default="both", help="of the sandboxes (default both)"
    )
    parser.add_argument("--seed", type=int, default=None, help="what chance decides, as another run had it")
    parser.add_argument("--first", type=int, default=0, help="the first round of that seed")
    parser.add_argument(
        "--restart", type=float, default=10.0, help="seconds within which a server must be back (default 10)"
    )
    parser.add_argument("--directory", type=Path, default=None, help="for homes and images; kept")
    parser.add_argument("--total", type=Path, default=TOTAL, help="the published total")
    parser.add_argument("--no-total", action="store_true", help="add nothing to it")
    told = parser.parse_args(words)
    total = None if told.no_total else told.total
    options = {name: value for name, value in vars(told).items() if name not in ("total", "no_total")}
    options["seed"] = secrets.randbelow(2**32) if told.seed is None else told.seed
    return Wish(**options), total


def main() -> int:
    wish, total = wish_of()
    if os.geteuid() != 0:
        sys.exit("it needs root: control groups, mounts, and processes of others")
    told = Told()
    print(f"seed {wish.seed}", flush=True)
    try:
        soak(wish, told, lambda line: print(line, flush=True))
    except AssertionError as error:
        told.wrong.append(f"round {wish.first + told.rounds}: {error}")
    if total is not None:
        publish(total, wish, told)
    for text in told.wrong:
        print(f"VIOLATION {text}\n", file=sys.stderr)
    if told.wrong:
        last = wish.first + max(told.rounds - 1, 0)
        again = (
            f"--seed {wish.seed} --first {last} --rounds 1 --database {wish.database} --level {wish.level}"
        )
        print(f"again: python -m benchmarks.soak {again}", file=sys.stderr)
    print(
        f"{told.rounds} rounds in {told.seconds:.0f} s, {len(told.wrong)} violations; kills: {dict(told.kills)}"
    )
    return 1 if told.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
