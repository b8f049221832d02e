"""Counts what DSec can leave behind on a machine, so that a test can ask for all of it back.

A census is judged from outside: it reads /proc, /sys and the temporary directory, and asks no part of DSec. Two
scopes: the whole machine (every trace of DSec, whoever made it: right where nothing else runs, as in CI), or *one
root*, the temporary directory of this test run (right beside a colleague's test run on the same machine).
"""

from __future__ import annotations

import gc
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

PROGRAMS = ("/_native/init", "/_native/spawner", "/native/build/init", "/native/build/spawner")
"""How the path of our own executables ends."""

INSTRUMENTS = ("/bin/postgres",)
"""How the path of a program ends that tests are run against: it is theirs, and its processes come and go as it likes."""

_CGROUPS = Path("/sys/fs/cgroup")
_NUMBER = re.compile(r"\d+")
_SLOT = re.compile(r"s\d+")
_FIRST_POLL, _LAST_POLL = 0.005, 0.1  # seconds


@dataclass(frozen=True, slots=True)
class Census:
    """What exists now. Each item is text that a person can act on; the same thing always has the same text."""

    processes: frozenset[str]
    namespaces: frozenset[str]
    mounts: frozenset[str]
    loops: frozenset[str]
    cgroups: frozenset[str]
    directories: frozenset[str]
    descriptors: Counter[str]
    """Of this process, counted by kind of target: numbers and inode numbers differ from run to run."""


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    started: int
    name: str
    exe: str

    def __str__(self) -> str:
        return f"{self.name}[{self.pid}] started {self.started}, exe {self.exe or 'unknown'}"


def take(root: Path | None = None) -> Census:
    """Count now.

    Args:
        root: None for the whole machine, or the directory that everything to be counted has its state in.
    """
    table = {process.pid: process for process in _processes()}
    ahead = {pid for pid, process in table.items() if _is_ahead(table, process) or _is_instrument(process)}
    ours = _ours(table, root) - ahead
    return Census(
        processes=frozenset(str(table[pid]) for pid in ours),
        namespaces=frozenset(_namespaces({pid for pid in ours if not _is_spawner(table[pid])})),
        mounts=frozenset(_mounts(root)),
        loops=frozenset(_loops(root)),
        cgroups=frozenset(_cgroups("" if root is None else _arguments(table, ours), ahead)),
        directories=frozenset(_directories(root)),
        descriptors=_descriptors(),
    )


def left_behind(before: Census, after: Census) -> list[str]:
    """What ``after`` has and ``before`` had not, a line each, sorted."""
    lines = []
    for field in fields(Census):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(new, Counter):
            lines += [f"{field.name}: {count} more {what}" for what, count in (new - old).items()]
        else:
            lines += [f"{field.name}: {what}" for what in new - old]
    return sorted(lines)


def settle(
    before: Census,
    *,
    root: Path | None = None,
    seconds: float = 3.0,
    passing: Callable[[str], bool] = lambda _: False,
) -> list[str]:
    """Wait until nothing more is there than ``before``, at most ``seconds``: deletions may go on in the background.

    Args:
        passing: lines that are no fault now, because somebody who is still there will see to it.

    Returns: what is still there then; empty when all is back.
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST_POLL
    gc.collect()  # a descriptor that only garbage holds is a ResourceWarning, not a leak
    while lines := [line for line in left_behind(before, take(root)) if not passing(line)]:
        if time.monotonic() >= deadline:
            return lines
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL)
    return []


def _processes() -> Iterator[_Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        name, _, rest = stat.partition("(")[2].rpartition(")")
        words = rest.split()
        exe = _link(entry / "exe") or _first_argument(entry)
        yield _Process(int(entry.name), int(words[1]), int(words[19]), name, exe)


def _first_argument(process: Path) -> str:
    """Says what another user's process runs, whose executable may not be asked for; "" for kernel threads and zombies."""
    try:
        return (process / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def _ours(table: dict[int, _Process], root: Path | None) -> set[int]:
    """This process's descendants, our programs (all, or those that name ``root``), and all descendants of those."""
    own = os.getpid()
    found = {own} | {pid for pid, process in table.items() if _is_program(process, root)}
    grew = True
    while grew:
        more = {p.pid for p in table.values() if p.parent in found} - found
        found |= more
        grew = bool(more)
    return found - {own}


def _is_program(process: _Process, root: Path | None) -> bool:
    if not process.exe.removesuffix(" (deleted)").endswith(PROGRAMS):
        return False
    return root is None or _mentions(process.pid, root)


def _mentions(pid: int, root: Path) -> bool:
    """A daemon has no parent to be known by, but its arguments, environment or open files name its state directory."""
    wanted = str(root)
    for name in ("cmdline", "environ"):
        try:
            if os.fsencode(wanted) in Path(f"/proc/{pid}/{name}").read_bytes():
                return True
        except OSError:
            continue
    try:
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        handles = []
    return any(_link(link).startswith(wanted) for link in [*handles, Path(f"/proc/{pid}/cwd")])


def _is_spawner(process: _Process) -> bool:
    return process.exe.removesuffix(" (deleted)").endswith("/spawner")


def _is_instrument(process: _Process) -> bool:
    return process.exe.removesuffix(" (deleted)").endswith(INSTRUMENTS)


def _is_ahead(table: dict[int, _Process], process: _Process) -> bool:
    """What a living spawner makes ahead, which comes and goes when it likes; without its spawner it counts."""
    parent = table.get(process.parent)
    return _is_spawner(process) and parent is not None and _is_spawner(parent)


def _namespaces(pids: set[int]) -> Iterator[str]:
    """Namespaces that our processes live in; one kept by nothing but a mount is among the mounts, as nsfs."""
    for pid in pids:
        for kind in ("mnt", "net", "pid", "user", "ipc", "uts", "cgroup"):
            if name := _link(Path(f"/proc/{pid}/ns/{kind}")):
                yield name


def _marks(root: Path | None) -> tuple[str, ...]:
    """What the path of a mount or of a loop device's file holds when it is to be counted."""
    return (str(root),) if root is not None else ("dsec", tempfile.gettempdir())


def _mounts(root: Path | None) -> Iterator[str]:
    wanted = _marks(root)
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        if any(mark in line for mark in wanted):
            words = line.split()
            yield f"{words[4]} (mount {words[0]} of {words[3]}, {' '.join(words[words.index('-') + 1 :])})"


def _loops(root: Path | None) -> Iterator[str]:
    wanted = _marks(root)
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            file = backing.read_text().rstrip("\n")
        except OSError:
            continue  # detached meanwhile
        if any(mark in file for mark in wanted):
            yield f"/dev/{backing.parts[3]} of {file}"


def _arguments(table: dict[int, _Process], ours: set[int]) -> str:
    """The command lines of all spawners and inits that are somebody else's."""
    found = []
    for process in table.values():
        if process.pid in ours or not _is_program(process, None):
            continue
        try:
            found.append(Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace"))
        except OSError:
            continue
    return "\0".join(found)


def _cgroups(others: str, ahead: set[int]) -> Iterator[str]:
    """Cgroups below one named dsec*, in every hierarchy, but for those that ``others`` speaks of."""
    tops = (
        [top for top in _CGROUPS.iterdir() if top.is_dir() and not top.is_symlink()]
        if _CGROUPS.is_dir()
        else []
    )
    for top in tops:
        for folder, _, _ in os.walk(top):
            below = Path(folder).relative_to(_CGROUPS)
            name = next((part for part in below.parts if part.startswith("dsec")), "")
            if name and name not in others and not _is_spare(Path(folder), ahead):
                yield str(below)


def _is_spare(folder: Path, ahead: set[int]) -> bool:
    """A slot that a spawner keeps for its next sandbox; what is left of a spawner shows by the directory above."""
    if not _SLOT.fullmatch(folder.name):
        return False
    try:
        return {int(pid) for pid in (folder / "cgroup.procs").read_text().split()} <= ahead
    except OSError:
        return True  # gone meanwhile


def _directories(root: Path | None) -> Iterator[str]:
    """Temporary entries that DSec names after itself."""
    tops = {Path(tempfile.gettempdir())} if root is not None else {Path(tempfile.gettempdir()), Path("/tmp")}
    for top in tops:
        yield from (str(entry) for entry in top.iterdir() if entry.name.startswith("dsec"))


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        target = _link(entry)
        if target and not target.startswith("/proc/"):
            found[target if target.startswith("/") else _NUMBER.sub("", target)] += 1
    return found


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
