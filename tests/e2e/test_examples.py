"""Every example runs, as its reader would run it, and ends with exit code 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(example: str, image_store: Path, tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to(image_store)

    def templates() -> set[Path]:
        return set(image_store.rglob("tags/*/*"))

    before = templates()
    done = subprocess.run(
        [sys.executable, EXAMPLES / example],
        cwd=tmp_path,
        env={**os.environ, "DSEC_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert templates() == before, "it leaves no template"
