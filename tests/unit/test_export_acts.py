"""Every act that is written to the journal has a class in OCSF, and no class is for an act that nobody writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dsec
from dsec.observe.events import GAP, REWOUND
from dsec.observe.ocsf_acts import ACTS

_DOTTED = re.compile(r"[a-z_]+\.[a-z_]+")
_NAMES = frozenset({"journal.key", "journal.db", "control.db", "checkpoints.jsonl"})  # of files
_OTHER_CALLS = frozenset({"reach", "getLogger"})
_EXPORTED = frozenset({GAP, REWOUND})  # said by exports about themselves


def _trees() -> dict[str, ast.Module]:
    root = Path(dsec.__file__).parent
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if path.relative_to(root).parts[0] not in ("testing", "observe")
    ]
    return {str(path.relative_to(root)): ast.parse(path.read_text()) for path in paths}


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    yield target.id, node.value.value


def acts() -> set[tuple[str, str]]:
    """What is given as an act, and every text that looks like one in a module that writes records; with the module."""
    trees = _trees()
    named: dict[str, set[str]] = {}
    for tree in trees.values():
        for name, value in _constants(tree):
            named.setdefault(name, set()).add(value)
    writing = {
        path: tree
        for path, tree in trees.items()
        if any(isinstance(node, ast.Name) and node.id in ("Draft", "Phase") for node in ast.walk(tree))
    }
    return {(path, act) for path, tree in writing.items() for act in (*_looking(tree), *_given(tree, named))}


def _looking(tree: ast.Module) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    others = {
        id(argument)
        for call in calls
        if getattr(call.func, "id", getattr(call.func, "attr", "")) in _OTHER_CALLS
        for argument in call.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
            yield from {node.value} - _NAMES if _DOTTED.fullmatch(node.value) else ()


def _given(tree: ast.Module, named: dict[str, set[str]]) -> Iterator[str]:
    own = dict(_constants(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.keyword) or node.arg != "act":
            continue
        match node.value:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Name(id=name) if name in own:
                yield own[name]
            case ast.Attribute(attr=name) if name.isupper():
                yield from named.get(name, ())


def test_every_act_that_is_written_has_a_class() -> None:
    found = acts()
    written = {act for _, act in found}
    assert {"exec", "decision", "sandbox.create", "files.write", "volume.create", "journal.drop"} <= written
    missing = sorted(f"{act} ({path})" for path, act in found if act not in ACTS)
    assert not missing, f"say in dsec/observe/ocsf_acts.py what these are: {', '.join(missing)}"


def test_every_class_is_of_an_act_that_is_written() -> None:
    written = {act for _, act in acts()} | _EXPORTED
    assert set(ACTS) <= written, f"nobody writes {sorted(set(ACTS) - written)}"
