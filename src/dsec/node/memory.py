"""How much memory this machine has left, and what running sandboxes take of it. Everything here that reads blocks, for some microseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from dsec.core.admission import Memory
from dsec.errors import DsecError
from dsec.model.ids import SandboxId
from dsec.model.sandbox import SandboxSpec, State
from dsec.node.handles import Table

_MEMINFO: Final = Path("/proc/meminfo")
Names = tuple[str, str, str]  # of the files with bound, use, and of the line with what can be reclaimed
_PROC: Final = Path("/proc")
_KIB: Final = 1024
_LOOK_AGAIN: Final = 300  # readings after which it is looked anew which cgroups bound us
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = ("memory.max", "memory.current", "inactive_file")


def available(source: Path = _MEMINFO) -> float:
    """The share of its memory that programs could still have, 0 to 1; 1 where nobody tells. Blocks, for some microseconds."""
    memory = _machine(source)
    return 1.0 if memory is None else min(memory.available / memory.total, 1.0)


class MachineMemory:
    """Of this machine, or what the cgroups that this process is in leave it where that is less."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._bounding: tuple[tuple[Path, Names], ...] = ()
        self._reads = 0

    def read(self) -> Memory | None:
        """As it is now; None where nobody tells. Blocks."""
        found = _machine(self._proc / "meminfo")
        if found is None:
            return None
        if (
            self._reads % _LOOK_AGAIN == 0
        ):  # seldom: a machine with many sandboxes has many mounts to look through
            self._bounding = tuple(_bounding(self._proc, found.total))
        self._reads += 1
        for directory, names in self._bounding:
            bound = _bound(directory, names)
            if bound is not None:
                found = Memory(min(found.total, bound.total), min(found.available, bound.available))
        return found


def _machine(source: Path) -> Memory | None:
    try:
        lines = source.read_text(encoding="ascii").splitlines()
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        total, left = found["MemTotal"] * _KIB, found["MemAvailable"] * _KIB
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return Memory(total, left) if total > 0 else None


def _bounding(proc: Path, total: int) -> Iterator[tuple[Path, Names]]:
    """The cgroups that this process is in, and those above them that can be seen, which allow less than the machine has."""
    for root, path, names in _cgroups(proc):
        here = PurePosixPath(path)
        for each in (here, *here.parents):
            directory = root / str(each).lstrip("/")
            bound = _bound(directory, names)
            if bound is not None and bound.total < total:
                yield directory, names


def _cgroups(proc: Path) -> Iterator[tuple[Path, str, Names]]:
    """Where the hierarchies that count memory are mounted, and our place in them."""
    try:
        mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
        places = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except (OSError, ValueError):
        return
    for place in places:
        if len(place) != 3:
            continue
        controllers, path = place[1], place[2]
        for mount in mounts:
            if "-" not in mount:
                continue
            rest = mount[mount.index("-") + 1 :]
            root, point = mount[3], Path(mount[4])
            if rest[0] == "cgroup2" and not controllers:
                yield point, _below(path, root), _V2
            elif (
                rest[0] == "cgroup" and "memory" in controllers.split(",") and "memory" in rest[2].split(",")
            ):
                yield point, _below(path, root), _V1


def _below(path: str, root: str) -> str:
    """Our place as the mount shows it: what is above its root cannot be seen."""
    own = PurePosixPath(path)
    try:
        return "/" + str(own.relative_to(root))
    except ValueError:
        return "/"


def _bound(directory: Path, names: Names) -> Memory | None:
    """None: it has no bound."""
    most, used, reclaimable = names
    try:
        limit = int((directory / most).read_text())
        now = int((directory / used).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        free = limit - now + int(stat.get(reclaimable, 0))
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return Memory(limit, max(free, 0))


class Measured:
    """Running sandboxes, some at a time, round and round."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._round: deque[SandboxId] = deque()

    def sample(self, count: int) -> list[tuple[SandboxSpec, int]]:
        """Bytes that up to ``count`` of them take now; one that cannot be measured is left out. None is woken for it."""
        if not self._round:
            self._round.extend(handle.id for handle in self._table)
        found: list[tuple[SandboxSpec, int]] = []
        for _ in range(min(count, len(self._round))):
            handle = self._table.find(self._round.popleft())
            if handle is None or handle.info.state is not State.RUNNING:
                continue
            try:
                size = handle.runtime.memory(handle.id)
            except (DsecError, OSError):
                continue
            if size > 0:
                found.append((handle.info.spec, size))
        return found
