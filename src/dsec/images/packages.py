"""Which of this machine's Debian packages make the base image, and which files are theirs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dsec.errors import Unsupported

REQUIRED: Final = (
    "base-files",
    "bash",
    "bzip2",
    "ca-certificates",
    "coreutils",
    "dash",
    "debianutils",
    "diffutils",
    "findutils",
    "grep",
    "gzip",
    "hostname",
    "libc-bin",
    "libc6",
    "mawk",
    "ncurses-base",
    "ncurses-bin",
    "openssl",
    "procps",
    "python3",
    "sed",
    "tar",
    "tzdata",
    "util-linux",
    "xz-utils",
)
OPTIONAL: Final = ("file", "git", "less", "patch", "unzip", "zip")
"""Taken when they are installed."""

# Dependencies of packages above that serve installation, documentation or commands that are not worth 60 MB of Perl.
_LEFT_OUT: Final = frozenset(
    {
        "adduser",
        "debconf",
        "debconf-2.0",
        "dpkg",
        "git-man",
        "init-system-helpers",
        "install-info",
        "liberror-perl",
        "media-types",
        "passwd",
        "perl",
        "perl-base",
        "sensible-utils",
        "util-linux-extra",
    }
)
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9+.-]*")
_FORMAT: Final = "${binary:Package}\t${Package}\t${Version}\t${db:Status-Status}\t${Pre-Depends}, ${Depends}\t${Provides}\n"


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package. ``key`` is its name as dpkg wants it (``libc6:amd64``)."""

    key: str
    name: str
    version: str
    depends: tuple[tuple[str, ...], ...]
    provides: tuple[str, ...]


def parse_depends(text: str) -> tuple[tuple[str, ...], ...]:
    """A Depends field as a conjunction of alternatives, versions and architectures dropped."""
    groups = []
    for clause in text.split(","):
        names = tuple(match[0] for part in clause.split("|") if (match := _NAME.match(part.strip())))
        if names:
            groups.append(names)
    return tuple(groups)


def parse_packages(listing: str) -> dict[str, Package]:
    """What ``dpkg-query`` printed, by name; of several architectures the first (native) one."""
    found: dict[str, Package] = {}
    for line in listing.splitlines():
        key, name, version, status, depends, provides = line.split("\t")
        if status == "installed" and name not in found:
            offered = tuple(names[0] for names in parse_depends(provides))
            found[name] = Package(key, name, version, parse_depends(depends), offered)
    return found


def closure(installed: Mapping[str, Package], wanted: Iterable[str]) -> tuple[Package, ...]:
    """The wanted packages and all they depend on, sorted by name; of alternatives the first that is installed.

    Raises: Unsupported: packages are missing; the message names them all.
    """
    providers = {offered: package.name for package in installed.values() for offered in package.provides}
    chosen: dict[str, Package] = {}
    missing: list[str] = []
    pending: list[tuple[str, ...]] = [(name,) for name in wanted]
    while pending:
        alternatives = pending.pop()
        if any(name in _LEFT_OUT for name in alternatives):
            continue
        names = [providers.get(name, name) if name not in installed else name for name in alternatives]
        present = [name for name in names if name in installed]
        if not present:
            missing.append(" | ".join(alternatives))
        elif present[0] not in chosen:
            package = chosen[present[0]] = installed[present[0]]
            pending.extend(package.depends)
    if missing:
        raise Unsupported(
            f"base 'system' cannot be built: missing Debian packages: {', '.join(sorted(missing))}",
            hint=f"apt-get install {' '.join(sorted(name.split(' ')[0] for name in missing))}",
            missing=sorted(missing),
        )
    return tuple(sorted(chosen.values(), key=lambda package: package.name))


def system_packages() -> tuple[Package, ...]:
    """The packages of the base image, as they are installed now.

    Raises: Unsupported: no dpkg here, or packages are missing.
    """
    installed = parse_packages(_dpkg_query("-W", f"-f={_FORMAT}"))
    wanted = (*REQUIRED, *(name for name in OPTIONAL if name in installed))
    return closure(installed, wanted)


def package_files(packages: Iterable[Package]) -> list[str]:
    """Absolute paths that belong to the packages, directories too, sorted, each once.  Raises: Unsupported."""
    listing = _dpkg_query("-L", *(package.key for package in packages))
    return sorted({line for line in listing.splitlines() if line.startswith("/") and line != "/."})


def fingerprint(packages: Iterable[Package], *extra: str) -> str:
    """Changes when a package of the image changes."""
    text = "\n".join([*extra, *(f"{package.key}={package.version}" for package in packages)])
    return hashlib.sha256(text.encode()).hexdigest()


def _dpkg_query(*arguments: str) -> str:
    """Output of dpkg-query.  Raises: Unsupported."""
    tool = shutil.which("dpkg-query")
    if tool is None:
        raise Unsupported(
            "base 'system' is built from Debian packages, and there is no dpkg-query on this machine",
            hint="use a Debian or Ubuntu machine, or another base",
        )
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [tool, *arguments],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise Unsupported(f"dpkg-query failed: {done.stderr.strip()[:500]}", hint="dpkg --audit")
    return done.stdout
