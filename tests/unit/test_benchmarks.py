"""Benchmarks: their statistics, the bars, the page made of results, and each script once, with very few measurements."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # they are no part of the package

from benchmarks import bars, blocks, common, figures, report  # noqa: E402

ISSUED = (
    "lifecycle_container",
    "pool",
    "exec",
    "sustained",
    "lifecycle_process",
    "pause_resume",
    "held",
    "snapshots",
    "templates",
    "transfer",
    "served",
    "journal_share",
    "environments",
)
AGAIN = {"environments_postgres": "environments"}
"""Results of the same script with other options."""


# Statistics


def test_quantiles_are_values_that_occurred() -> None:
    values = list(range(1, 101))
    assert figures.quantile(values, 0.5) == 50
    assert figures.quantile(values, 0.99) == 99
    assert figures.quantile(values, 1.0) == 100
    assert figures.quantile([7], 0.01) == 7
    assert figures.quantile([3, 1, 2], 0.5) == 2


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300), st.floats(0.001, 1.0))
def test_a_quantile_has_its_share_of_values_at_or_below_it(values: list[int], share: float) -> None:
    found = figures.quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


def test_nothing_has_no_statistics() -> None:
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match="share"):
            figures.quantile([1], share)
    with pytest.raises(ValueError, match="nothing"):
        figures.quantile([], 0.5)
    with pytest.raises(ValueError, match="nothing"):
        figures.thirds([])
    with pytest.raises(ValueError, match="compared"):
        figures.ratio(1.0, 0.0)


def test_a_series_of_nanoseconds_is_told_in_milliseconds() -> None:
    line = figures.milliseconds("x", [1_000_000, 3_000_000, 2_000_000], peer=True)
    assert (line.p50, line.least, line.most, line.mean, line.n) == (2.0, 1.0, 3.0, 2.0, 3)
    assert (line.unit, line.peer) == ("ms", True)


def test_drift_compares_the_first_third_with_the_last() -> None:
    assert figures.thirds([1.0, 3.0, 9.0, 9.0, 5.0, 7.0]) == (2.0, 6.0)
    assert figures.thirds([4.0]) == (4.0, 4.0)


def test_of_two_sdks_the_worse_figure_counts() -> None:
    quick_median = figures.milliseconds("Dsec", [1_000_000] * 9 + [9_000_000])
    quick_tail = figures.milliseconds("AsyncDsec", [2_000_000] * 10)
    assert figures.slower(quick_median, quick_tail) == {
        "p50_ms": 2.0,
        "p99_ms": 9.0,
        "dsec_p50_ms": 1.0,
        "asyncdsec_p50_ms": 2.0,
    }


# Blocks


@pytest.mark.parametrize(("n", "sizes"), [(1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4])])
def test_every_side_runs_equally_often_and_in_blocks(n: int, sizes: list[int]) -> None:
    order: list[str] = []
    blocks.in_turn(n, [blocks.repeated(lambda name=name: order.append(name)) for name in "ab"], block=4)
    assert "".join(order) == "".join("a" * size + "b" * size for size in sizes)


def test_a_side_keeps_what_its_operation_tells_and_another_one_waits_on_a_loop() -> None:
    told: list[int] = []
    awaited: list[object] = []

    async def operation() -> None:
        awaited.append(asyncio.get_running_loop())

    with asyncio.Runner() as runner:
        blocks.in_turn(5, [blocks.timed_into(told, lambda: 7), blocks.on_loop(runner, operation)], block=2)
        assert awaited == [runner.get_loop()] * 5
    assert told == [7] * 5


# Bars


def test_every_script_has_a_bar_and_every_bar_a_script() -> None:
    assert {AGAIN.get(bar.result, bar.result) for bar in bars.BARS} == set(ISSUED)
    for name in ISSUED:
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()


def test_a_bar_is_met_at_its_bound_and_not_beyond() -> None:
    low = bars.Bar(what="a", result="r", figure="f", sign="<=", bound=6.0, unit="ms")
    high = bars.Bar(what="a", result="r", figure="f", sign=">=", bound=1.5, unit="×")
    assert [low.met(value) for value in (5.9, 6.0, 6.01)] == [True, True, False]
    assert [high.met(value) for value in (1.49, 1.5, 2.0)] == [False, True, True]


# The page


def result(**changes: Any) -> dict[str, Any]:
    """A result as a script keeps it."""
    line = figures.milliseconds("  exec | true", [1_000_000] * 4)
    made: dict[str, Any] = {
        "benchmark": "exec",
        "claim": "exec",
        "machine": {
            **common.machine(),
            "load_before": 0.1,
            "load_after": 0.2,
        },
        "samples": 1000,
        "series": [{name: getattr(line, name) for name in line.__dataclass_fields__}],
        "figures": {"p50_ms": 1.2, "p99_ms": 9.0},
        "unavailable": {"crun": "it is not\ninstalled | here"},
    }
    return made | changes


BAR = bars.Bar(what="a", result="exec", figure="p50_ms", sign="<=", bound=1.3, unit="ms")


@pytest.mark.parametrize(
    ("results", "met"),
    [
        ({"exec": result()}, "yes"),
        ({"exec": result(figures={"p50_ms": 1.31})}, "**no**"),
        ({"exec": result(samples=99)}, "too few samples: 99 of 100"),
        ({"exec": result(figures={}, unavailable={"pool": "none"})}, "not measured (pool: none)"),
        ({}, "not measured"),
    ],
)
def test_a_verdict_is_yes_only_for_a_full_measurement(results: dict[str, Any], met: str) -> None:
    assert report.verdict(BAR, results)[1] == met


def test_a_verdict_needs_what_the_bar_requires() -> None:
    bar = bars.Bar(
        what="a",
        result="exec",
        figure="p50_ms",
        sign="<=",
        bound=2.0,
        unit="",
        requires={"file_size_mib": 1024.0},
    )
    small = {"exec": result(figures={"p50_ms": 1.0, "file_size_mib": 64.0})}
    large = {"exec": result(figures={"p50_ms": 1.0, "file_size_mib": 1024.0})}
    assert report.verdict(bar, small)[1] == "file_size_mib is 64, not 1024"
    assert report.verdict(bar, large)[1] == "yes"


def test_the_page_is_made_of_the_results_and_can_be_checked(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    results.mkdir()
    (results / "exec.json").write_text(json.dumps(result()))
    page.write_text(f"before\n\n{report.BEGIN}\nOUTDATED\n{report.END}\nafter\n")
    arguments = ["--page", str(page), "--results", str(results)]
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "OUTDATED" not in text
    assert "| exec in a running sandbox: p50 | ≤ 1.3 ms | 1.2 ms | yes |" in text
    assert "| exec in a running sandbox: p99 | ≤ 4 ms | 9 ms | **no** |" in text
    assert "not measured (crun: it is not installed \\| here)" in text
    assert "| – exec \\| true | 4 |" in text


def test_a_page_without_markers_and_a_file_that_is_no_result_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="once each"):
        report.replaced("no markers", "text")
    (tmp_path / "x.json").write_text('{"benchmark": "x"}')
    with pytest.raises(ValueError, match="claim"):
        report.load(tmp_path)


def test_the_published_page_says_what_the_kept_results_say() -> None:
    assert report.main(["--check"]) == 0, "run `python -m benchmarks.report`"


# The scripts


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Run a script; what it told as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quiet", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


SMOKE = {
    "lifecycle_container": ["--n", "2"],
    "lifecycle_process": ["--n", "2"],
    "exec": ["--n", "2"],
    "pause_resume": ["--n", "2"],
    "pool": ["--n", "2"],
    "snapshots": ["--n", "1", "--percent", "1"],
    "templates": ["--n", "1", "--percent", "1", "--holders", "3", "--builds", "0"],
    "held": ["--n", "4", "--settle", "0.1"],
    "sustained": ["--seconds", "1", "--block", "0.5"],
    "transfer": ["--n", "1", "--mib", "8", "--stdout-mb", "4"],
    "served": ["--n", "2", "--seconds", "1", "--pause", "0"],
    "journal_share": ["--n", "32"],
    "environments": ["--n", "2000", "--live", "2"],
}


SLOW = pytest.mark.slow


@pytest.mark.bench
@pytest.mark.needs_root
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=SLOW if name in ("sustained", "transfer", "served", "environments") else ())
        for name in ISSUED
    ],
)
def test_a_script_measures_what_its_bars_ask_for(name: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    told = run(name, *SMOKE[name], "--json", str(kept))
    assert json.loads(kept.read_text()) == told
    assert told["benchmark"] == name
    assert {"kernel", "cpus", "memory_mib", "python", "commit", "date", "command"} <= told["machine"].keys()
    assert f"benchmarks.{name}" in told["machine"]["command"]
    assert {"load_before", "load_after"} <= told["machine"].keys()
    if name in ("exec", "lifecycle_container"):
        assert {line["what"].split(maxsplit=1)[0].rstrip(":,") for line in told["series"]} >= {
            "Dsec",
            "AsyncDsec",
        }
        assert told["figures"]["p50_ms"] == max(
            told["figures"][f"{sdk}_p50_ms"] for sdk in ("dsec", "asyncdsec")
        )
    wanted = {bar.figure for bar in bars.BARS if bar.result == name}
    missing = wanted - told["figures"].keys()
    assert not missing or told["unavailable"], f"{missing} is missing without a reason"
    for line in told["series"]:
        assert (
            0 <= line["least"] <= line["p50"] <= line["p90"] <= line["p99"] <= line["most"]
            or line["unit"] == "MiB"
        )
    if name == "transfer":
        assert told["figures"]["exact"] == 1.0, told["unavailable"]
