"""What a template costs: a sandbox of one with 200 MB of dependencies beside one of the plain base, and building the example.

Sandboxes are held, a hundred of each kind at once; the kinds take turns. ``first`` is the first holder of a round, ``hundredth`` the last ten
of a full one. The dependencies are made here (incompressible bytes, thousands of files); the example's come from where pip finds them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from time import perf_counter_ns

from benchmarks.common import ROOT, TRUE, Findings, Script, main
from benchmarks.figures import Series, milliseconds, quantile, ratio
from dsec import Dsec, Settings
from dsec.client.sync import Sandbox
from dsec.errors import DsecError
from dsec.testing.wheels import make_wheel

HOLDERS = 100
LAST = 10
WHEELS, FILES, FILE_BYTES = 4, 500, 100_000  # 200 MB in all
MIB = 2**20
EXAMPLE = ROOT / "examples" / "react-agent-python.yaml"
DOCUMENT = "name: heavy\nversion: 1\nruntime: {dependencies: [%s]}\n"


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _wheels(directory: Path, percent: int) -> list[str]:
    """Packages of 50 MB each, or a part of that; the requirements that name them."""
    noise = Random(1)
    for number in range(WHEELS):
        files = {
            f"heavy{number}/part{n}.bin": noise.randbytes(FILE_BYTES) for n in range(FILES * percent // 100)
        }
        files[f"heavy{number}/__init__.py"] = b"HERE = __file__\n"
        make_wheel(directory, f"heavy{number}", "1.0", files=files)
    return [f"heavy{number}==1.0" for number in range(WHEELS)]


def _made(dsec: Dsec, template: str, held: ExitStack) -> int:
    """Create one, run a command in it, and keep it: how long that took."""
    begun = perf_counter_ns()
    sandbox: Sandbox = dsec.sandboxes.create(template)
    done = sandbox.exec(TRUE)
    took = perf_counter_ns() - begun
    held.callback(sandbox.destroy)
    if not done.ok:
        raise RuntimeError(f"{template}: exit code {done.exit_code}")
    return took


def _round(dsec: Dsec, template: str, holders: int) -> list[int]:
    with ExitStack() as held:
        return [_made(dsec, template, held) for _ in range(holders)]


def _holders(dsec: Dsec, rounds: int, holders: int) -> tuple[list[Series], dict[str, float]]:
    """Rounds of a hundred, each kind in turn; and as many rounds of one."""
    kinds = ("base", "heavy")
    first: dict[str, list[int]] = {kind: [] for kind in kinds}
    last: dict[str, list[int]] = {kind: [] for kind in kinds}
    for kind in kinds:
        _round(dsec, kind, 10)  # what is opened once
    for turn in range(rounds):
        for kind in kinds if turn % 2 == 0 else reversed(kinds):
            times = _round(dsec, kind, holders)
            last[kind] += times[-LAST:]
    for turn in range(rounds * 20):
        for kind in kinds if turn % 2 == 0 else reversed(kinds):
            first[kind] += _round(dsec, kind, 1)
    lines = [
        milliseconds(f"{which} holder, {kind}", times[kind])
        for which, times in (("first", first), ("hundredth", last))
        for kind in kinds
    ]
    figures = {
        f"{which}_ratio": ratio(quantile(times["heavy"], 0.5), quantile(times["base"], 0.5))
        for which, times in (("first", first), ("hundredth", last))
    }
    figures["holder_ratio"] = max(figures.values())
    return lines, figures


def _example(store: Path) -> tuple[list[int], list[int]]:
    """Building it with nothing there but the base, and again."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as place:
        config, fresh = Path(place) / "config", Path(place) / "store"
        (config / "dsec").mkdir(parents=True)
        (config / "dsec" / "bases.toml").write_text('[bases]\n"python:3.11-slim" = "system"\n')
        for part in ("images", "names"):
            (fresh / part).mkdir(parents=True)
            for path in (store / part).iterdir():
                if part == "images" or path.name == "system":
                    shutil.copy2(path, fresh / part / path.name)
        with (
            _environment(XDG_CONFIG_HOME=str(config)),
            Dsec(settings=Settings(pool=0, images=fresh, pool_bytes=1024 * MIB)) as dsec,
        ):
            dsec.sandboxes.create().destroy()
            return _built(dsec, 1), _built(dsec, 5)


def _built(dsec: Dsec, times: int) -> list[int]:
    taken = []
    for _ in range(times):
        begun = perf_counter_ns()
        dsec.templates.build(EXAMPLE)
        taken.append(perf_counter_ns() - begun)
    return taken


def measure(options: argparse.Namespace) -> Findings:
    """Holders first, then the example."""
    unavailable: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as place:
        store, wheels = Path(place) / "store", Path(place) / "wheels"
        requirements = _wheels(wheels, options.percent)
        settings = Settings(pool=0, images=store, pool_bytes=4096 * MIB)
        with (
            _environment(PIP_FIND_LINKS=str(wheels), PIP_NO_INDEX="1"),
            Dsec(settings=settings) as dsec,
        ):
            dsec.templates.build((DOCUMENT % ", ".join(requirements)).encode())
            lines, figures = _holders(dsec, options.n, options.holders)
        cold: list[int] = []
        again: list[int] = []
        if not options.builds:
            unavailable["the example's build"] = "it was not asked for"
        try:
            for _ in range(options.builds):
                one, more = _example(store)
                cold += one
                again += more
        except DsecError as error:
            unavailable["the example's build"] = error.message
    if not unavailable:
        lines += [milliseconds("example: cold build", cold), milliseconds("example: nothing changed", again)]
        figures["cold_s"] = quantile(cold, 0.5) / 1e9
        figures["again_s"] = quantile(again, 0.5) / 1e9
    figures |= {"holders": float(options.holders), "percent": float(options.percent)}
    return Findings(samples=options.n, series=tuple(lines), figures=figures, unavailable=unavailable)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--holders", type=int, default=HOLDERS, help="of each kind at once")
    parser.add_argument("--percent", type=int, default=100, help="of 200 MB of dependencies")
    parser.add_argument("--builds", type=int, default=3, help="cold builds of the example")


SCRIPT = Script(
    name="templates",
    claim="a sandbox of a template with 200 MB of dependencies starts as one of the plain base does, the hundredth as the first",
    n=5,
    n_help="rounds of a hundred holders",
    measure=measure,
    options=_options,
)

if __name__ == "__main__":
    main(SCRIPT)
