"""The command line without an engine: its help, its summaries, what it loads."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module, metadata

import pytest
from typer.testing import CliRunner

import dsec
from dsec.cli.codes import EXIT_CODES
from dsec.cli.main import COMMANDS, Switches, build
from dsec.errors import all_errors


def _functions(name: str) -> list[object]:
    module = import_module(f"dsec.cli.{COMMANDS[name][0]}")
    found = [
        one.callback
        for one in module.app.registered_commands
        if (one.name or getattr(one.callback, "__name__", "")) == name
    ]
    groups = [one.typer_instance for one in module.app.registered_groups if one.name == name]
    return found + [one.callback for group in groups for one in group.registered_commands]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str) -> None:
    functions = _functions(name)
    assert functions
    for function in functions:
        text = inspect.getdoc(function) or ""
        assert f"Examples:\n\n    dsec {name}" in text or f"dsec {name}" in text.partition("Examples:")[2], (
            name
        )
    if len(functions) == 1:
        assert (inspect.getdoc(functions[0]) or "").startswith(COMMANDS[name][1].rstrip("."))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_loads_it(name: str) -> None:
    result = CliRunner().invoke(build([name], Switches()), [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output


def test_the_general_help_loads_no_engine() -> None:
    program = (
        "import sys; sys.argv = ['dsec', '--help']\n"
        "from dsec.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'dsec.wiring', 'asyncio', 'uvloop', 'sqlite3', 'cryptography', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_importing_the_package_looks_no_version_up() -> None:
    program = (
        "import sys, dsec; assert 'importlib.metadata' not in sys.modules\n"
        "assert dsec.__version__.count('.') == 2, dsec.__version__\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_without_a_distribution_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(AttributeError, match="not installed"):
        _ = dsec.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dsec.nothing  # type: ignore[attr-defined]


def test_the_package_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsec", "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dsec {dsec.__version__}\n", "")


@pytest.mark.parametrize(
    ("stdout", "code", "words"), [("/dev/full", 1, "No space left"), ("a pipe nobody reads", 141, "")]
)
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"]])
def test_output_that_nobody_gets(arguments: list[str], stdout: str, code: int, words: str) -> None:
    if stdout == "/dev/full":
        stream = os.open(stdout, os.O_WRONLY)
    else:
        reader, stream = os.pipe()
        os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dsec", *arguments],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(stream)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_codes_are_of_codes_that_exist() -> None:
    assert set(EXIT_CODES) <= {one.code for one in all_errors()}
