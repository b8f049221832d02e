"""Base ``host``: this machine's own programs, shown read-only, over a skeleton that has nothing of the machine but that.

The skeleton has empty directories where those of /usr are mounted, the links of a merged /usr, an /etc that is written anew, and
an empty /usr/local. What update-alternatives chose here is followed: those links are read, and nothing else of /etc.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dsec.errors import Unsupported
from dsec.images.rootfs import make_directories
from dsec.images.system import LINKS, MERGED, settle, write_etc
from dsec.ports.storage import SHOWABLE

_RECIPE: Final = "2"
"""Goes up when this module would build another tree on the same machine."""

_WHEN: Final = 1_700_000_000 * 10**9  # ns: the skeleton has no age
_ALTERNATIVES: Final = "/etc/alternatives/"
_SCANNED: Final = ("bin", "sbin", "lib", "lib/*-linux-gnu*")


def shown(usr: Path = Path("/usr")) -> tuple[str, ...]:
    """The directories of this machine that a sandbox sees.  Raises: Unsupported: its /usr is not merged."""
    if not (usr.parent / "bin").is_symlink():
        raise Unsupported(
            "base 'host' needs a merged /usr (/bin as a link)",
            hint="apt-get install usrmerge, or use another base",
            missing=["usrmerge"],
        )
    return tuple(path for path in SHOWABLE if _is_directory(usr / Path(path).name))


def fingerprint(usr: Path = Path("/usr")) -> str:
    """Changes when the skeleton would; not when a program of this machine does."""
    facts = [_RECIPE, shown(usr), _links(usr), sorted(_chosen(usr).items()), _certificates(usr)]
    return hashlib.sha256(json.dumps(facts).encode("utf-8", "surrogateescape")).hexdigest()


def build_skeleton(root: Path, usr: Path = Path("/usr")) -> None:
    """Fill the empty directory ``root``.  Raises: Unsupported, OSError."""
    make_directories(root)
    for path in shown(usr):
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name, target in _links(usr):
        (root / "usr" / name).symlink_to(target)
    for name in MERGED:
        if os.path.lexists(root / "usr" / name):
            (root / name).symlink_to(f"usr/{name}")
    for path, target in LINKS:
        if not path.startswith("usr/") and not os.path.lexists(root / path):
            (root / path).symlink_to(target)
    (root / "etc/alternatives").mkdir()
    for name, target in _chosen(usr).items():
        (root / "etc/alternatives" / name).symlink_to(target)
    write_etc(root, usr)
    settle(root, _WHEN)


def identity(tree: str, shows: Sequence[str]) -> str:
    """The digest of an image that shows something of this machine: never that of a tree alone, which might come from elsewhere.

    Args:
        tree: the digest of its own tree.
    """
    return f"sha256:{hashlib.sha256(json.dumps([tree, list(shows)]).encode()).hexdigest()}"


def _links(usr: Path) -> list[tuple[str, str]]:
    """Of /usr itself, such as lib64 on some machines; those that lead out of it are left out."""
    names = [Path(path).name for path in SHOWABLE if (usr / Path(path).name).is_symlink()]
    found = [(name, os.readlink(usr / name)) for name in names]
    return [(name, target) for name, target in found if "/" not in target]


def _chosen(usr: Path) -> Mapping[str, str]:
    """What programs and libraries of /usr mean by /etc/alternatives, where that is in /usr again."""
    found = {}
    for pattern in _SCANNED:
        for directory in sorted(usr.glob(pattern)):
            for entry in os.scandir(directory) if directory.is_dir() else ():
                if not entry.is_symlink() or not (link := os.readlink(entry)).startswith(_ALTERNATIVES):
                    continue
                name = link.removeprefix(_ALTERNATIVES)
                try:
                    target = os.path.normpath(os.readlink(link))
                except OSError:
                    continue
                if "/" not in name and any(target.startswith(f"{path}/") for path in SHOWABLE):
                    found[name] = target
    return found


def _certificates(usr: Path) -> list[tuple[str, int]]:
    paths = sorted((usr / "share/ca-certificates").rglob("*.crt"))
    return [(str(path), path.stat().st_mtime_ns) for path in paths]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
