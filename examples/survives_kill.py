"""A process that owns a durable engine is killed in the middle of a command. The next one finds how that command ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dsec import Dsec

LEVEL = "container" if os.geteuid() == 0 else "process"


def first(home: Path) -> None:
    """Start a command, tell its id, and die as nobody can prepare for."""
    engine = Dsec(home).open()
    sandbox = engine.sandboxes.create(level=LEVEL, ttl=600)
    job = sandbox.start("sleep 1; echo survived; exit 3")
    print(sandbox.id, job.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main(home: Path) -> None:
    killed = subprocess.run(
        [sys.executable, __file__, home], stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    sandbox_id, job_id = killed.stdout.split()
    with Dsec(home) as engine, engine.sandboxes.get(sandbox_id) as sandbox:
        result = sandbox.attach(job_id).wait()
        print(f"after kill -9 of its owner: exit code {result.exit_code}, output {result.stdout!r}")
        assert (result.exit_code, result.stdout) == (3, b"survived\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        first(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="dsec-example-") as top:
            main(Path(top, "engine"))
