"""Debian's sandboxes, run the cheapest way there is: ``posix_spawn`` and ``waitpid``, timed around both.

crun 1.8 refuses a machine on which cgroup v1 and an extra v2 tree are mounted together. So it runs in a mount
namespace of its own from which the v2 tree is gone; a small process that lives there spawns and times it (this module,
run as a program: one request a line, one answer a line).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Self

from benchmarks.common import ROOT

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
BWRAP = "/usr/bin/bwrap"
BWRAP_TRUE = [BWRAP, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "/bin/true"]
BARE_TRUE = ["/bin/true"]
CRUN = "/usr/bin/crun"
HIDDEN = "/sys/fs/cgroup/unified"
CONTAINER = f"dsec-bench-{os.getpid()}"


class PeerFailedError(Exception):
    """A peer could not do what it is compared by."""


def timed(argv: list[str]) -> int:
    """Nanoseconds from before the spawn until the process was waited for.  Raises: PeerFailedError."""
    begun = perf_counter_ns()
    pid = os.posix_spawn(argv[0], argv, ENVIRONMENT)
    status = os.waitpid(pid, 0)[1]
    took = perf_counter_ns() - begun
    if status:
        raise PeerFailedError(f"{' '.join(argv)}: exit code {os.waitstatus_to_exitcode(status)}")
    return took


def bwrap_problem() -> str:
    """Why bubblewrap cannot be compared with, "" when it can."""
    return _problem(BWRAP, BWRAP_TRUE)


def _problem(program: str, argv: Sequence[str]) -> str:
    if not os.access(program, os.X_OK):
        return f"{program} is not installed"
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30, env=ENVIRONMENT)
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr.strip()[:300]}"


class Crun:
    """A running crun container, and commands timed beside it.

    Raises:
        PeerFailedError: it cannot be had here; the message has crun's own words.
    """

    def __init__(self) -> None:
        if not os.access(CRUN, os.X_OK):
            raise PeerFailedError(f"{CRUN} is not installed")
        self._server = self._serve()
        self._home = Path(tempfile.mkdtemp(prefix="dsec-bench-crun-"))
        try:
            _bundle(self._home)
            self.run("run", "--detach", "--bundle", str(self._home), CONTAINER)
        except BaseException:
            self.close()
            raise

    def _serve(self) -> subprocess.Popen[str]:
        script = f'if mountpoint -q {HIDDEN}; then umount -l {HIDDEN}; fi; exec "$@"'
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "benchmarks.peers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> int:
        """Nanoseconds of one crun command.  Raises: PeerFailedError."""
        argv = [CRUN, f"--root={self._home}/state", f"--log={self._home}/log", *arguments]
        stdin, stdout = self._server.stdin, self._server.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(argv) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline() or '{"error": "the process that runs crun has ended"}')
        if "error" in answer:
            raise PeerFailedError(f"{answer['error']}: {self._log()}")
        return int(answer["ns"])

    def exec_true(self) -> int:
        """Nanoseconds of ``crun exec … /bin/true``."""
        return self.run("exec", CONTAINER, "/bin/true")

    def pause(self) -> int:
        """Nanoseconds."""
        return self.run("pause", CONTAINER)

    def resume(self) -> int:
        """Nanoseconds."""
        return self.run("resume", CONTAINER)

    def _log(self) -> str:
        log = self._home / "log"
        return log.read_text(errors="replace").strip()[-300:] if log.exists() else ""

    def close(self) -> None:
        """Remove the container and everything made for it."""
        try:
            if self._server.poll() is None and (self._home / "state" / CONTAINER).exists():
                self.run("delete", "--force", CONTAINER)
        finally:
            self._server.communicate()
            shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bundle(home: Path) -> None:
    """An OCI bundle: the host's /usr read-only, the namespaces of a sandbox of ours, one process that sleeps."""
    root = home / "rootfs"
    for name in ("usr", "proc", "dev", "tmp"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (home / "config.json").write_text(json.dumps(_config()))


def _config() -> dict[str, object]:
    tmpfs = {"type": "tmpfs", "source": "tmpfs"}
    return {
        "ociVersion": "1.0.0",
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "bench",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sleep", "1000000"],
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", **tmpfs, "options": ["nosuid", "mode=755", "size=65536k"]},
            {"destination": "/tmp", **tmpfs, "options": ["nosuid", "nodev"]},
        ],
        "linux": {
            "namespaces": [{"type": name} for name in ("pid", "mount", "ipc", "uts", "network")],
        },
    }


def serve() -> None:
    """Answer each line, a command, with the time it took."""
    # What a container inherits as its output must not be the pipe of our answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    requests = os.fdopen(os.dup(0), "r")
    os.dup2(null, 0)
    for line in requests:
        try:
            answers.write(json.dumps({"ns": timed(json.loads(line))}) + "\n")
        except (PeerFailedError, OSError) as problem:
            answers.write(json.dumps({"error": str(problem)}) + "\n")


if __name__ == "__main__":
    serve()
