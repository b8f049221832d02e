"""A server that is there to be killed, and a judge of its home that asks the kernel."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from dsec.failpoints import VARIABLE
from dsec.testing.nursery import Nursery

T = TypeVar("T")
RESTART: Final = 10.0
"""Seconds within which a server must answer, whatever its predecessor died of."""
_PATIENCE: Final = 30.0
_LOOK: Final = 0.005
_HELPERS: Final = ("dsec-zygote", "dsec-seed")


def until(probe: Callable[[], T], what: str, seconds: float = _PATIENCE) -> T:
    """The first answer that is not empty.  Raises: AssertionError: there is none in that time."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(_LOOK)
    return found


class Server:
    """A running ``dsec serve`` of a home.

    Args:
        failpoint: ``NAME`` or ``NAME:n``, where it is to end as if by ``kill -9``; "" = nowhere.
        nursery: makes it without its imports; None = a program of its own.
        options: of the command line.
    """

    def __init__(
        self,
        home: Home,
        failpoint: str = "",
        nursery: Nursery | None = None,
        options: tuple[str, ...] = ("--no-http",),
    ) -> None:
        self.home = home
        self._log = home.path.with_suffix(".log")
        self._nursery = nursery
        self._code: int | None = None
        argv = ["serve", "--pool", "0", *options]
        if nursery is not None:
            self.pid = nursery.start(argv, home.path, failpoint, self._log)
            return
        env = {**os.environ, "DSEC_HOME": str(home.path), VARIABLE: failpoint}
        with self._log.open("ab") as log:
            words = [sys.executable, "-m", "dsec", *argv]
            self._process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stderr=log)
        self.pid = self._process.pid

    def code(self, *, wait: bool = False) -> int | None:
        """Its exit code, negative: the signal that ended it. None: it runs."""
        if self._code is None and self._nursery is not None:
            self._code = self._nursery.code(self.pid, wait=wait)
        elif self._code is None:
            self._code = self._process.wait(_PATIENCE) if wait else self._process.poll()
        return self._code

    def answers(self) -> bool:
        """Whether it listens now, or was killed before that.  Raises: AssertionError: it ended in another way."""
        if (code := self.code()) is not None:
            assert code == -signal.SIGKILL, f"it ended with {code}: {self._log.read_text()[-4000:]}"
            return True
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.settimeout(_PATIENCE)
            probe.connect(str(self.home.socket))
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: dsec\r\nConnection: close\r\n\r\n")
            return probe.recv(64).startswith(b"HTTP/1.1 200")
        return False

    def ready(self) -> Server:
        """Itself, when it answers."""
        until(self.answers, "a server that answers", RESTART)
        return self

    @property
    def killed(self) -> bool:
        """Whether it ended by SIGKILL."""
        return self.code() == -signal.SIGKILL

    def waited(self) -> float:
        """Seconds for which its first thread could have run, and no processor was free: what a busy machine adds to everything."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    @property
    def arms(self) -> bool:
        """Whether it can be told of a failpoint while it runs: one that a nursery made."""
        return self._nursery is not None

    def arm(self, failpoint: str) -> None:
        """Let it end there from now on."""
        assert self._nursery is not None
        told = self._nursery.order(self.pid, self._log, failpoint)
        until(lambda: not told.exists(), "a server that knows its failpoint", RESTART)

    @property
    def halted(self) -> bool:
        """Whether it stands still, until :meth:`go_on`."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.code() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code(wait=True)

    def stop(self) -> int:
        """End it in good order; its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        code = self.code(wait=True)
        assert code is not None
        return code


class Home:
    """A state directory as the kernel's own tables show it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = path / "engine"
        self.socket = path / "dsec.sock"
        self.url = f"unix://{self.socket}"
        self.tag = "dsec-" + hashlib.sha256(os.fsencode(self.engine.resolve())).hexdigest()[:16]
        path.mkdir(parents=True, exist_ok=True)

    def spawners(self) -> list[int]:
        """Pids; not of their helpers, which end with them."""
        state = b"--state\0" + os.fsencode(self.engine) + b"/"
        found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in found if state in _command(pid) and _name(pid) == "spawner"]

    def kill_spawners(self) -> int:
        """How many were killed."""
        found = self.spawners()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def groups(self) -> list[Path]:
        """Control groups of its spawners."""
        return sorted(Path("/sys/fs/cgroup").glob(f"*/{self.tag}-*"))

    def processes(self) -> set[int]:
        """Of sandboxes; not what a spawner makes ahead, which ends with it."""
        found: set[int] = set()
        for group in self.groups():
            with suppress(OSError):  # it goes with its last sandbox
                for slot in list(group.glob("s*/cgroup.procs")):
                    with suppress(OSError):
                        found.update(map(int, slot.read_text().split()))
        return {pid for pid in found if _name(pid) not in _HELPERS}

    def inits(self) -> dict[str, int]:
        """Ids of sandboxes, and the pid of their init."""
        words = {pid: _command(pid).split(b"\0") for pid in self.processes()}
        return {
            argv[2].decode(): pid
            for pid, argv in words.items()
            if argv[:2] == [b"dsec-init", b"--id"] and _parent(pid) not in words
        }

    def running(self, script: str) -> list[int]:
        """Pids of the shells that do that script in its sandboxes."""
        wanted = b"\0" + script.encode() + b"\0"
        found = {pid for pid in self.processes() if wanted in _command(pid)}
        return [pid for pid in found if _parent(pid) not in found]

    def directories(self) -> list[str]:
        """Of sandboxes, and files beside them."""
        places = (Path("/run/dsec", self.tag), Path("/var/lib/dsec-homes", self.tag))
        found = [path for place in places for path in place.rglob("*")]
        return [str(path) for path in found if path.name.startswith("sb-") or not path.is_dir()]

    def traces(self) -> list[str]:
        """What is left of it outside its directory."""
        found = [*map(str, self.groups())]
        found += [f"process {pid}" for pid in [*self.spawners(), *self.processes()]]
        found += self.directories()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [line for line in mounts if self.tag in line or f" {self.path}/" in line]
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            with suppress(OSError):
                found += [str(backing)] if str(self.path) in backing.read_text() else []
        return found


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
