"""What the engine expects of every root file system, whoever made it: directories, the user, an /etc without a host in it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

USER: Final = (1000, 1000)
ROOT: Final = (0, 0)
# path, mode, owner
DIRECTORIES: Final = (
    ("etc", 0o755, ROOT),
    ("usr/local/bin", 0o755, ROOT),
    ("usr/local/lib", 0o755, ROOT),
    ("usr/local/share", 0o755, ROOT),
    ("var/cache", 0o755, ROOT),
    ("var/lib", 0o755, ROOT),
    ("var/log", 0o755, ROOT),
    ("var/spool", 0o755, ROOT),
    ("var/tmp", 0o1777, ROOT),
    ("home/user", 0o755, USER),
    ("workspace", 0o755, USER),
    ("tmp", 0o1777, ROOT),
    ("root", 0o700, ROOT),
    ("run/lock", 0o1777, ROOT),
    ("dev", 0o755, ROOT),
    ("dev/shm", 0o1777, ROOT),
    ("proc", 0o555, ROOT),
    ("sys", 0o555, ROOT),
    ("mnt", 0o755, ROOT),
    ("media", 0o755, ROOT),
    ("opt", 0o755, ROOT),
    ("srv", 0o755, ROOT),
)
HOSTNAME: Final = "sandbox\n"
HOSTS: Final = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"

# What is mounted over, or belongs to a running machine: nothing that an image has there is kept.
_EMPTIED: Final = ("dev", "proc", "run", "sys")
# Must be directories and not links: the engine mounts on them, or starts there.
_REAL: Final = (
    "dev",
    "etc",
    "home",
    "home/user",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
    "usr",
    "var",
    "workspace",
)
_US: Final = "user:x:1000:1000:user:/home/user:/bin/{shell}\n"
_NOBODY: Final = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_SUPERUSER: Final = "root:x:0:0:root:/root:/bin/{shell}\n"
_LAST_CHANGE: Final = "19000"  # days: when a password was set tells only when the image was built


def make_directories(root: Path) -> None:
    """All of them, with their modes and owners.  Raises: OSError."""
    for path, mode, owner in DIRECTORIES:
        directory = root / path
        directory.mkdir(parents=True, exist_ok=True)
        os.chown(directory, *owner)
        directory.chmod(mode)


def write_file(path: Path, content: bytes, mode: int = 0o644, *, when: int | None = None) -> None:
    """Put a new file of root's in the place of whatever is there.

    Args:
        when: its time, ns; None: now.

    Raises: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        os.fchmod(descriptor, mode)
    if when is not None:
        os.utime(path, ns=(when, when))


def remove(path: Path) -> None:
    """A file, a link or a whole directory; absent is fine.  Raises: OSError."""
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(info.st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def normalise(when: int) -> None:
    """Make the root file system *of this process* what the engine expects.

    Call it after chroot only: an image is a stranger's, and any of its directories may be a link to anywhere.

    Args:
        when: time of the files that are written, ns.

    Raises: OSError, ValueError.
    """
    root = Path("/")
    for name in _EMPTIED:
        remove(root / name)
    _drop_lost(root)
    for name in _REAL:
        path = root / name
        if path.is_symlink() or not path.is_dir():
            remove(path)
            path.mkdir(mode=0o755)
    for name, mode, owner in DIRECTORIES:
        _ensure(root / name, mode, owner)
    _users(root / "etc", when)
    for name, text in (("hostname", HOSTNAME), ("hosts", HOSTS), ("machine-id", ""), ("resolv.conf", "")):
        write_file(root / "etc" / name, text.encode(), when=when)
    remove(root / "var/lib/dbus/machine-id")


def clean_debian(sources: str, when: int) -> None:
    """Take out what names the machine that built a Debian system, and the day. After chroot only.

    Args:
        sources: the new /etc/apt/sources.list.
        when: its time, ns.

    Raises: OSError.
    """
    root, apt = Path("/"), Path("/etc/apt")
    doomed = [apt / name for name in ("auth.conf", "auth.conf.d", "sources.list.d", "apt.conf")]
    doomed += apt.glob("apt.conf.d/*mmdebstrap*")
    doomed += root.glob("etc/*-")  # back-ups that the tools for users make
    doomed += [root / "etc/.pwd.lock", root / "var/cache/ldconfig", root / "var/lib/systemd/random-seed"]
    doomed += [*root.glob("var/lib/dpkg/*-old"), *root.glob("var/cache/debconf/*-old")]
    for directory in ("var/log", "var/lib/apt/lists", "var/cache/apt", "tmp", "var/tmp"):
        doomed += (path for path in (root / directory).rglob("*") if not path.is_dir())
    for path in doomed:
        remove(path)
    (apt / "sources.list.d").mkdir(parents=True)
    write_file(apt / "sources.list", sources.encode(), when=when)


def settle(times: dict[str, int], newest: int, made_after: int) -> None:
    """Give every directory its recorded time, and ``newest`` to what has none or was made after ``made_after`` (ns).

    After chroot only.  Raises: OSError.
    """
    for directory, names, files in os.walk("/", topdown=False):
        for name in [*files, *names]:
            path = os.path.join(directory, name)
            info = os.lstat(path)
            wanted = times.get(path, newest) if stat.S_ISDIR(info.st_mode) else info.st_mtime_ns
            wanted = newest if wanted >= made_after else wanted
            os.utime(path, ns=(wanted, wanted), follow_symlinks=False)
    Path("/").chmod(0o755)
    os.chown("/", 0, 0)
    os.utime("/", ns=(newest, newest))


def _drop_lost(root: Path) -> None:
    """An empty lost+found: what mkfs left in a file system that an image was made of. No image can have one."""
    path = root / "lost+found"
    if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        path.rmdir()


def _ensure(path: Path, mode: int, owner: tuple[int, int]) -> None:
    if path.is_dir() and path.relative_to("/").as_posix() not in {*_REAL, *_EMPTIED, "var/tmp"}:
        return
    if not path.is_dir():
        remove(path)
        path.mkdir(parents=True)
    os.chown(path, *owner)
    path.chmod(mode)


def _users(etc: Path, when: int) -> None:
    """``user`` is 1000, root and nobody have names, nobody has a password."""
    shell = "bash" if Path("/bin/bash").exists() else "sh"
    passwd = _without(_lines(etc / "passwd"), "user")  # whoever that is there: ours replaces it
    for line, name in ((_SUPERUSER, "root"), (_NOBODY, "nobody")):
        if not _has(passwd, name):
            passwd.append(line.format(shell=shell).rstrip("\n"))
    # First of its number, so that 1000 reads as `user`; a name that an image has for it stays valid behind.
    passwd.insert(1, _US.format(shell=shell).rstrip("\n"))
    group = _without(_lines(etc / "group"), "user")
    group += [line for line in ("root:x:0:", "nogroup:x:65534:") if not _has(group, line.split(":")[0])]
    group.insert(1, "user:x:1000:")
    shadow = [_locked(line) for line in _without(_lines(etc / "shadow"), "user")]
    shadow.append(f"user:*:{_LAST_CHANGE}:0:99999:7:::")
    write_file(etc / "passwd", _text(passwd), when=when)
    write_file(etc / "group", _text(group), when=when)
    write_file(etc / "shadow", _text(shadow), 0o600, when=when)


def _without(lines: list[str], name: str) -> list[str]:
    return [line for line in lines if not line.startswith(f"{name}:")]


def _has(lines: list[str], name: str) -> bool:
    return any(line.startswith(f"{name}:") for line in lines)


def _locked(line: str) -> str:
    """An entry of /etc/shadow that no password opens."""
    fields = line.split(":")
    if len(fields) < 3:
        return line
    return ":".join([fields[0], "*", _LAST_CHANGE, *fields[3:]])


def _lines(path: Path) -> list[str]:
    """Of a small file; none when it is absent, not a file, or no text of a sane size."""
    if not path.is_file() or path.stat().st_size > 2**20:
        return []
    return [line for line in path.read_bytes().decode("utf-8", "surrogateescape").splitlines() if line]


def _text(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
