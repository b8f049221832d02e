"""Errors in the words of the command line.

The layers below speak of Python's parameters (``level='container'``). Here, and nowhere else, their names become the options
and arguments that mean the same, and an error that came without a hint gets one for its code.
"""

from __future__ import annotations

import re
from typing import Final

from dsec.errors import DsecError

PARAMETERS: Final[dict[str, str]] = {
    "api_key": "$DSEC_API_KEY",
    "argv": "CMD",
    "budget": "--budget",
    "argv and env": "CMD and --env",
    "command": "CMD",
    "cpu_millis": "--cpus",
    "cpus": "--cpus",
    "cwd": "--workdir",
    "destination": "DST",
    "disk_mib": "--disk",
    "env": "--env",
    "home": "$DSEC_HOME",
    "id": "ID",
    "idle": "--idle",
    "label": "--label",
    "kind": "--kind",
    "labels": "--label",
    "level": "--level",
    "limits.cpu_millis": "--cpus",
    "limits.disk_mib": "--disk",
    "limits.memory_mib": "--memory",
    "limits.pids": "--pids",
    "local": "local path",
    "memory_mib": "--memory",
    "net": "--net",
    "pids": "--pids",
    "pool": "--pool",
    "read_only": "--read-only",
    "scratch": "--scratch",
    "source": "SRC",
    "state": "--state",
    "states": "--state",
    "stdin": "--interactive",
    "template": "--template",
    "terminal": "--tty",
    "timeout": "--timeout",
    "ttl": "--ttl",
    "user": "--user",
    "volume": "--volume",
    "volume source": "--volume source",
    "volume target": "--volume target",
    "volumes": "--volume",
}
"""Name in Python to option, argument or variable."""

PYTHON_ONLY: Final = frozenset({"max_bytes", "open_files", "output_bytes", "pool_bytes"})
"""Names that hints mention and the command line has nothing for."""

HINTS: Final[dict[str, str]] = {
    "internal": "run again with `dsec --debug ...` and report it",
    "bad_request": "`dsec {command} --help` tells what it takes",
    "not_found": "`dsec ls --all` shows the sandboxes there are",
    "conflict": "name something else, or remove what is there; `dsec inspect ID` shows the state of a sandbox",
    "busy": "try again in a moment",
    "over_quota": "remove or hibernate something of the project; `dsec project show` tells its quota",
    "unsupported": "`dsec doctor` tells what this machine can do",
    "isolation_unavailable": "`dsec doctor` tells what is missing",
    "unauthenticated": "`dsec key create` makes a key; give it in $DSEC_API_KEY",
    "denied": "run as root, or as the user whose it is",
    "runtime_unavailable": "try again; `dsec doctor` tells what is missing",
    "sandbox_failed": "`dsec events ID` shows what happened to it",
    "build_failed": "mend the template, and build it again",
    "unknown_outcome": "look inside what it did, then run it again",
    "file_error": "`dsec exec ID -- ls -la DIR` shows what is there",
    "file_not_found": "`dsec exec ID -- ls -la DIR` shows what is there",
    "file_denied": "--user root asks as root of the sandbox",
    "file_is_directory": "name a file in it",
    "file_kind": "name a regular file or a directory",
    "quota_exceeded": "remove something inside, or create a sandbox with more --disk",
    "too_large": "ask for less at once",
    "cleanup_failed": "`dsec ps --problems` shows it, `dsec gc` tries again",
    "store_damaged": "`dsec audit verify` tells what is damaged",
    "storage_full": "free space under $DSEC_HOME",
    "protocol_error": "`dsec events ID` shows what happened before",
    "timed_out": "allow more time",
}
"""By the ``code`` of an error, for those that say nothing themselves."""

_OF_CREATING: Final = frozenset(
    {
        "--cpus",
        "--disk",
        "--idle",
        "--label",
        "--level",
        "--memory",
        "--pids",
        "--read-only",
        "--template",
        "--ttl",
        "--volume",
    }
)
_CREATING: Final = ("", "run", "create", "bench")  # they take (some of) these options themselves

_NAMES: Final = "|".join(re.escape(name) for name in sorted(PARAMETERS, key=len, reverse=True))
_LIMITS: Final = re.compile(r"(?:limits=)?\bLimits\(([^()]*)\)")
_FIELD: Final = re.compile(rf"^({_NAMES})(?:\[\d+\])?(?=:)")
_QUOTED: Final = re.compile(rf"`({_NAMES})`")
_GIVEN: Final = re.compile(rf"\b({_NAMES})=('[^']*'|\"[^\"]*\"|[\w.]+)")
_QUOTES: Final = "'\""
_ELSEWHERE: Final = re.compile(rf"\(({'|'.join(sorted(PYTHON_ONLY))})\)")


def worded(error: DsecError, command: str = "") -> tuple[str, str]:
    """Message and hint as they are shown to somebody who typed ``dsec <command>``."""
    # Only its first word: the rest of a message quotes what somebody typed.
    message = _FIELD.sub(lambda found: PARAMETERS[found[1]], error.message)
    hint = in_options(error.hint, command) or HINTS.get(error.code, HINTS["internal"])
    return message, hint.replace("{command} ", f"{command} " if command else "")


def in_options(text: str, command: str = "") -> str:
    """Assignments (``level='container'``) and quoted names (```user```) as options; everything else stays."""
    text = _LIMITS.sub(r"\1", text)
    text = _ELSEWHERE.sub(r"(in Python: Settings.\1)", text)
    text = _QUOTED.sub(lambda found: PARAMETERS[found[1]], text)
    return _GIVEN.sub(lambda found: _option(PARAMETERS[found[1]], found[2], command), text)


def _option(option: str, value: str, command: str) -> str:
    words = option if value == "True" else f"{option} {value.strip(_QUOTES)}"
    return words if option not in _OF_CREATING or command in _CREATING else f"`dsec create {words}`"
