"""Pieces of the command line that need no engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from dsec.cli import copying, options, output
from dsec.cli.main import main
from dsec.errors import BadRequest, Unsupported
from dsec.model.ids import new_sandbox_id
from dsec.model.sandbox import Limits, Volume


@pytest.mark.parametrize("bad", ["", "x", "=v"])
def test_a_pair_without_name_or_value_is_refused(bad: str) -> None:
    with pytest.raises(BadRequest, match=r"env: .* is not NAME=VALUE"):
        options.pairs("env", [bad])


def test_pairs() -> None:
    assert options.pairs("env", ["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    assert options.pairs("env", None) == {}


def test_limits_that_are_not_given_are_the_defaults() -> None:
    assert options.limits(None, None, None, None) == Limits()
    assert options.limits(64, 0.5, 32, 100) == Limits(memory_mib=64, cpu_millis=500, pids=32, disk_mib=100)


@pytest.mark.parametrize("cpus", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_cpus_out_of_range(cpus: float) -> None:
    with pytest.raises(BadRequest, match="cpus"):
        options.limits(None, cpus, None, None)


def test_networks_there_are_not() -> None:
    options.check_net("none")
    with pytest.raises(Unsupported, match="no network 'host'"):
        options.check_net("host")


def test_leading_dashes_are_no_part_of_the_command() -> None:
    assert list(options.asked(["--", "echo", "--"], env={}).argv) == ["echo", "--"]
    with pytest.raises(BadRequest, match="no command"):
        options.asked(["--"], env={})


def test_sides_of_a_copy() -> None:
    name = new_sandbox_id()
    assert copying.side("SRC", f"{name}:/a:b") == copying.Side(name, "/a:b")
    assert copying.side("SRC", "C:/x") == copying.Side(None, "C:/x")
    assert copying.side("SRC", f"./{name}:x") == copying.Side(None, f"./{name}:x")
    assert copying.side("DST", "-").stream
    for bad in ("", f"{name}:", "sb-short:/x"):
        with pytest.raises(BadRequest):
            copying.side("SRC", bad)


def test_json_holds_whatever_names_there_are(capfd: pytest.CaptureFixture[str]) -> None:
    output.put_json(
        {"name": os.fsdecode(b"\xff"), "path": Path("/x"), "set": frozenset({"b", "a"}), "raw": b"\0"}
    )
    found = json.loads(capfd.readouterr().out)
    assert found == {"name": "\\xff", "path": "/x", "set": ["a", "b"], "raw": "AA=="}


def test_dataclasses_become_objects() -> None:
    assert output.plain(Volume(Path("/a"), "/b")) == {"source": "/a", "target": "/b", "read_only": False}


def test_bytes_in_json_say_how_they_are_written() -> None:
    assert output.text_of(b"hi") == {"data": "hi", "encoding": "utf-8"}
    assert output.text_of(b"\xff") == {"data": "/w==", "encoding": "base64"}


def test_what_a_sandbox_wrote_does_not_steer_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    output.put_table(("A", "B"), [("\x1b[2J", "x"), ("é", "y")])
    assert capfd.readouterr().out == "A        B\n\\x1b[2J  x\né        y\n"


def test_a_reader_that_has_gone_ends_us_as_sigpipe_would() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    kept = os.dup(1)
    os.dup2(write_end, 1)
    try:
        with pytest.raises(typer.Exit) as caught:
            output.put("x")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(write_end)
    assert caught.value.exit_code == 141


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0s"), (-5, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200_000, "2d")]
)
def test_durations(seconds: float, words: str) -> None:
    assert output.duration(seconds) == words


def test_an_error_is_a_message_a_hint_and_an_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--net", "host", "--", "true"])
    said = capfd.readouterr()
    assert caught.value.code == 69
    assert said.out == ""
    assert said.err.startswith("dsec: net: there is no network 'host'\n      hint: ")
    assert "Traceback" not in said.err


def test_debug_shows_where_it_came_from(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--debug", "run", "--net", "host", "--", "true"])
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nosuch"], 2, "nosuch"),
        (["run", "--"], 2, "CMD"),
        (["run", "--nosuch", "--", "true"], 2, "--nosuch"),
        (["run", "--memory", "x", "--", "true"], 2, "--memory"),
        (["run", "--timeout", "-1", "--", "true"], 2, "timeout"),
        (["run", "-e", "x", "--", "true"], 2, "NAME=VALUE"),
        (["ls", "--state", "odd"], 2, "choose from"),
        (["rm"], 2, "--all"),
        (["rm", "--all", "x"], 2, "--all"),
        (["cp", "a", "b"], 2, "ID:PATH"),
        (["bench", "-n", "0"], 2, "--count"),
        (["audit", "nosuch"], 2, "nosuch"),
    ],
)
def test_usage_errors(arguments: list[str], code: int, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capfd.readouterr()
    assert (caught.value.code, said.out) == (code, "")
    assert words in said.err
