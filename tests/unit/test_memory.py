"""What the machine, and the cgroups that we are in, leave of memory."""

from __future__ import annotations

from pathlib import Path

from dsec.core.admission import Memory
from dsec.node.memory import MachineMemory, available

KIB, MIB = 1024, 2**20
MEMINFO = "MemTotal:       8000000 kB\nMemFree: 1 kB\nMemAvailable:   6000000 kB\n"


def proc(root: Path, cgroup: str, mountinfo: str, meminfo: str = MEMINFO) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(meminfo)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    return root / "proc"


def bound(directory: Path, names: tuple[str, str], values: tuple[object, object], stat: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, values, strict=True):
        (directory / name).write_text(f"{value}\n")
    (directory / "memory.stat").write_text(stat)


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_a_machine_without_bounds(tmp_path: Path) -> None:
    where = proc(tmp_path, "0::/\n", "")
    assert MachineMemory(where).read() == Memory(8_000_000 * KIB, 6_000_000 * KIB)
    assert available(where / "meminfo") == 0.75


def test_cgroup_v2_and_those_above_it(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    where = proc(tmp_path, "0::/a/b\n", f"30 29 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    bound(mount / "a/b", V2, ("max", 5), "inactive_file 0\n")
    bound(mount / "a", V2, (1000 * MIB, 800 * MIB), f"anon 1\ninactive_file {100 * MIB}\n")
    memory = MachineMemory(where)
    assert memory.read() == Memory(1000 * MIB, 300 * MIB)
    (mount / "a/memory.current").write_text(str(1200 * MIB))
    assert memory.read() == Memory(1000 * MIB, 0)


def test_cgroup_v1_as_a_container_sees_it(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    where = proc(
        tmp_path,
        "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
        f"30 29 0:26 /docker/abc {mount} rw - cgroup cgroup rw,memory\nbroken line\n",
    )
    bound(mount, V1, (500 * MIB, 200 * MIB), f"total_inactive_file {50 * MIB}\n")
    assert MachineMemory(where).read() == Memory(500 * MIB, 350 * MIB)


def test_a_bound_beyond_the_machine_is_none(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    where = proc(tmp_path, "4:memory:/\n", f"30 29 0:26 / {mount} rw - cgroup cgroup rw,memory\n")
    bound(mount, V1, (2**63 - 4096, 7 * 2**40), "total_inactive_file 0\n")
    assert MachineMemory(where).read() == Memory(8_000_000 * KIB, 6_000_000 * KIB)


def test_nobody_tells(tmp_path: Path) -> None:
    assert MachineMemory(tmp_path).read() is None
    assert MachineMemory(proc(tmp_path, "x\n", "y\n", "MemTotal: what kB\n")).read() is None
    assert available(tmp_path / "nothing") == 1.0
