"""The shape of the source: what import-linter and ruff cannot see."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dsec

SOURCE = Path(dsec.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
DEEPEST = 2  # folders below src/dsec
LONGEST_FUNCTION = 60  # lines


def _names(files: list[Path]) -> list[str]:
    return [str(file.relative_to(SOURCE)) for file in files]


def test_there_is_source_to_judge() -> None:
    assert "errors.py" in _names(FILES)


@pytest.mark.parametrize("file", FILES, ids=_names(FILES))
def test_file_keeps_the_shape(file: Path) -> None:
    assert len(file.relative_to(SOURCE).parents) - 1 <= DEEPEST
    assert file.stem not in {"utils", "util", "helpers", "common", "misc"}
    tree = ast.parse(file.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_no_package_is_empty() -> None:
    packages = [init.parent for init in SOURCE.rglob("__init__.py")]
    empty = [str(p) for p in packages if not any(child.name != "__init__.py" for child in p.rglob("*.py"))]
    assert empty == []


def test_import_does_nothing_but_define() -> None:
    """No thread, no loop, no file is made by `import dsec`."""
    code = (
        "import os, threading, dsec; "
        "assert threading.active_count() == 1; "
        "assert len(os.listdir('/proc/self/fd')) <= 4, os.listdir('/proc/self/fd')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
