"""Bases ``debian:SUITE``: a small Debian system of any suite, installed by mmdebstrap from the sources of this machine's apt."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from dsec.errors import NotFound, RuntimeUnavailable
from dsec.images.system import Progress
from dsec.images.tools import Check, enclosed, environment, require_tool, run, tail, unstoppable
from dsec.images.unpack import LayerFile, Unpacked, unpack

_INCLUDED: Final = ("ca-certificates", "python3")
# Licences stay: they must go where the software goes.
_EXCLUDED: Final = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
)
_SECONDS: Final = 1200.0
_MIRROR: Final = "http://deb.debian.org/debian"
_SECURITY: Final = "http://deb.debian.org/debian-security"
_ROLLING: Final = frozenset({"sid", "unstable", "experimental"})
_ONE_LINE: Final = re.compile(r"deb\s+(?:\[[^\]]*\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)")
_SUITES: Final = (
    *("bullseye", "bookworm", "trixie", "forky", "sid"),
    *("oldstable", "stable", "testing", "unstable", "experimental"),
)
_UNREACHED: Final = re.compile(
    r"Could not (resolve|connect)|Temporary failure|[Cc]onnection (failed|timed out|refused)|Unable to connect"
)
_LAST_WORDS: Final = 4000  # bytes of mmdebstrap's log
_OURS: Final = re.compile(r"https?://(?:[^/@]*@)?(?P<rest>[A-Za-z0-9.:\[\]-]+(?:/[A-Za-z0-9._~/-]*)?)")


@dataclass(frozen=True, slots=True)
class Source:
    """Where apt finds a suite. ``uri`` has no user and no password in it."""

    uri: str
    suite: str


def build(
    suite: str,
    tree: Path,
    work: Path,
    progress: Progress,
    *,
    apt: Path = Path("/etc/apt"),
    check: Check = unstoppable,
) -> Unpacked:
    """Fill the empty directory ``tree``. The same packages make the same tree.

    Args:
        work: a directory for what is needed meanwhile.
        apt: whose sources are used. Never its log-ins: a source that asks for one cannot be used.
        check: called several times a second; what it raises ends the work.

    Raises:
        Unsupported: no mmdebstrap.
        NotFound: the sources have no such suite.
        RuntimeUnavailable: they cannot be reached, or a package cannot be installed.
        Busy, StorageFull, OSError.
    """
    tool = require_tool("mmdebstrap", "mmdebstrap", f"base 'debian:{suite}' is built by mmdebstrap")
    archive, log = work / "debian.tar", work / "log"
    started = (int(time.time()) - 1) * 10**9  # archives keep whole seconds
    progress(f"installing Debian {suite}")
    lines = [f"deb {each.uri} {each.suite} main" for each in sources(suite, apt)]
    # Scripts of packages run with namespaces of their own around them; mode `unshare` gives them a user namespace, too, and
    # is the faster (32 s against 40 s with mode `root` where it was measured).
    options = [
        "--mode=unshare",
        "--variant=minbase",
        "--format=tar",
        f"--include={','.join(_INCLUDED)}",
    ]
    options += [f"--dpkgopt={each}" for each in _EXCLUDED]
    command = enclosed([tool, *options, suite, str(archive), *lines])
    status = run(command, seconds=_SECONDS, env=environment() | {"TMPDIR": str(work)}, log=log, watch=check)
    if status != 0:
        raise _failed(suite, log)
    progress("unpacking it")
    return unpack(
        tree, [LayerFile(path=archive)], made_after=started, apt_sources=public_sources(suite), check=check
    )


def sources(
    suite: str, apt: Path = Path("/etc/apt"), release: Path = Path("/etc/os-release")
) -> tuple[Source, ...]:
    """What this machine's apt knows of Debian, for another suite; Debian's own mirror where it knows nothing of it."""
    codename = _codename(release)
    found: list[Source] = []
    for each in _configured(apt) if codename else ():
        base, _, pocket = each.suite.partition("-")
        if base != codename or pocket not in ("", "updates", "security") or (pocket and suite in _ROLLING):
            continue
        wanted = Source(each.uri, f"{suite}-{pocket}" if pocket else suite)
        if wanted not in found:
            found.append(wanted)
    return tuple(found) or _public(suite)


def public_sources(suite: str) -> str:
    """The sources.list that an image gets: it names no mirror of the machine that built it."""
    return "".join(f"deb {each.uri} {each.suite} main\n" for each in _public(suite))


def _public(suite: str) -> tuple[Source, ...]:
    if suite in _ROLLING:
        return (Source(_MIRROR, suite),)
    pockets = (Source(_MIRROR, f"{suite}-updates"), Source(_SECURITY, f"{suite}-security"))
    return (Source(_MIRROR, suite), *pockets)


def _codename(release: Path) -> str:
    """Of this machine's Debian; "" when it is none."""
    try:
        text = release.read_text()
    except OSError:
        return ""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    debian = values.get("ID", "").strip('"') == "debian"
    return values.get("VERSION_CODENAME", "").strip('"') if debian else ""


def _configured(apt: Path) -> Iterator[Source]:
    """Binary packages over HTTP only, in the order of apt."""
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    for path in files:
        if not path.is_file() or not os.access(path, os.R_OK):
            continue
        lines = [
            line
            for line in path.read_text(errors="replace").splitlines()
            if not line.lstrip().startswith("#")
        ]
        pairs = _paragraphs(lines) if path.suffix == ".sources" else _one_line(lines)
        for uri, suite in pairs:
            if match := _OURS.fullmatch(uri):
                scheme = uri.partition(":")[0]
                yield Source(f"{scheme}://{match['rest']}".rstrip("/"), suite)


def _one_line(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if match := _ONE_LINE.match(line.strip()):
            yield match["uri"], match["suite"]


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Of the deb822 form: fields by paragraph, continued on lines that begin with a space."""
    fields: dict[str, str] = {}
    last = ""
    for line in [*lines, ""]:
        if line[:1].isspace() and line.strip():
            fields[last] = f"{fields.get(last, '')} {line.strip()}"
        elif ":" in line:
            last, _, value = line.partition(":")
            last = last.strip().lower()
            fields[last] = value.strip()
        elif not line.strip():
            yield from _pairs(fields)
            fields = {}


def _pairs(fields: dict[str, str]) -> Iterator[tuple[str, str]]:
    if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() not in (
        "no",
        "false",
        "0",
    ):
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield uri, suite


def _failed(suite: str, log: Path) -> NotFound | RuntimeUnavailable:
    """What the log of mmdebstrap means; its notes are left out."""
    said = [line.rstrip() for line in tail(log, _LAST_WORDS).splitlines()]
    words = "\n".join(line for line in said if line and not line.startswith("I: "))
    if f"{suite} Release' does not have a Release file" in words and not _UNREACHED.search(words):
        near = get_close_matches(suite, _SUITES, 1)
        return NotFound(
            f"there is no Debian suite {suite!r} at the sources of this machine's apt",
            hint=f"did you mean debian:{near[0]}?"
            if near
            else f"suites are {', '.join(_SUITES)}, and earlier ones",
            suite=suite,
        )
    return RuntimeUnavailable(
        f"base 'debian:{suite}' could not be installed:\n{words or 'mmdebstrap said nothing'}",
        hint="are the sources of apt reachable?",
        suite=suite,
    )
