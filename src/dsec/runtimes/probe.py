"""Which layers of isolation the kernel gives to this process, found out by trying them.

What is tried is tried in children that end at once; nothing is left behind. Blocking, some 50 ms. The functions named
``judge_…`` are pure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dsec.model.health import Layer, Status
from dsec.runtimes import cgroups

_CLONE_NEWNS: Final = 0x0002_0000
_CLONE_NEWUSER: Final = 0x1000_0000
_NAMESPACES: Final = {
    "user": _CLONE_NEWUSER,
    "pid": 0x2000_0000,
    "net": 0x4000_0000,
    "mount": _CLONE_NEWNS,
    "ipc": 0x0800_0000,
    "uts": 0x0400_0000,
    "cgroup": 0x0200_0000,
}
_MS_PRIVATE: Final = 0x0004_0000
_MS_REC: Final = 0x4000
# The same numbers on x86-64 and arm64.
_SYS_OPEN_TREE: Final = 428
_SYS_FSOPEN: Final = 430
_SYS_CLONE3: Final = 435
_SYS_MOUNT_SETATTR: Final = 442
_SYS_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_VERSION: Final = 1
_OPEN_TREE_CLONE: Final = 1
_AT_EMPTY_PATH: Final = 0x1000
_MOUNT_ATTR_IDMAP: Final = 0x0010_0000
_CAP_SYS_RESOURCE: Final = 24
_OUTSIDE_IDS: Final = "0 1073741824 65536"
_LANDLOCK_FEATURES: Final = (
    (1, "files"),
    (2, "links across directories"),
    (3, "truncation"),
    (4, "TCP ports"),
    (5, "device ioctls"),
    (6, "signals and abstract sockets"),
)
_SCOPES: Final = 6
_CONTROLLERS: Final = ("memory", "pids", "cpu")


def kernel_layers() -> tuple[Layer, ...]:
    """All of them. Forks: call it while the process has one thread."""
    return (
        root(),
        *(namespace(kind) for kind in _NAMESPACES),
        overlay(),
        idmapped_mounts(),
        file_system("erofs"),
        seccomp(),
        landlock(),
        *control_groups(),
        oom_protection(),
        clone3(),
        pidfd(),
        terminals(),
    )


def active(name: str, detail: str = "") -> Layer:
    """It works."""
    return Layer(name, Status.ACTIVE, detail)


def unavailable(name: str, why: str, hint: str = "") -> Layer:
    """It cannot be had."""
    return Layer(name, Status.UNAVAILABLE, why, hint)


def degraded(name: str, why: str, hint: str = "") -> Layer:
    """A part of it is missing."""
    return Layer(name, Status.DEGRADED, why, hint)


def root() -> Layer:
    """Who we are."""
    uid = os.geteuid()
    if uid == 0:
        return active("root", "uid 0")
    return degraded("root", f"uid {uid}: level 'container' needs root", "run as root, or use --level process")


def namespace(kind: str) -> Layer:
    """A child makes one; anybody but root makes a user namespace with it."""
    flags = _NAMESPACES[kind] | (0 if os.geteuid() == 0 else _CLONE_NEWUSER)
    failed = in_child(lambda: _step("unshare", _libc().unshare(ctypes.c_int(flags))))
    name = f"{kind} namespace"
    return unavailable(name, failed, _namespace_hint(kind)) if failed else active(name)


def _namespace_hint(kind: str) -> str:
    if kind == "user":
        return "sysctl user.max_user_namespaces=65536 kernel.unprivileged_userns_clone=1"
    return (
        f"sysctl user.max_{'mnt' if kind == 'mount' else kind}_namespaces=65536; in a container: --privileged"
    )


def overlay() -> Layer:
    """A child mounts one, in a mount namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="dsec-probe-") as directory:
        failed = in_child(lambda: _mount_overlay(directory))
    return unavailable("overlayfs", failed, _mount_hint("overlay")) if failed else active("overlayfs")


def _mount_overlay(directory: str) -> None:
    libc = _libc()
    flags = _CLONE_NEWNS | (0 if os.geteuid() == 0 else _CLONE_NEWUSER)
    uid, gid = os.geteuid(), os.getegid()
    _step("unshare", libc.unshare(ctypes.c_int(flags)))
    if uid != 0:  # without a mapping nothing can be made in the new namespace
        for file, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", file).write_text(line)
    at = directory.encode()
    _step("private mounts", libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    _step("tmpfs", libc.mount(b"tmpfs", at, b"tmpfs", ctypes.c_ulong(0), None))
    for name in ("lower", "upper", "work"):
        os.mkdir(f"{directory}/{name}")
    options = f"lowerdir={directory}/lower,upperdir={directory}/upper,workdir={directory}/work"
    _step("overlay", libc.mount(b"overlay", at, b"overlay", ctypes.c_ulong(0), options.encode()))


def idmapped_mounts() -> Layer:
    """A detached mount of the temporary directory gets the owners of a new user namespace."""
    name = "idmapped mounts"
    try:
        with _user_namespace() as user, tempfile.TemporaryDirectory(prefix="dsec-probe-") as directory:
            _map_mount(directory, user)
    except OSError as error:
        hint = "Linux 5.12 or later, and a temporary directory on ext4, xfs or btrfs"
        why = f"{error.filename or 'user namespace'}: {error.strerror}"
        if os.geteuid() != 0:
            return unavailable(name, why, "run as root")
        return unavailable(name, why, hint)
    return active(name)


@contextlib.contextmanager
def _user_namespace() -> Iterator[int]:
    """A descriptor of a user namespace with a range of ids.  Raises: OSError."""
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        result = _libc().unshare(ctypes.c_int(_CLONE_NEWUSER))
        os.write(theirs[1], b"y" if result == 0 else b"n")
        os.close(ours[1])
        os.read(ours[0], 1)
        os._exit(0)
    try:
        if os.read(theirs[0], 1) != b"y":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), "unshare")
        for file in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{file}").write_text(_OUTSIDE_IDS)
        descriptor = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        for fd in (*ours, *theirs):
            os.close(fd)
        os.waitpid(child, 0)


def _map_mount(directory: str, user: int) -> None:
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = _syscall("open_tree", _SYS_OPEN_TREE, -100, directory.encode(), flags)
    try:
        wanted = struct.pack("=4Q", _MOUNT_ATTR_IDMAP, 0, 0, user)
        _syscall("mount_setattr", _SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, wanted, len(wanted))
    finally:
        os.close(tree)


def file_system(name: str) -> Layer:
    """The kernel knows it (its module is loaded when need be)."""
    try:
        os.close(_syscall("fsopen", _SYS_FSOPEN, name.encode(), 1))
    except OSError as error:
        listed = name in Path("/proc/filesystems").read_text().split()
        if error.errno == errno.EPERM and listed:
            return degraded(name, "only root may mount it", "run as root")
        return unavailable(name, error.strerror or "unknown", _mount_hint(name))
    return active(name)


def _mount_hint(name: str) -> str:
    return f"modprobe {name}, as root; in a container: --privileged"


def seccomp() -> Layer:
    """System call filters."""
    try:
        actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text()
    except OSError:
        actions = ""
    return judge_seccomp(actions)


def judge_seccomp(actions: str) -> Layer:
    """From the list of actions that the kernel can take."""
    if {"errno", "kill_process"} <= set(actions.split()):
        return active("seccomp", "filters")
    return unavailable("seccomp", "the kernel has no filters", "a kernel with CONFIG_SECCOMP_FILTER")


def landlock() -> Layer:
    """Its version here."""
    try:
        version = _syscall("landlock", _SYS_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    except OSError as error:
        return judge_landlock(0, error.errno or 0)
    return judge_landlock(version, 0)


def judge_landlock(version: int, code: int) -> Layer:
    """From the version of its interface, or the error that asking for it gave."""
    if version < 1:
        off = code == errno.EOPNOTSUPP
        why = "switched off at boot" if off else "this kernel has none"
        hint = (
            "boot with lsm=landlock,... in front"
            if off
            else "Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK"
        )
        return unavailable("landlock", why, hint)
    have = ", ".join(words for since, words in _LANDLOCK_FEATURES if since <= version)
    detail = f"ABI {version}: {have}"
    if version < _SCOPES:
        lack = ", ".join(words for since, words in _LANDLOCK_FEATURES if since > version)
        return degraded("landlock", f"{detail}; without {lack}", "Linux 6.12 or later")
    return active("landlock", detail)


def control_groups() -> tuple[Layer, ...]:
    """A layer for each controller, and the freezer."""
    v1, v2 = cgroups.mounted(Path("/proc/self/mountinfo").read_text())
    have: frozenset[str] = frozenset()
    if v2 is not None:
        with contextlib.suppress(OSError):
            have = frozenset((v2 / "cgroup.controllers").read_text().split())
    return judge_cgroups(v1, v2, have, lambda path: os.access(path, os.W_OK))


def judge_cgroups(
    v1: dict[str, Path], v2: Path | None, v2_controllers: frozenset[str], writable: Callable[[Path], bool]
) -> tuple[Layer, ...]:
    """From what is mounted where: version 1 controllers, the version 2 mount and its controllers."""
    found = []
    for controller in _CONTROLLERS:
        path, version = v1.get(controller), 1
        if path is None and v2 is not None and controller in v2_controllers:
            path, version = v2, 2
        found.append(_controller(f"cgroup {controller}", path, version, writable))
    freezer, version = (v2, 2) if v2 is not None else (v1.get("freezer"), 1)
    found.append(_controller("cgroup freezer", freezer, version, writable))
    return tuple(found)


def _controller(name: str, path: Path | None, version: int, writable: Callable[[Path], bool]) -> Layer:
    if path is None:
        return unavailable(
            name, "not mounted", "mount -t cgroup2 none /sys/fs/cgroup, or boot with it enabled"
        )
    if not writable(path):
        return unavailable(
            name, f"v{version} at {path}, not ours to write", "run as root, with it mounted read-write"
        )
    return active(name, f"v{version} at {path}")


def oom_protection() -> Layer:
    """Whether init can be protected better than we are ourselves."""
    return judge_oom_protection(Path("/proc/self/status").read_text())


def judge_oom_protection(status: str) -> Layer:
    """From the text of ``/proc/self/status``."""
    bits = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    if int(bits, 16) >> _CAP_SYS_RESOURCE & 1:
        return active("oom protection", "CAP_SYS_RESOURCE: init is exempt from the OOM killer")
    return degraded(
        "oom protection",
        "no CAP_SYS_RESOURCE: init is as likely a victim of the OOM killer as DSec itself",
        "give CAP_SYS_RESOURCE",
    )


def clone3() -> Layer:
    """Asked for nothing it says EINVAL where it exists."""
    try:
        _syscall("clone3", _SYS_CLONE3, None, 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return active("clone3")
        return unavailable(
            "clone3",
            error.strerror or "unknown",
            "Linux 5.3 or later; in a container: a newer seccomp profile",
        )
    return active("clone3")


def pidfd() -> Layer:
    """A descriptor of a process."""
    try:
        descriptor = os.pidfd_open(os.getpid())
    except OSError as error:
        return unavailable("pidfd", error.strerror or "unknown", "Linux 5.3 or later")
    os.close(descriptor)
    return active("pidfd")


def terminals() -> Layer:
    """A new pseudo-terminal."""
    try:
        os.close(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        return unavailable("terminals", f"/dev/ptmx: {error.strerror}", "mount devpts at /dev/pts")
    return active("terminals", "/dev/ptmx")


class _Failed(Exception):
    """A step of a trial in a child."""


def in_child(trial: Callable[[], None]) -> str:
    """Run it in a forked child; "" or what failed. The child leaves without any clean-up of ours."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            trial()
        except OSError as error:
            os.write(write_end, f"{error.filename or 'kernel'}: {error.strerror}".encode())
        except _Failed as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        said = stream.read(4096).decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return said


def _step(name: str, result: int) -> None:
    """Raises: _Failed."""
    if result != 0:
        raise _Failed(f"{name}: {os.strerror(ctypes.get_errno())}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(name: str, number: int, *arguments: int | bytes | None) -> int:
    """Raises: OSError: with ``name`` as its file name."""
    function = _libc().syscall
    function.restype = ctypes.c_long
    converted = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = int(function(ctypes.c_long(number), *converted))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result
