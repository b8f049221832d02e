"""What the kernel tells of processes and of the machine's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
KIB = 2**10
MEMORY_KINDS = ("AnonPages", "Cached", "Buffers", "Slab", "KernelStack", "PageTables", "Percpu", "Shmem")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an engine's processes hold: resident memory in MiB, and open descriptors."""

    engine_mib: float
    spawner_mib: float
    descriptors: int


def footprint() -> Footprint:
    """Of this process and of the spawners that it started."""
    started = spawners()
    return Footprint(
        engine_mib=status_mib("self", "VmRSS"),
        spawner_mib=sum(status_mib(str(pid), "VmRSS") for pid in started),
        descriptors=sum(descriptors(name) for name in ("self", *map(str, started))),
    )


def spawners() -> tuple[int, ...]:
    """Process ids of the spawners that this process started."""
    mine = str(os.getpid())
    return tuple(pid for pid, (name, parent) in _processes().items() if name == "spawner" and parent == mine)


def _processes() -> dict[int, tuple[str, str]]:
    """Name and parent of every process."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                before, _, after = (path / "stat").read_text().rpartition(")")
            except OSError:
                continue  # ended in between
            found[int(path.name)] = (before.partition("(")[2], after.split()[1])
    return found


def descendants_pss_mib(pids: tuple[int, ...]) -> float:
    """Proportional memory of everything below these processes, MiB."""
    table = _processes()
    family = {str(pid) for pid in pids}
    grown = True
    while grown:
        more = {str(pid) for pid, (_, parent) in table.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(_pss_mib(pid) for pid in family - {str(pid) for pid in pids})


def _pss_mib(pid: str) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0  # ended in between
    return _field(text, "Pss") / KIB


def status_mib(pid: str, name: str) -> float:
    """A figure of ``/proc/PID/status``, such as VmRSS or VmHWM, in MiB."""
    return _field(Path(f"/proc/{pid}/status").read_text(), name) / KIB


def _field(text: str, name: str) -> float:
    """A figure in kB.  Raises: ValueError: there is none of that name."""
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1])
    raise ValueError(f"{name} is not told")


def descriptors(pid: str) -> int:
    """How many are open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def forget_peak() -> float:
    """Start the peak of this process's resident memory anew; the memory it has now, MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_mib("self", "VmRSS")


def memory_mib() -> dict[str, float]:
    """The machine's memory by kind, MiB; ``MemAvailable`` is what could still be had."""
    text = Path("/proc/meminfo").read_text()
    return {name: _field(text, name) / KIB for name in ("MemAvailable", *MEMORY_KINDS)}
