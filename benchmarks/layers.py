"""What a writable layer costs: opening a pool, creating and discarding layers, and the designs that were not taken.

``python benchmarks/layers.py [--json] [--directory DIR] [--count N]`` (root). ``kernel`` is the processor time of kernel
threads for each cycle (transactions, freeing blocks), measured until they are idle again; ``own`` that of this process.
Other work on the machine adds to ``kernel``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dsec.model.ids import new_sandbox_id
from dsec.stores import btrfs
from dsec.stores.layers import BtrfsLayers
from dsec.stores.mounts import MOUNT_ATTR_NODEV, mount_detached
from dsec.stores.pool import open_pool

GIB = 2**30
SETTLE = 1.5
KERNEL_PARENT = "2"


@dataclass(frozen=True)
class Result:
    """One line of the table; times in milliseconds, of one create and discard unless ``what`` says otherwise."""

    what: str
    count: int
    p50: float
    p99: float
    own: float
    kernel: float


def kernel_seconds() -> float:
    """Processor time of all kernel threads so far."""
    total = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if parent == KERNEL_PARENT:
                    total += int((process / "schedstat").read_text().split()[0])
            except OSError:
                continue  # ended in between
    return total / 1e9


def figures(what: str, times: list[float], own: float, kernel: float) -> Result:
    ordered = sorted(times)
    count = len(ordered)
    return Result(
        what=what,
        count=count,
        p50=round(ordered[count // 2] * 1e3, 4),
        p99=round(ordered[min(count - 1, count * 99 // 100)] * 1e3, 4),
        own=round(own * 1e3 / count, 4),
        kernel=round(kernel * 1e3 / count, 4),
    )


async def opening(directory: Path, count: int) -> list[Result]:
    """A fresh private pool with its shelf, and its end."""
    opened, closed = [], []
    begun, kernel = time.process_time(), kernel_seconds()
    for _ in range(count):
        start = time.perf_counter()
        layers = await BtrfsLayers.open(directory, size_bytes=GIB, durable=False)
        ready = time.perf_counter()
        await layers.close()
        opened.append(ready - start)
        closed.append(time.perf_counter() - ready)
    own, kernel = time.process_time() - begun, kernel_seconds() - kernel
    return [figures("open a private pool", opened, own, kernel), figures("close it", closed, 0.0, 0.0)]


async def cycles(directory: Path, count: int, pause: float) -> list[Result]:
    """Create and discard as sandboxes do it: one at a time, ``pause`` seconds of life each."""
    layers = await BtrfsLayers.open(directory, size_bytes=GIB, durable=False)
    created, discarded = [], []
    begun, kernel = time.process_time(), kernel_seconds()
    for _ in range(count):
        sandbox = new_sandbox_id()
        start = time.perf_counter()
        path = await layers.create(sandbox, 1024)
        created.append(time.perf_counter() - start)
        os.mkdir(f"{path}/work/work", dir_fd=layers.root_fd())  # as an overlay does
        await asyncio.sleep(pause)
        start = time.perf_counter()
        await layers.discard(sandbox)
        discarded.append(time.perf_counter() - start)
    own = time.process_time() - begun
    await asyncio.sleep(SETTLE)
    kernel = kernel_seconds() - kernel
    await layers.close()
    return [figures("create (from the shelf)", created, own, kernel), figures("discard", discarded, 0.0, 0.0)]


async def holding(directory: Path, count: int) -> list[Result]:
    """Many at once: the shelf is empty, each slot is made when it is asked for."""
    layers = await BtrfsLayers.open(directory, size_bytes=4 * GIB, durable=False)
    times = []
    begun, kernel = time.process_time(), kernel_seconds()
    for _ in range(count):
        start = time.perf_counter()
        await layers.create(new_sandbox_id(), 1024)
        times.append(time.perf_counter() - start)
    own, kernel = time.process_time() - begun, kernel_seconds() - kernel
    await layers.close()
    return [figures("create (all held, none ready)", times, own, kernel)]


def measured(what: str, count: int, cycle: Callable[[int], None]) -> Result:
    """``cycle`` run ``count`` times, and the kernel's work after it."""
    times = []
    begun, kernel = time.process_time(), kernel_seconds()
    for number in range(count):
        start = time.perf_counter()
        cycle(number)
        times.append(time.perf_counter() - start)
    own = time.process_time() - begun
    time.sleep(SETTLE)
    return figures(what, times, own, kernel_seconds() - kernel)


def fresh_subvolumes(directory: Path, count: int) -> Result:
    """A new subvolume each time, destroyed afterwards; a commit every 200."""
    pool = open_pool(directory, GIB, durable=False)
    place = pool.directory

    def cycle(number: int) -> None:
        name = f"slot-{number}"
        btrfs.create_subvolume(place, name)
        inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=place)
        btrfs.limit_qgroup(place, btrfs.subvolume_id(inside), GIB)
        os.mkdir("upper", dir_fd=inside)
        os.mkdir("work", dir_fd=inside)
        os.close(inside)
        btrfs.destroy_subvolume(place, name)
        if number % 200 == 199:
            btrfs.start_commit(place)

    result = measured("design: a new subvolume each", count, cycle)
    pool.close()
    pool.wait_gone()
    return result


def tmpfs_uppers(count: int) -> Result:
    """A tmpfs each: no disk at all, every byte is memory."""

    def cycle(_: int) -> None:
        mount = mount_detached("tmpfs", "none", {"size": "1g", "nr_inodes": "100000"}, MOUNT_ATTR_NODEV)
        os.mkdir("upper", dir_fd=mount)
        os.mkdir("work", dir_fd=mount)
        os.close(mount)

    return measured("design: a tmpfs each", count, cycle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only JSON")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    place, count = options.directory, options.count
    results = [
        *asyncio.run(opening(place, 10)),
        *asyncio.run(cycles(place, count, 0.001)),
        *asyncio.run(holding(place, min(count, 1000))),
        fresh_subvolumes(place, count),
        tmpfs_uppers(count),
    ]
    machine = {"kernel": platform.release(), "cpus": os.cpu_count(), "python": platform.python_version()}
    if not options.json:
        print(f"{'':32}{'count':>7}{'p50':>9}{'p99':>9}{'own':>9}{'kernel':>9}  ms")
        for each in results:
            print(
                f"{each.what:32}{each.count:7}{each.p50:9.3f}{each.p99:9.3f}{each.own:9.3f}{each.kernel:9.3f}"
            )
    print(json.dumps({"machine": machine, "results": [asdict(each) for each in results]}))


if __name__ == "__main__":
    main()
