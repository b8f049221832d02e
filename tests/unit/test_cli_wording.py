"""Errors as the command line words them: options instead of Python's parameters, and always a hint."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import dsec
from dsec.cli.main import COMMANDS
from dsec.cli.wording import HINTS, PARAMETERS, PYTHON_ONLY, in_options, worded
from dsec.errors import BadRequest, DsecError, NotFound, Unsupported, all_errors

SOURCE = Path(dsec.__file__).parent
NOT_OF_THE_CLI = {"cli", "testing", "integrations"}
ASSIGNED = re.compile(r"\b([a-z_]+)=")
FIELD = re.compile(r"([a-z][a-z_. ]*)(?:\[\d*\])?:")


@pytest.mark.parametrize(
    ("hint", "command", "shown"),
    [
        ("use level='container'", "run", "use --level container"),
        ("use level='container'", "", "use --level container"),
        ("use level='container'", "exec", "use `dsec create --level container`"),
        (
            "run as root, or use level='process', which does not",
            "run",
            "run as root, or use --level process, which does not",
        ),
        ("start it with stdin=True", "exec", "start it with --interactive"),
        ("leave `user` out", "run", "leave --user out"),
        ("Limits(memory_mib=256)", "create", "--memory 256"),
        ("limits=Limits(pids=32)", "create", "--pids 32"),
        ("make the pool larger (pool_bytes)", "run", "make the pool larger (in Python: Settings.pool_bytes)"),
        ("choose 'root' or 'user'", "run", "choose 'root' or 'user'"),
        ("`dsec ls` lists them", "rm", "`dsec ls` lists them"),
    ],
)
def test_names_in_hints_become_options(hint: str, command: str, shown: str) -> None:
    assert in_options(hint, command) == shown


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("level: there is no level 'x'", "--level: there is no level 'x'"),
        ("limits.memory_mib: 1 is too little", "--memory: 1 is too little"),
        ("volume source: '/x': No such file", "--volume source: '/x': No such file"),
        ("argv: it is empty", "CMD: it is empty"),
        ("command[1]: it holds a NUL byte", "CMD: it holds a NUL byte"),
        ("home: /x is no directory", "$DSEC_HOME: /x is no directory"),
        # What somebody typed stays as it was typed.
        ("env: 'level=1' is not NAME=VALUE", "--env: 'level=1' is not NAME=VALUE"),
        ("there is no sandbox level=x", "there is no sandbox level=x"),
        ("user-land: no field", "user-land: no field"),
    ],
)
def test_the_field_of_a_message_becomes_an_option(message: str, shown: str) -> None:
    assert worded(BadRequest(message, hint="x")) == (shown, "x")


def test_every_error_has_a_hint() -> None:
    assert {one.code for one in all_errors()} == set(HINTS)
    for kind in all_errors():
        if (
            kind.__module__ == DsecError.__module__
        ):  # kinds of kinds are made where they are needed, with facts of their own
            assert worded(kind("something"))[1]
    assert worded(BadRequest("x: y"), "cp")[1] == "`dsec cp --help` tells what it takes"
    assert worded(BadRequest("x: y"))[1] == "`dsec --help` tells what it takes"
    assert worded(NotFound("x", hint="its own"))[1] == "its own"
    assert worded(Unsupported("scratch: no", hint="use level='container'"), "exec") == (
        "--scratch: no",
        "use `dsec create --level container`",
    )


def test_an_error_of_a_newer_kind_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    error = DsecError("x")
    monkeypatch.setattr(DsecError, "code", "newer")
    assert "--debug" in worded(error)[1]


def _options() -> Iterator[str]:
    for module in {name for name, _ in COMMANDS.values()}:
        for one in import_module(f"dsec.cli.{module}").app.registered_commands:
            hints = get_type_hints(one.callback, include_extras=True)
            for parameter in inspect.signature(one.callback).parameters:
                info = hints[parameter].__metadata__[0]
                names = (info.default, *(info.param_decls or ()), info.metavar)
                yield from (part for name in names if isinstance(name, str) for part in name.split("/"))


def test_every_option_that_is_named_exists() -> None:
    have = {*_options(), "CMD", "$DSEC_HOME", "$DSEC_API_KEY"}
    named = {word for shown in PARAMETERS.values() for word in re.findall(r"--[a-z-]+|[$A-Z_]{2,}", shown)}
    assert named <= have, named - have


def _texts(node: ast.expr) -> str:
    """The constant parts of a text, with "…" for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(one.value if isinstance(one, ast.Constant) else "…" for one in node.values)  # type: ignore[misc]
    return ""


def _raised() -> Iterator[tuple[str, str, str]]:
    """Module, message and hint of every error that is made below the command line."""
    kinds = {one.__name__ for one in all_errors()}
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in NOT_OF_THE_CLI:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                hint = next((one.value for one in node.keywords if one.arg == "hint"), ast.Constant(""))
                yield path.name, _texts(node.args[0]) if node.args else "", _texts(hint)


# In hints about values of a wrong type, which no option can give.
LIBRARY_ONLY = {"errors", "limits", "settings", "states", "volumes"}


def test_no_hint_speaks_of_a_parameter_that_is_not_translated() -> None:
    known = {*PARAMETERS, *PYTHON_ONLY, *LIBRARY_ONLY}
    found = {(where, name) for where, _, hint in _raised() for name in ASSIGNED.findall(hint)}
    assert {one for one in found if one[1] not in known} == set()
    assert len(found) > 5  # the search finds what there is


def test_what_a_hint_assigns_is_gone_when_it_is_shown() -> None:
    for where, _, hint in _raised():
        left = set(ASSIGNED.findall(in_options(hint))) - PYTHON_ONLY - LIBRARY_ONLY
        assert not left, (where, hint)
