"""One bounded run of pip, and what its failure means."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.errors import (
    DsecError,
    RuntimeUnavailable,
    StorageFull,
    StoreDamaged,
    TimedOut,
    TooLarge,
    Unsupported,
)
from dsec.images.dependencies import pip_driver
from dsec.images.dependencies.bounds import Bounds, Index
from dsec.images.dependencies.target import PythonTarget
from dsec.images.dependencies.unsatisfied import unsatisfied
from dsec.images.tools import Check, unstoppable

_LAST_WORDS: Final = 1500  # characters of pip's own words in a message
_LINE: Final = 10_000  # characters of a line of its log that are looked at
_LOOK: Final = 0.5  # seconds between looks at how much there is
# Of the environment: where pip finds its configuration, certificates, proxies and passwords. No PYTHON*.
_KEPT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|XDG_\w+|NETRC|KEYRING_\w+|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|(?i:\w+_proxy)"
)
# Of pip's own variables: where wheels are, and how they are got. None that changes what is chosen or where it is put.
_KEPT_PIP: Final = re.compile(
    r"PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|TRUSTED_HOST|CERT|CLIENT_CERT|PROXY|TIMEOUT|DEFAULT_TIMEOUT|RETRIES|"
    r"CONSTRAINT|CONFIG_FILE|KEYRING_PROVIDER)"
)
_LISTS: Final = frozenset({"PIP_FIND_LINKS", "PIP_CONSTRAINT"})
_FIXED: Final = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_IGNORE_REQUIRES_PYTHON": "0",
    "PIP_NO_COLOR": "1",
    "PIP_NO_DEPS": "0",
    "PIP_NO_INPUT": "1",
    "PIP_PRE": "0",
    "PIP_PROGRESS_BAR": "off",
    "PIP_REQUIRE_HASHES": "0",
    "PIP_REQUIRE_VIRTUALENV": "0",
}
_SECRET: Final = re.compile(r"(?<=://)[^/@\s'\"]+@")
# An index that is passed over: another day it would have been asked.
_PASSED_OVER: Final = re.compile(
    r"Could not fetch URL .{0,2000}(connection error|timed out|confirming the ssl certificate|too many 5\d\d|\b(5\d\d|429) \w+ Error)"
)
# What may have made a failure. An index may answer 401 or 403 for what it does not have: that alone is no failure.
_UNREACHED: Final = re.compile(
    r"(NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|ProtocolError|SSLError)\("
    r"|\b(5\d\d|401|403|407|429) (Server|Client) Error"
)
_FULL: Final = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]")
# Asked by pip for the words it introduces itself with; that it gets no answer changes nothing.
_IDLE_PROGRAMS: Final = frozenset({"lsb_release", "rustc", "uname"})


@dataclass(frozen=True, slots=True)
class Said:
    """What a run left to read: its output and its log (files of the run), and which programs it was not let start."""

    output: Path
    log: Path
    refused: tuple[str, ...]

    def last_words(self) -> str:
        """The end of its output, without passwords."""
        with self.output.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8 * _LAST_WORDS))
            text = file.read().decode("utf-8", "replace")
        lines = [
            line.strip() for line in text.splitlines() if line.strip() and "WARNING: Location" not in line
        ]
        return without_secrets(" | ".join(lines))[-_LAST_WORDS:]

    def lines(self) -> Iterator[str]:
        """Of the log, bounded in length, without its times."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(_LINE):
                yield line.partition(" ")[2] if line[:4].isdigit() else line


def without_secrets(text: str) -> str:
    """URLs without user and password."""
    return _SECRET.sub("", text)


def download(
    arguments: list[str],
    target: PythonTarget,
    *,
    work: Path,
    http: Path,
    index: Index,
    bounds: Bounds,
    constrained: bool = True,
    check: Check = unstoppable,
) -> list[Path]:
    """``pip download`` of wheels for the target: the files, sorted. Runs no code of a package. Blocking.

    Args:
        arguments: what to download (``-r FILE`` and options). work: an empty directory of this run.
        http: where pip keeps what it downloaded. constrained: whether this machine's constraints count. check: as everywhere.

    Raises:
        BadRequest: no version satisfies a requirement, or two contradict one another. Unsupported: there are no wheels for the target.
        RuntimeUnavailable: an index does not answer, or pip fails. StorageFull. StoreDamaged: a file with another digest.
        TimedOut, TooLarge: over the bounds. OSError.
    """
    for name in ("tmp", "found"):
        (work / name).mkdir()
    environment = _environment(index, work)
    if not constrained:
        (work / "none").touch()
        environment["PIP_CONSTRAINT"] = str(work / "none")
    settings = {
        "markers": dict(target.markers),
        "file_bytes": bounds.download_bytes,
        "parent": os.getpid(),
        "refused": str(work / "refused"),
    }
    (work / "settings").write_text(json.dumps(settings))
    command = [sys.executable, "-I", pip_driver.__file__, str(work / "settings")]
    command += [
        "download",
        "--log",
        str(work / "log"),
        "--cache-dir",
        str(http),
        "--dest",
        str(work / "found"),
    ]
    command += _for_target(target) + _from_index(index) + arguments
    status = _run(command, environment, work, bounds, check)
    refused = (work / "refused").read_text().split("\n") if (work / "refused").exists() else []
    for name in ("said", "log"):
        (work / name).touch()
    said = Said(work / "said", work / "log", tuple(sorted({*refused} - _IDLE_PROGRAMS - {""})))
    unreached = next(filter(_PASSED_OVER.search, said.lines()), "")
    if status != 0 or unreached:
        raise _meaning(status, said, target, unreached)
    return sorted((work / "found").iterdir())


def _for_target(target: PythonTarget) -> list[str]:
    options = [
        "--only-binary",
        ":all:",
        "--python-version",
        target.version.split("a")[0].split("b")[0].split("rc")[0],
    ]
    options += ["--implementation", "cp", "--abi", target.abi]
    for platform in target.platforms:
        options += ["--platform", platform]
    return options


def _from_index(index: Index) -> list[str]:
    options = ["--no-index"] if index.none else []
    for link in index.links:
        options += ["--find-links", _absolute(link)]
    return options


def _absolute(place: str) -> str:
    """A path as it is meant here: pip runs elsewhere, so that no file of a requirement's name lies where it looks."""
    return os.path.abspath(place) if "/" in place and "://" not in place and os.path.exists(place) else place


def _environment(index: Index, work: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
    if index.machine:
        own = {name: value for name, value in os.environ.items() if _KEPT_PIP.fullmatch(name)}
        kept |= {
            name: " ".join(map(_absolute, value.split())) if name in _LISTS else _absolute(value)
            for name, value in own.items()
        }
    else:
        kept["PIP_CONFIG_FILE"] = os.devnull  # which also silences all other files
    return kept | _FIXED | {"TMPDIR": str(work / "tmp")}


def _run(command: list[str], environment: Mapping[str, str], work: Path, bounds: Bounds, check: Check) -> int:
    """Its exit status.  Raises: TimedOut, TooLarge: it is dead. OSError."""
    deadline = time.monotonic() + bounds.seconds
    with (work / "said").open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment,
            cwd=work,
            start_new_session=True,
        )
    try:
        while True:
            left = deadline - time.monotonic()
            try:
                return process.wait(max(0.0, min(left, _LOOK)))
            except subprocess.TimeoutExpired:
                check()
                _check_progress(work, left, bounds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _check_progress(work: Path, left: float, bounds: Bounds) -> None:
    """Raises: TimedOut, TooLarge."""
    if left <= 0:
        raise TimedOut(
            f"choosing and downloading wheels took more than {bounds.seconds:g} s",
            hint="pin the requirements, or raise the bound; what was downloaded whole is kept for the next try",
        )
    used = sum(size for size in map(_size, work.rglob("*")))
    if used > bounds.download_bytes:
        raise TooLarge(
            f"wheels of more than {bounds.download_bytes} bytes",
            hint="raise the bound, or require less",
            bytes=used,
        )


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # gone meanwhile
        return 0


def _meaning(status: int, said: Said, target: PythonTarget, unreached: str) -> DsecError:
    """The error that a run which failed stands for."""
    words = said.last_words()
    if status == pip_driver.WRONG_PIP or "No module named 'pip" in words:
        return Unsupported(
            f"the pip of {sys.executable} is missing, or cannot choose wheels for another Python",
            hint="python -m pip install 'pip>=23.1'",
        )
    if _FULL.search(words):
        return StorageFull("no space for downloaded wheels", hint="free some, or prune the cache", pip=words)
    if "[Errno 27]" in words or "File too large" in words:
        return TooLarge(
            "a wheel is larger than all together may be", hint="raise the bound, or require less", pip=words
        )
    if unreached or any(map(_UNREACHED.search, said.lines())):
        return RuntimeUnavailable(
            f"a package index does not answer: {without_secrets(unreached).strip()[-500:] or words}",
            hint="check the network and this machine's pip configuration (pip config list), then try again",
            pip=words,
        )
    if "DO NOT MATCH THE HASHES" in words or any("DO NOT MATCH THE HASHES" in line for line in said.lines()):
        return StoreDamaged(
            f"an index offers a file with another digest than the one it should have: {words}",
            hint="somebody replaced a package; lock the requirements again once you know why",
        )
    if said.refused:
        return Unsupported(
            f"a package must run code to be installed ({', '.join(said.refused)[:200]}): {words}",
            hint="only wheels are taken; require a version that has one",
        )
    return unsatisfied(said.lines(), target) or RuntimeUnavailable(
        f"pip failed: {words or 'it said nothing'}", hint="its own words are in the message"
    )
