"""What a bare machine is given by ``make setup`` is enough."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dsec.images.packages import REQUIRED

ROOT = Path(__file__).resolve().parents[2]


def test_the_base_image_is_made_of_what_every_debian_has_or_setup_installs() -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("there is no dpkg here")
    lines = (ROOT / "scripts" / "debian-packages.txt").read_text().splitlines()
    named = {line for line in lines if line and not line.startswith("#")}
    query = ["dpkg-query", "-W", "-f", "${Package} ${Priority}\n"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    everywhere = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" required")}
    assert "bash" in everywhere
    assert "bzip2" not in everywhere, "the control: not every machine has it"
    assert set(REQUIRED) - {"libc6"} <= everywhere | named  # libc6: they all depend on it
