"""Places where a test may end the process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import dsec
from dsec.failpoints import NAMES, VARIABLE

SOURCE = Path(dsec.__file__).parent


def _run(failpoint: str, body: str) -> subprocess.CompletedProcess[str]:
    code = f"from dsec.failpoints import reach\n{body}"
    return subprocess.run(
        [sys.executable, "-c", code], env={VARIABLE: failpoint}, capture_output=True, text=True, check=False
    )


def test_the_named_place_ends_the_process_and_no_other_does() -> None:
    told = _run(
        "create.recorded",
        "reach('create.begin'); print('here', flush=True); reach('create.recorded'); print('no')",
    )
    assert told.returncode == -signal.SIGKILL
    assert told.stdout == "here\n"


def test_the_third_time() -> None:
    told = _run("exec.done:3", "for n in range(9):\n    print(n, flush=True); reach('exec.done')")
    assert told.returncode == -signal.SIGKILL
    assert told.stdout == "0\n1\n2\n"


def test_unset_nothing_happens_and_a_wrong_name_is_told() -> None:
    assert _run("", "for _ in range(1000): reach('exec.done')").returncode == 0
    wrong = _run("exec.dnoe", "reach('exec.done')")
    assert wrong.returncode == 1
    assert "no failpoint 'exec.dnoe'" in wrong.stderr


def test_every_name_is_a_place_and_every_place_has_a_name() -> None:
    found = [
        name
        for file in SOURCE.rglob("*.py")
        for name in re.findall(r'\breach\("([a-z.]+)"\)', file.read_text(encoding="utf-8"))
    ]
    assert set(found) == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
