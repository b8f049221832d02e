"""Base ``system``: a root file system copied from this machine's own Debian packages.

Only what packages own below /usr is copied. /etc is written anew; nothing of the host's /etc, /home, /root, /var or
/usr/local is read.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from dsec.errors import Unsupported
from dsec.images.packages import Package, package_files
from dsec.images.rootfs import HOSTNAME, HOSTS, make_directories, write_file
from dsec.images.tools import Check, environment, mortal, unstoppable

RECIPE: Final = "2"
"""Goes up when this module would build a different tree from the same packages."""

Progress = Callable[[str], None]

MERGED: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SKIPPED: Final = (
    "/usr/local/",
    "/usr/share/bash-completion/",
    "/usr/share/bug/",
    "/usr/share/doc-base/",
    "/usr/share/doc/",
    "/usr/share/info/",
    "/usr/share/lintian/",
    "/usr/share/locale/",
    "/usr/share/man/",
)
_PASSED_OVER: Final = (
    "lost+found"  # names that begin so, in any directory: mkfs.erofs takes them for what mkfs.ext4 makes
)
_LOOK_SECONDS: Final = 0.2
_SUPERBLOCK: Final = 1024  # where it begins in an image, and in it the number of inodes: bytes
_INODES: Final = 16
LINKS: Final = (
    ("var/run", "/run"),
    ("var/lock", "/run/lock"),
    ("etc/localtime", "/usr/share/zoneinfo/Etc/UTC"),
    ("etc/mtab", "../proc/self/mounts"),
    ("etc/os-release", "../usr/lib/os-release"),
    ("usr/lib/ssl/cert.pem", "/etc/ssl/certs/ca-certificates.crt"),
)
# What update-alternatives would link: name and what it can be, best first.
_ALTERNATIVES: Final = (
    ("awk", ("gawk", "mawk")),
    ("nawk", ("gawk", "mawk")),
    ("pager", ("less", "more")),
    ("which", ("which.debianutils",)),
    ("python", ("python3",)),
)
_ETC: Final = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        "user:x:1000:1000:user:/home/user:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "shadow": "root:*:19000:0:99999:7:::\nuser:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
    "shells": "/bin/sh\n/bin/bash\n/bin/dash\n",
    "hostname": HOSTNAME,
    "hosts": HOSTS,
    "resolv.conf": "",
    "host.conf": "multi on\n",
    "nsswitch.conf": (
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n"
        "protocols: files\nservices: files\n"
    ),
    "profile": (
        "PATH=/usr/local/bin:/usr/bin:/bin\n"
        'if [ "$(id -u)" -eq 0 ]; then PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; fi\n'
        "export PATH\numask 022\n"
    ),
    "bash.bashrc": "[ -z \"$PS1\" ] && return\nPS1='\\u@\\h:\\w\\$ '\n",
    "timezone": "Etc/UTC\n",
    "ssl/openssl.cnf": "openssl_conf = default\n[default]\n",
    "ld.so.conf": "/usr/local/lib\n{libraries}\n",
}


def require_builder() -> str:
    """Path of mkfs.erofs.  Raises: Unsupported: this process could not build an image."""
    if os.geteuid() != 0:
        raise Unsupported(
            "images can only be built by root: their files have owners",
            hint="run once as root",
            euid=os.geteuid(),
        )
    tool = shutil.which("mkfs.erofs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if tool is None:
        raise Unsupported(
            "images cannot be built: mkfs.erofs is not installed",
            hint="apt-get install erofs-utils",
            missing=["erofs-utils"],
        )
    return tool


def build_tree(root: Path, packages: Iterable[Package], progress: Progress) -> None:
    """Fill the empty directory ``root`` with the base image.

    Raises:
        Unsupported: this machine's /usr is not merged, or dpkg fails.
        OSError: the disk is full, a file cannot be read.
    """
    if not Path("/bin").is_symlink():
        raise Unsupported(
            "base 'system' needs a merged /usr (/bin as a link)",
            hint="apt-get install usrmerge",
            missing=["usrmerge"],
        )
    progress("listing package files")
    files = package_files(packages)
    progress(f"copying {len(files)} entries")
    newest = _Copier(root).copy(files)
    progress("writing /etc")
    make_directories(root)
    _make_links(root)
    write_etc(root, root / "usr")
    _run_ldconfig(root)
    _drop_dangling(root)
    settle(root, newest)


def make_erofs(
    tool: str, tree: Path, target: Path, uuid: str, *, attributes: bool = False, check: Check = unstoppable
) -> None:
    """Write ``tree`` as an EROFS image, uncompressed, mtimes kept.

    Args:
        attributes: keep extended ones, those of this machine (security.selinux) too.
        check: called again and again; what it raises ends the work.

    Raises:
        Unsupported: mkfs.erofs failed, its own words are in the message; or what it writes is not all of the tree.
        OSError: no space.
    """
    wanted = _inodes(tree)
    # How often one is stored before files share it; negative: not at all. Never: of a file that shares more than 255 mkfs.erofs
    # writes a broken count, and whoever fills a sandbox chooses how many there are.
    tolerance = "-x1000000000" if attributes else "-x-1"
    command = [tool, "--quiet", "--preserve-mtime", tolerance, f"-U{uuid}", str(target), str(tree)]
    status, words = _watched(command, check)
    if status != 0:
        if os.strerror(errno.ENOSPC) in words:
            raise OSError(errno.ENOSPC, words, str(target))
        raise Unsupported(
            f"mkfs.erofs failed ({status}): {words}",
            hint="is erofs-utils older than 1.5?",
            status=status,
        )
    found = _inodes_of(target)
    if found != wanted:
        raise Unsupported(
            f"mkfs.erofs wrote {found} of the {wanted} files and directories of a tree",
            hint="use another release of erofs-utils",
            found=found,
            wanted=wanted,
        )


def _watched(command: list[str], check: Check) -> tuple[int, str]:
    """Exit code and last words; not in a file, since the disk may be full."""
    with subprocess.Popen(
        mortal(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
    ) as process:
        try:
            while True:
                try:
                    said, _ = process.communicate(timeout=_LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    check()
                else:
                    return process.returncode, said.decode("utf-8", "replace").strip()[-500:]
        finally:
            process.kill()


def _inodes(tree: Path) -> int:
    """How many an image of a tree has: names of one file count once.

    Raises: Unsupported: a name that mkfs.erofs passes over, wherever it is. OSError.
    """
    single, linked, pending = 1, set[tuple[int, int]](), [os.fspath(tree)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.name.startswith(_PASSED_OVER):
                    raise _passed_over(os.path.relpath(entry.path, tree))
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    pending.append(entry.path)
                if stat.S_ISDIR(info.st_mode) or info.st_nlink == 1:
                    single += 1
                else:
                    linked.add((info.st_dev, info.st_ino))
    return single + len(linked)


def _inodes_of(image: Path) -> int:
    """As its superblock says."""
    with image.open("rb") as file:
        file.seek(_SUPERBLOCK + _INODES)
        return int.from_bytes(file.read(8), "little")


def _passed_over(path: str) -> Unsupported:
    return Unsupported(
        f"/{path} cannot be in an image: mkfs.erofs leaves out what is named {_PASSED_OVER}",
        hint="remove it, or give it another name",
        path=f"/{path}",
    )


def place(path: str) -> str | None:
    """Where a package's path goes in the merged tree, or None when it is left out."""
    top = path.split("/", 2)[1]
    if top in MERGED:
        path = f"/usr{path}"
    if not path.startswith("/usr/") or path.startswith(_SKIPPED) or f"{path}/" in _SKIPPED:
        return None
    return path


class _Copier:
    """Copies package files; hard links stay hard links."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[tuple[int, int], Path] = {}
        self._newest = 0

    def copy(self, paths: Iterable[str]) -> int:
        """Copy what belongs into the tree; the newest mtime among it, ns."""
        for path in sorted({placed for path in paths if (placed := place(path)) is not None}):
            self._entry(Path(path))
        return self._newest

    def _entry(self, path: Path) -> None:
        try:
            info = path.lstat()
        except FileNotFoundError:
            return  # excluded by the machine's dpkg configuration, or diverted
        target = self._target(path)
        if stat.S_ISDIR(info.st_mode):
            target.mkdir(parents=True, exist_ok=True)
            return
        self._newest = max(self._newest, info.st_mtime_ns)
        if stat.S_ISLNK(info.st_mode):
            self._link(path, target, info)
        elif stat.S_ISREG(info.st_mode):
            self._file(path, target, info)
            if path.suffix == ".py":
                self._bytecode(path, info)

    def _target(self, path: Path) -> Path:
        """Where it goes, its directory made."""
        target = self._root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _link(self, path: Path, target: Path, info: os.stat_result) -> None:
        value = path.readlink()
        if not value.is_relative_to("/etc/alternatives"):  # the host's choice; ours is made below
            target.symlink_to(value)
            self._stamp(target, info)

    def _file(self, path: Path, target: Path, info: os.stat_result) -> None:
        first = self._seen.get((info.st_dev, info.st_ino)) if info.st_nlink > 1 else None
        if first is not None:
            target.hardlink_to(first)
            return
        shutil.copyfile(path, target)
        # setuid and setgid are dropped: nothing inside may gain privileges.
        target.chmod(stat.S_IMODE(info.st_mode) & 0o777)
        self._stamp(target, info)
        self._seen[info.st_dev, info.st_ino] = target

    def _bytecode(self, path: Path, source: os.stat_result) -> None:
        """Byte code is made when a package is installed and owned by none; taken when it is that of the source."""
        for cached in Path(path.parent, "__pycache__").glob(f"{path.stem}.cpython-*.pyc"):
            info = cached.lstat()
            if stat.S_ISREG(info.st_mode) and _is_current(cached, source):
                target = self._target(cached)
                self._file(cached, target, info)
                # Made on the host at some moment: given the time of its source, so that the digest does not vary.
                self._stamp(target, source)

    def _stamp(self, target: Path, info: os.stat_result) -> None:
        os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns), follow_symlinks=False)


def _is_current(cached: Path, source: os.stat_result) -> bool:
    """Byte code of the interpreter that the packages bring, made from this very source."""
    with cached.open("rb") as file:
        header = file.read(16)
    expected = struct.pack("<III", 0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    return len(header) == 16 and header[4:] == expected


def _make_links(root: Path) -> None:
    for name in MERGED:
        if (root / "usr" / name).is_dir():
            (root / name).symlink_to(f"usr/{name}")
    for path, target in LINKS:
        link = root / path
        if link.parent.is_dir() and not os.path.lexists(link):
            link.symlink_to(target)
    for name, choices in _ALTERNATIVES:
        link = root / "usr/bin" / name
        present = [choice for choice in choices if (root / "usr/bin" / choice).exists()]
        if present and not os.path.lexists(link):
            link.symlink_to(present[0])


def write_etc(root: Path, usr: Path) -> None:
    """An /etc that names no machine. ``usr``: where the libraries and certificates are that it speaks of."""
    etc = root / "etc"
    libraries = sorted(path for path in (usr / "lib").glob("*-linux-gnu*") if path.is_dir())
    lines = "\n".join(f"/usr/lib/{path.name}" for path in libraries)
    for name, text in _ETC.items():
        write_file(etc / name, text.replace("{libraries}", lines).encode())
    (etc / "shadow").chmod(0o600)
    certificates = sorted((usr / "share/ca-certificates").rglob("*.crt"))
    bundle = b"".join(path.read_bytes().rstrip(b"\n") + b"\n" for path in certificates)
    write_file(etc / "ssl/certs/ca-certificates.crt", bundle)


def _run_ldconfig(root: Path) -> None:
    """Without its cache the loader would look into the wrong places for some libraries.  Raises: Unsupported."""
    tool = shutil.which("ldconfig", path="/usr/sbin:/sbin")
    if tool is None:
        raise Unsupported("ldconfig is not installed", hint="apt-get install libc-bin", missing=["libc-bin"])
    done = subprocess.run(
        [tool, "-r", str(root)], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        raise Unsupported(
            f"ldconfig failed ({done.returncode}): {done.stderr.strip()[-500:]}",
            hint="dpkg --verify libc-bin",
            status=done.returncode,
        )
    shutil.rmtree(root / "var/cache/ldconfig", ignore_errors=True)


def _drop_dangling(root: Path) -> None:
    """Links of packages into an /etc that this tree does not have."""
    for path in (root / "usr").rglob("*"):
        value = path.readlink() if path.is_symlink() else root
        if value.is_relative_to("/etc") and not os.path.lexists(root / value.relative_to("/")):
            path.unlink()


def settle(root: Path, newest: int) -> None:
    """One fixed time for all that no package dates: directories, and what was written here."""
    made = {root / path for path, _ in LINKS} | {root / name for name in MERGED}
    made |= {root / "usr/bin" / name for name, _ in _ALTERNATIVES}
    for path in root.rglob("*"):
        info = path.lstat()
        undated = path in made or path.is_relative_to(root / "etc") or stat.S_ISDIR(info.st_mode)
        if undated or info.st_mtime_ns > newest:
            os.utime(path, ns=(newest, newest), follow_symlinks=False)
    root.chmod(0o755)
    os.utime(root, ns=(newest, newest))
