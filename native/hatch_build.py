"""Builds the two static programs with `make -C native` and puts them into the package.

Runs for wheels and editable installs alike (an editable install is a wheel that points at the source), also from an
unpacked sdist. The wheel is tagged for this machine's architecture but for no Python version and no libc: the
programs are static and nothing links against Python.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = ("init", "spawner")
NEEDS = "needs Linux, make, gcc and the static libc; on Debian: apt-get install make gcc libc6-dev"


class NativeBuildHook(BuildHookInterface[Any]):
    """Named in pyproject.toml as the custom hook of the wheel target."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, install, and tag.  Raises: RuntimeError: a program cannot be built; says which and what to install."""
        root = Path(self.root)
        build(root / "native")
        for program in PROGRAMS:
            install(root / "native" / "build" / program, root / "src" / "dsec" / "_native" / program)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def clean(self, versions: list[str]) -> None:
        """Forget what was built (`hatch clean`)."""
        shutil.rmtree(Path(self.root) / "src" / "dsec" / "_native", ignore_errors=True)
        shutil.rmtree(Path(self.root) / "native" / "build", ignore_errors=True)


def build(native: Path) -> None:
    """Run make.  Raises: RuntimeError."""
    make = shutil.which("make")
    if make is None:
        raise RuntimeError(f"'make' was not found: building dsec's programs {NEEDS}")
    done = subprocess.run([make, "-C", str(native)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"make -C {native} failed ({NEEDS}):\n{done.stdout}{done.stderr}")


def install(program: Path, target: Path) -> None:
    """Copy by rename, so that a running program is never overwritten.  Raises: RuntimeError."""
    if not program.is_file():
        raise RuntimeError(f"make succeeded but made no {program}: native/Makefile must build it by default")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    shutil.copyfile(program, fresh)
    Path(fresh).chmod(0o755)
    Path(fresh).replace(target)
