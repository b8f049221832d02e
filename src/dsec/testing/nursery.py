"""Processes of `dsec` that have imported everything before they begin: each is forked off one that has, in a fifth of the time."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Final

from dsec.failpoints import VARIABLE, arm

_PROGRAM: Final = (
    sys.executable,
    "-c",
    "import dsec.cli.serve, dsec.wiring.tenants; from dsec.testing.nursery import attend; attend()",
)


class Nursery:
    """Makes them. They are its children: it tells how they ended."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(_PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, argv: list[str], home: Path, failpoint: str, log: Path) -> int:
        """The pid of a `dsec` with those arguments, whose errors go to ``log``."""
        return self._ask({"argv": argv, "home": str(home), "failpoint": failpoint, "log": str(log)})

    def code(self, pid: int, *, wait: bool = False) -> int | None:
        """Its exit code, negative: the signal that ended it. None: it runs."""
        told = self._ask({"pid": pid, "wait": wait})
        return None if told == _RUNS else told

    @staticmethod
    def order(pid: int, log: Path, failpoint: str) -> Path:
        """Let one that runs end at another failpoint. It has heard when the file that this returns is gone."""
        told = _orders(log)
        told.write_text(failpoint)
        os.kill(pid, signal.SIGUSR2)
        return told

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


_RUNS: Final = 1000


def _orders(log: Path) -> Path:
    """Where a process whose errors go to ``log`` is told of its failpoint."""
    return log.with_suffix(".failpoint")


def _heed(orders: Path, *_: object) -> None:
    arm(orders.read_text())
    orders.unlink()


def attend() -> None:
    """Do what is asked until nobody asks any more."""
    for line in sys.stdin:
        request = json.loads(line)
        told = _code(**request) if "pid" in request else _fork(**request)
        sys.stdout.write(f"{told}\n")
        sys.stdout.flush()


def _code(pid: int, wait: bool) -> int:
    ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else _RUNS


def _fork(argv: list[str], home: str, failpoint: str, log: str) -> int:
    if pid := os.fork():
        return pid
    try:
        _become(argv, home, failpoint, log)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:  # noqa: BLE001 - nothing of it may go on in our caller
        traceback.print_exc()
    os._exit(70)


def _become(argv: list[str], home: str, failpoint: str, log: str) -> None:
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, os.devnull, os.O_WRONLY),
        (2, log, os.O_WRONLY),
    ):
        file = os.open(path, flags | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ["DSEC_HOME"] = home
    os.environ.pop(VARIABLE, None)
    if failpoint:
        os.environ[VARIABLE] = failpoint
    signal.signal(signal.SIGUSR2, partial(_heed, _orders(Path(log))))
    sys.argv = ["dsec", *argv]
    runpy.run_module("dsec", run_name="__main__")
