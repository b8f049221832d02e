"""Control groups of the host: which there are, our directories in them, and the figures of one sandbox.

Version 1 (a hierarchy per controller), version 2, and the hybrid of both (version 1 controllers, and an empty version 2
hierarchy that still gives freezing, killing and CPU time).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.errors import IsolationUnavailable
from dsec.model.sandbox import Flag, Metrics

_V1: Final = ("memory", "pids", "cpu")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One of our directories; ``controllers`` empty for a bare version 2 hierarchy."""

    path: Path
    v2: bool
    controllers: frozenset[str]

    def argument(self) -> str:
        """As the spawner's ``--cgroup`` takes it."""
        names = (["v2"] if self.v2 else []) + sorted(self.controllers)
        return "+".join(names) + f"@{self.path}"


@dataclass(frozen=True, slots=True)
class Counters:
    """What a recycled cgroup had counted before this sandbox."""

    oom_kills: int = 0
    cpu_micros: int = 0


def mounted(text: str) -> tuple[dict[str, Path], Path | None]:
    """Version 1 controllers to their mount, and the version 2 mount, from the text of ``mountinfo``."""
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        if tail[0] == "cgroup2":
            v2 = Path(fields[4])
        elif tail[0] == "cgroup":
            v1.update({name: Path(fields[4]) for name in tail[2].split(",") if name in (*_V1, "freezer")})
    return v1, v2


def _make(path: Path) -> Path:
    path.mkdir(mode=0o755, exist_ok=True)
    return path


def _controllers(path: Path, want: frozenset[str]) -> frozenset[str]:
    """Of a version 2 directory, switched on for its children as far as they are available."""
    have = frozenset((path / "cgroup.controllers").read_text().split()) & want
    if have:
        (path / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(have)))
    return have


def prepare(name: str) -> tuple[Hierarchy, ...]:
    """Our directories called ``name`` in every hierarchy that is of use, made if missing.

    Raises:
        IsolationUnavailable: no cgroups, or not ours to write.
    """
    v1, v2 = mounted(Path("/proc/self/mountinfo").read_text())
    found: list[Hierarchy] = []
    try:
        found += [Hierarchy(_make(v1[one] / name), False, frozenset({one})) for one in _V1 if one in v1]
        if v2 is not None:
            have = _controllers(v2, frozenset(_V1))
            path = _make(v2 / name)
            found.append(Hierarchy(path, True, _controllers(path, have)))
        elif "freezer" in v1:
            found.append(Hierarchy(_make(v1["freezer"] / name), False, frozenset({"freezer"})))
    except OSError as error:
        raise IsolationUnavailable(
            f"control groups cannot be made: {error.filename}: {error.strerror}",
            hint="run as root on the host, with /sys/fs/cgroup mounted read-write",
        ) from error
    if not found:
        raise IsolationUnavailable(
            "no control groups are mounted", hint="mount cgroup2 at /sys/fs/cgroup, or boot with them enabled"
        )
    return tuple(found)


def flags(hierarchies: tuple[Hierarchy, ...]) -> frozenset[Flag]:
    """What these can guarantee."""
    have = frozenset().union(*(h.controllers for h in hierarchies))
    by_name = {"memory": Flag.MEMORY_LIMIT, "pids": Flag.PIDS_LIMIT, "cpu": Flag.CPU_LIMIT}
    found = {flag for name, flag in by_name.items() if name in have}
    if "freezer" in have or any(h.v2 for h in hierarchies):
        found.add(Flag.PAUSE)
    return frozenset(found)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _keyed(path: Path, key: str) -> int:
    try:
        text = path.read_text()
    except OSError:
        return -1
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{key} ")), -1)


def _less(value: int, base: int) -> int:
    return value if value < 0 else max(0, value - base)


class Figures:
    """Reads the figures of slots. Blocking, a few short reads."""

    def __init__(self, hierarchies: tuple[Hierarchy, ...]) -> None:
        self._all = hierarchies

    def _at(self, controller: str, slot: int) -> tuple[Path, bool] | None:
        for h in self._all:
            if controller in h.controllers or (controller == "v2" and h.v2):
                return h.path / f"s{slot}", h.v2
        return None

    def read(self, slot: int, base: Counters, disk_bytes: int) -> Metrics:
        """All figures of one slot."""
        memory, peak = self._memory(slot)
        return Metrics(
            cpu_seconds=self._cpu(slot, base),
            memory_bytes=memory,
            memory_peak_bytes=peak,
            disk_bytes=disk_bytes,
            pids=self._pids(slot),
            oom_kills=self.oom_kills(slot, base),
        )

    def _pids(self, slot: int) -> int:
        """Processes and threads. A zygote of the spawner may be in the version 1 groups, and never is in that of version 2."""
        at = self._at("pids", slot)
        if at is None:
            return -1
        group = self._at("v2", slot)
        if group is None or at[1]:
            return _number(at[0] / "pids.current")
        try:
            return (group[0] / "cgroup.threads").read_bytes().count(b"\n")
        except OSError:
            return -1

    def memory(self, slot: int) -> int:
        """Bytes now, -1 unknown. One read of what the kernel counts anyway."""
        at = self._at("memory", slot)
        if at is None:
            return -1
        path, v2 = at
        return _number(path / ("memory.current" if v2 else "memory.usage_in_bytes"))

    def _memory(self, slot: int) -> tuple[int, int]:
        at = self._at("memory", slot)
        if at is None:
            return -1, -1
        path, v2 = at
        if v2:
            return _number(path / "memory.current"), _number(path / "memory.peak")
        return _number(path / "memory.usage_in_bytes"), _number(path / "memory.max_usage_in_bytes")

    def _cpu(self, slot: int, base: Counters) -> float:
        at = self._at("v2", slot)
        if at is None:
            return -1.0
        micros = _less(_keyed(at[0] / "cpu.stat", "usage_usec"), base.cpu_micros)
        return micros / 1e6 if micros >= 0 else -1.0

    def oom_kills(self, slot: int, base: Counters) -> int:
        """Processes of this sandbox that the kernel killed for memory, -1 unknown."""
        at = self._at("memory", slot)
        if at is None:
            return -1
        path, v2 = at
        return _less(
            _keyed(path / ("memory.events" if v2 else "memory.oom_control"), "oom_kill"), base.oom_kills
        )

    def member(self, slot: int, pid: int) -> bool:
        """Whether that process is in the group of the slot: the version 2 one where there is one, where only its sandbox's are."""
        at = self._at("v2", slot) or self._at("freezer", slot) or self._at("pids", slot)
        try:
            return at is not None and b"%d" % pid in (at[0] / "cgroup.procs").read_bytes().split()
        except OSError:
            return False

    def frozen(self, slot: int) -> bool:
        """Whether every process of the slot has stopped."""
        at = self._at("v2", slot)
        if at is not None:
            return _keyed(at[0] / "cgroup.events", "frozen") == 1
        legacy = self._at("freezer", slot)
        try:
            return legacy is not None and (legacy[0] / "freezer.state").read_text().strip() == "FROZEN"
        except OSError:
            return False


def remove(name: str, *, seconds: float = 5.0) -> bool:
    """Remove our directories called ``name`` and end what still runs in them: an engine that is gone left it. Blocking.

    Returns: False when something is still there after ``seconds``.
    """
    v1, v2 = mounted(Path("/proc/self/mountinfo").read_text())
    tops = [mount / name for mount in {*v1.values(), *([v2] if v2 else [])}]
    deadline = time.monotonic() + seconds
    while left := [top for top in tops if top.is_dir()]:
        for top in left:
            _end(top)
        # A directory goes when the last of its processes is reaped, and one process may be in several hierarchies.
        if all(_removed(top) for top in left):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _end(top: Path) -> None:
    """Kill every process below, frozen ones too."""
    for group in top.iterdir():
        with suppress(OSError):
            if (group / "cgroup.kill").exists():
                (group / "cgroup.kill").write_text("1")
            elif (group / "cgroup.procs").exists():
                for pid in (group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
                (group / "freezer.state").write_text("THAWED")  # only the freezer has one


def _removed(top: Path) -> bool:
    try:
        for group in top.iterdir():
            if group.is_dir():
                group.rmdir()
        top.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
