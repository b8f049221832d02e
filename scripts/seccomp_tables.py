"""Writes native/spawner/seccomp_tables.h from the policies in native/seccomp.

With `--check` nothing is written; the exit status is 1 when the header is not what would be written now.
Needs gcc and libseccomp-dev 2.5.4 (Debian 12) or newer, which knows the numbers of the calls; every version gives the
same header.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ROOT / "native" / "seccomp"
HEADER = ROOT / "native" / "spawner" / "seccomp_tables.h"
COMPILE = ("gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-Wshadow")


def generate(*options: str) -> str:
    """The output of the generator: the header, or with `--lists` one line per decision.

    Raises:
        subprocess.CalledProcessError: it does not compile, or a policy is wrong; the reason is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="dsec-seccomp-") as directory:
        program = Path(directory, "generate")
        subprocess.run([*COMPILE, "-o", program, POLICIES / "generate.c", "-lseccomp"], check=True)
        done = subprocess.run([program, *options, POLICIES], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def write(text: str) -> None:
    """Replace the header; a failure leaves the old one."""
    new = HEADER.with_name(f".{HEADER.name}.new")
    new.write_text(text)
    new.replace(HEADER)


def main(arguments: list[str]) -> int:
    """0 when the header is (now) right, 1 when it is stale or cannot be made, 2 for wrong arguments."""
    if arguments not in ([], ["--check"]):
        print("usage: seccomp_tables.py [--check]", file=sys.stderr)
        return 2
    try:
        text = generate()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the generator failed ({error}); it needs gcc and libseccomp-dev", file=sys.stderr)
        return 1
    if not arguments:
        write(text)
    elif not HEADER.exists() or HEADER.read_text() != text:
        print(f"{HEADER.name} is not what the policies give", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
