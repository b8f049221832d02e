"""Other people's programs that images are made with: found, bounded in time, and dead when we are."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from dsec.errors import Busy, Unsupported

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a download needs of the caller's environment. Nothing of it reaches an image.
_PASSED: Final = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_LOGIN: Final = ("HOME", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR")
_LOOK_SECONDS: Final = 0.2

Check = Callable[[], None]
"""Called again and again by what takes long; raises when nobody wants the result any more."""


class Stopped(Exception):
    """Nobody wants the result any more. Never seen by a caller: there is none."""


def unstoppable() -> None:
    """The check of those who always wait."""


def require_tool(name: str, package: str, purpose: str) -> str:
    """Its path.  Raises: Unsupported: with the Debian package to install."""
    found = find_tool(name)
    if found is None:
        raise Unsupported(
            f"{purpose}: {name} is not installed", hint=f"apt-get install {package}", missing=[package]
        )
    return found


def find_tool(name: str) -> str | None:
    """Its path, None when it is not installed."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_PATH}")


def environment(*, login: bool = False) -> dict[str, str]:
    """For such a program: paths, proxies, and with ``login`` where the caller's registry log-ins are."""
    names = (*_PASSED, *_LOGIN) if login else _PASSED
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {"PATH": _PATH, "LC_ALL": "C.UTF-8", **kept}


def mortal(command: Sequence[str]) -> list[str]:
    """That command, killed when the thread that starts it ends, however that comes about."""
    return [
        require_tool("setpriv", "util-linux", "images cannot be built"),
        "--pdeathsig",
        "KILL",
        "--",
        *command,
    ]


def enclosed(command: Sequence[str]) -> list[str]:
    """That command in namespaces of its own, so that its children and mounts end with it."""
    tool = require_tool("unshare", "util-linux", "images cannot be built")
    spaces = ("--pid", "--fork", "--kill-child=KILL", "--mount", "--mount-proc", "--propagation", "private")
    return [tool, *spaces, "--", *command]


def run(
    command: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str],
    log: Path,
    out: Path | None = None,
    watch: Check = unstoppable,
) -> int:
    """Its exit code; all it said is in the file ``log``, with ``out`` its standard output there. Blocking.

    Args:
        watch: called five times a second; when it raises, the command is killed and the exception goes on.

    Raises:
        Busy: it was still running after ``seconds``, and was killed.
    """
    name = Path(command[0]).name
    with log.open("wb") as said, (out or log).open("ab") as told:
        process = subprocess.Popen(
            mortal(command),
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=said,
            env=dict(env),
            cwd="/",
        )
        try:
            return _wait(process, seconds, watch, name)
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float, watch: Check, name: str) -> int:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            watch()
        if time.monotonic() > deadline:
            raise Busy(
                f"{name} had not ended after {seconds:.0f} s",
                hint="try again; is the network slow?",
                seconds=seconds,
            )


def tail(log: Path, size: int = 500) -> str:
    """The last words of a log, for a message."""
    data = log.read_bytes() if log.exists() else b""
    return data[-size:].decode("utf-8", "replace").strip()
