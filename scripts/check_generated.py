"""Fails when a generated file is not what its generator would write now.

Each generator is a command that writes its files when called plainly, and with `--check` writes nothing and exits
non-zero, naming what is stale.
"""

from __future__ import annotations

import subprocess
import sys

GENERATORS: tuple[tuple[str, ...], ...] = (
    ("scripts/seccomp_tables.py",),
    ("scripts/sync_client.py",),
    ("scripts/cli_reference.py",),
    ("scripts/sdk_reference.py",),
    ("scripts/template_reference.py",),
    ("scripts/soak_reference.py",),
)


def main() -> int:
    """Run every generator with --check; 1 when any is stale."""
    stale = [g for g in GENERATORS if subprocess.run([sys.executable, *g, "--check"], check=False).returncode]
    for generator in stale:
        print(f"stale: run `{' '.join(generator)}`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
