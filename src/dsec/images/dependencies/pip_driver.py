"""Runs pip for another Python than its own. A program, started by its path in an isolated interpreter; never imported.

pip chooses wheels for the Python it is told of (``--platform`` and the like) but judges environment markers by the Python it runs in,
and it would run a package's own code to build it. Here markers have the target's values, and nothing can be run.

Usage: ``python -I pip_driver.py SETTINGS.json PIP-ARGUMENT…``
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

WRONG_PIP: Final = 97
"""Exit status: this pip cannot be told of another Python."""
_PDEATHSIG: Final = 1
_STARTS: Final = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}
)


def run(settings: Mapping[str, Any], arguments: list[str]) -> int:
    """pip's exit status.

    Args:
        settings: ``markers`` of the target, ``file_bytes`` of the largest file, ``parent`` the process to die with,
            ``refused`` the file in which programs are noted that were not started.
    """
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        return 1
    limit = int(settings["file_bytes"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, and pip says so
    if not stand_in(settings["markers"]):
        return WRONG_PIP
    sys.addaudithook(_guard(str(settings["refused"])))
    main = importlib.import_module("pip._internal.cli.main").main
    return int(main(arguments))


def stand_in(markers: Mapping[str, str]) -> bool:
    """Give pip's markers the target's values; whether they are judged by them now."""
    module: Any = importlib.import_module("pip._vendor.packaging.markers")
    module.default_environment = lambda: dict(markers)
    same = [f"{name} == '{value}'" for name, value in markers.items() if value]
    other = [f"{name} == 'x{value}'" for name, value in markers.items() if not name.endswith("version")]
    held = all(module.Marker(text).evaluate({"extra": ""}) for text in same)
    return held and not any(module.Marker(text).evaluate({"extra": ""}) for text in other)


def _guard(refused: str) -> Any:
    """An audit hook that lets no program start but `keyring`, which knows passwords of indexes."""
    descriptor = os.open(refused, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def judge(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _STARTS:
            return
        program = os.path.basename(os.fsdecode(arguments[0])) if arguments and arguments[0] else event
        if program == "keyring":
            return
        os.write(descriptor, f"{program[:100]}\n".encode("utf-8", "replace"))
        raise PermissionError(f"no program is run while wheels are chosen: {program[:100]}")

    return judge


def _main() -> NoReturn:
    settings = json.loads(Path(sys.argv[1]).read_bytes())
    sys.exit(run(settings, sys.argv[2:]))


if __name__ == "__main__":
    _main()
