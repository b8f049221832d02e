"""Pieces of the command line that need no engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from dsec.cli import copying, machine, options, output, session
from dsec.cli.main import main
from dsec.cli.origins import bases_explained
from dsec.cli.records import record_line
from dsec.cli.sandboxes import readable
from dsec.errors import BadRequest, Busy, Conflict, Denied, NotFound, Unsupported
from dsec.model.health import Verdict
from dsec.model.ids import new_exec_id, new_sandbox_id
from dsec.model.journal import Phase, Record
from dsec.model.sandbox import Level, Limits, Volume


@pytest.mark.parametrize("bad", ["", "x", "=v"])
def test_a_pair_without_name_or_value_is_refused(bad: str) -> None:
    with pytest.raises(BadRequest, match=r"env: .* is not NAME=VALUE"):
        options.pairs("env", [bad])


def test_pairs() -> None:
    assert options.pairs("env", ["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    assert options.pairs("env", None) == {}


def test_limits_that_are_not_given_are_the_defaults() -> None:
    assert options.limits(None, None, None, None) is None
    assert options.limits(64, 0.5, 32, 100) == Limits(memory_mib=64, cpu_millis=500, pids=32, disk_mib=100)


@pytest.mark.parametrize("cpus", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_cpus_out_of_range(cpus: float) -> None:
    with pytest.raises(BadRequest, match="cpus"):
        options.limits(None, cpus, None, None)


def test_networks_there_are_not() -> None:
    options.check_net("none")
    with pytest.raises(Unsupported, match="no network 'host'"):
        options.check_net("host")


def test_moments_are_iso_8601() -> None:
    assert output.moment(0.0) == "-"
    assert output.moment(1.5) == "1970-01-01T00:00:01Z"
    assert output.moment(1796051938.2595, milliseconds=True) == "2026-11-30T15:18:58.259Z"


def test_what_people_read_has_no_seconds_since_the_epoch() -> None:
    shown = readable({"id": "x", "created_at": 1.0, "ended_at": 0.0, "idle": 5.0})
    assert shown == {"id": "x", "created_at": "1970-01-01T00:00:01Z", "ended_at": "-", "idle": 5.0}


def test_a_record_for_people_tells_who_acted() -> None:
    command = new_exec_id()
    record = Record(
        chain=new_sandbox_id(),
        seq=7,
        at=1.0,
        act="exec",
        phase=Phase.INTENT,
        ref=command,
        actor="reaper",
        payload={"argv": ["true"]},
        digest="",
    )
    words = record_line(record).split()
    assert words[:6] == ["1970-01-01T00:00:01.000Z", "7", "exec", "intent", "reaper", command]


def test_an_engine_that_somebody_else_has_is_busy() -> None:
    with pytest.raises(Busy, match="another command"), session.taken():
        raise Conflict("/x is in use by another engine", home="/x")
    with pytest.raises(Conflict), session.taken():
        raise Conflict("something else")


def test_what_doctor_advises_are_options() -> None:
    verdict = Verdict(
        level=Level.CONTAINER,
        available=False,
        reason="needs root",
        hint="run as root, or use level='process'",
    )
    assert machine._verdict_lines(verdict) == [
        "  container: unavailable (needs root; to enable: run as root, or use --level process)"
    ]


def test_a_home_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_HOME", str(tmp_path))
    assert session.engine_home() == tmp_path / "engine"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(Denied, match="Permission denied") as caught:
        session.engine_home()
    assert caught.value.facts == {"home": str(tmp_path)}


def test_long_messages_are_cut(capfd: pytest.CaptureFixture[str]) -> None:
    output.complain("x" * 100_000 + "end", "h" * 100_000)
    said = capfd.readouterr().err
    assert len(said) < 5000
    assert "end\n" in said


def test_every_line_of_a_message_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    output.complain("a.yaml: 2 errors\n  line 1: \x1b[2J\n\n\tend\r\n", "write\n  x = 1")
    assert capfd.readouterr().err.split("\n") == [
        "dsec: a.yaml: 2 errors",
        "        line 1: \\x1b[2J",
        "",
        "              end",
        "      hint: write",
        "              x = 1",
        "",
    ]


def test_what_is_left_out_of_many_lines_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    output.complain("\n".join(f"line {number} {'of some words ' * 8}" for number in range(150)))
    said = capfd.readouterr().err
    assert all(f" line {number} " in said for number in range(150))
    output.complain("\n".join(f"line {number}" for number in range(1000)))
    lines = capfd.readouterr().err.splitlines()
    assert (lines[0], lines[-1].strip(), len(lines)) == ("dsec: line 0", "line 999", 201)
    assert "      ... (800 lines are left out) ..." in lines
    output.complain("\n".join(["x" * 1500] * 1000))
    assert len(capfd.readouterr().err) < 25_000


def test_a_failing_stream_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setitem(output._STREAMS, full, "standard output")
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            output.write_all(full, b"x")
    finally:
        os.close(full)
    assert caught.value.filename == "standard output"


def test_leading_dashes_are_no_part_of_the_command() -> None:
    assert list(options.asked(["--", "echo", "--"], env={}).argv) == ["echo", "--"]
    with pytest.raises(BadRequest, match="no command"):
        options.asked(["--"], env={})


def test_an_alias_is_explained_as_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def hint(name: str) -> str:
        with pytest.raises(NotFound) as caught, bases_explained(name):
            raise NotFound(f"there is no template {name!r}", hint="build it")
        return caught.value.hint

    assert hint("python:3.11-slim") == "build it"
    (tmp_path / "dsec").mkdir()
    (tmp_path / "dsec/bases.toml").write_text('[bases]\n"python:3.11-slim" = "system"\n')
    assert "runtime: {base: python:3.11-slim}" in hint("python:3.11-slim")
    assert hint("python:3.12") == "build it"


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
    assert said.err.startswith("dsec: --net: there is no network 'host'\n      hint: ")
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
        (["run", "--memory", "x", "--", "true"], 2, "'--memory': 'x' is not a size in whole MiB"),
        (["run", "--memory", "512K", "--", "true"], 2, "'--memory': '512K' is not a size in whole MiB"),
        (["run", "--disk", "10X", "--", "true"], 2, "'--disk': '10X' is not a size"),
        (["run", "--pids", "1.5", "--", "true"], 2, "'--pids': '1.5' is not a whole number"),
        (["run", "--cpus", "many", "--", "true"], 2, "'--cpus': 'many' is not a number"),
        (["run", "--timeout", "1m", "--", "true"], 2, "'--timeout': '1m' is not a number"),
        (["create", "--ttl", "1h"], 2, "'--ttl': '1h' is not a number"),
        (["create", "--idle", "x"], 2, "'--idle': 'x' is not a number"),
        (["fork", "-n", "x", "sb-x"], 2, "'x' is not a whole number"),
        (["events", "--after", "-1", "sb-x"], 2, "-1 is not at least 0"),
        (["bench", "--pool", "65"], 2, "65 is not from 0 to 64"),
        (["volume", "create", "x", "--size", "big"], 2, "'--size': 'big' is not a size"),
        (["run", "--timeout", "-1", "--", "true"], 2, "--timeout: -1"),
        (["run", "--cpus", "nan", "--", "true"], 2, "--cpus"),
        (["run", "--memory", "1", "--", "true"], 2, "--memory: 1 "),
        (
            ["run", "-v", "/a:/x", "-v", "/b:/x/y", "--", "true"],
            2,
            "--volume: '/x' and '/x/y' lie in one another",
        ),
        (["run", "-v", "x", "--", "true"], 2, "--volume"),
        (["run", "-v", "src/x:/x", "--", "true"], 2, "--volume source: 'src/x' is not the name of a volume"),
        (["run", "-v", "Data:/x", "--", "true"], 2, "--volume source: 'Data' is not the name of a volume"),
        (["volume", "create"], 2, "NAME"),
        (["image", "get", "-v", "docker://nothing"], 2, "write docker://HOST"),
        (["exec", "sb-x", "--timeout", "5", "true"], 2, "before the ID"),
        (["exec", "-d", "--tty", "sb-x", "true"], 2, "--tty: not with"),
        (["exec", "-d", "-i", "sb-x", "true"], 2, "--interactive: not with"),
        (["exec", "-d", "--scratch", "sb-x", "true"], 2, "choose one"),
        (["ps", "--problems", "--all"], 2, "choose one"),
        (["ps", "--problems", "--pool"], 2, "choose one"),
        (["ps", "--pool", "x"], 2, "choose one"),
        (["ps", "--problems", "x"], 2, "not a sandbox id"),
        (["run", "-e", "x", "--", "true"], 2, "NAME=VALUE"),
        (["ls", "--state", "odd"], 2, "choose from"),
        (["rm"], 2, "nothing is named"),
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
    assert "hint: " in said.err or "Try 'dsec" in said.err
