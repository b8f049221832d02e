"""Prove level `container` on control groups of version 2 alone: `tests/guest/v2_check.py` in an emulated machine.

Needs root (for the base image), QEMU, and Debian's packages of a kernel and busybox, which are downloaded once and only unpacked.
The guest's programs are those of base `system`; this tree and the Python packages that it needs come on a disk of its own. Exits 0
only when the guest has told that checks ran and none failed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.images.store import ImageStore
from dsec.ports.storage import Image
from dsec.wiring import default_home

ROOT: Final = Path(__file__).parent.parent
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dsec-v2"
KERNEL: Final = "linux-image-cloud-amd64"
MODULES: Final = ("virtio_pci", "virtio_blk", "overlay", "erofs", "btrfs", "loop")
SUMMARY: Final = re.compile(rb"^v2: (\d+) passed, (\d+) failed\r?$", re.MULTILINE)
DISK_BYTES: Final = 3 * 2**30

# Process 1 of the initial file system. The image is the guest's root, with a disk over it for what is missing there.
INIT: Final = """#!/bin/busybox sh
set -e
busybox mount -t devtmpfs dev /dev
busybox mount -t proc proc /proc
for module in $(busybox ls /modules); do busybox insmod /modules/$module; done
tries=0
until [ -b /dev/vda ]; do tries=$((tries + 1)); [ $tries -lt 50 ]; busybox sleep 0.1; done
busybox mount -t ext4 /dev/vda /disk
busybox losetup -r /dev/loop0 $(busybox echo /disk/store/images/*.erofs)
busybox mount -t erofs -o ro /dev/loop0 /base
busybox mount -t overlay -o lowerdir=/disk/tree:/base,upperdir=/disk/upper,workdir=/disk/work root /new
busybox mount --move /dev /new/dev
busybox mount --move /proc /new/proc
busybox mount --move /disk /new/disk
busybox mount -t sysfs sys /new/sys
busybox mount -t cgroup2 cgroup2 /new/sys/fs/cgroup
busybox mount -t tmpfs run /new/run
exec busybox switch_root /new /bin/sh /disk/start
"""
START: Final = """
export TMPDIR=/disk/tmp DSEC_HOME=/disk PYTHONPATH=/disk/src:/disk/site PATH=/usr/sbin:/usr/bin HOME=/root
exec </dev/console >/dev/console 2>&1
rm -f /var/lib/dpkg/status
python3 /disk/v2_check.py CHECKS
echo "guest: exit $?"
sleep 5
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Its output.  Raises: SystemExit: it failed; says how."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: exit {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def unpacked() -> Path:
    """The kernel and busybox, below the cache."""
    found = re.search(r"Depends: (linux-image-\S+)", run("apt-cache", "depends", KERNEL))
    if found is None:
        sys.exit(f"{KERNEL} names no kernel package")
    target = CACHE / found[1]
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        work = Path(name)
        run("apt-get", "download", found[1], "busybox-static", cwd=work)
        for package in work.glob("*.deb"):
            run("dpkg", "-x", package, work / "root")
        (work / "root").rename(target)
    return target


def wanted_modules(tree: Path) -> list[Path]:
    """The files of our modules and of all that they need, in the order of loading. What is built in has none."""
    files = {path.stem.replace("-", "_"): path for path in tree.glob("lib/modules/*/kernel/**/*.ko")}
    order: list[Path] = []

    def add(name: str) -> None:
        path = files.get(name.replace("-", "_"))
        if path is None or path in order:
            return
        content = path.read_bytes()
        needs = re.findall(rb"\0depends=([^\0]*)", b"\0" + content)
        soft = re.findall(rb"\0softdep=pre: *([^\0]*)", content)
        for text in [*needs, *soft]:
            for need in re.split(r"[, ]+", text.decode()):
                add(need)
        order.append(path)

    for module in MODULES:
        add(module)
    return order


def initial(tree: Path, work: Path) -> Path:
    """The initial file system."""
    root = work / "initial"
    for name in ("bin", "modules", "dev", "proc", "disk", "base", "new"):
        (root / name).mkdir(parents=True)
    busybox = tree / "bin/busybox"
    shutil.copy2(busybox, root / "bin/busybox")
    for place, module in enumerate(wanted_modules(tree)):
        shutil.copy2(module, root / "modules" / f"{place:02}-{module.name}")
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(root)) for path in root.rglob("*"))
    target = work / "initial.cpio"
    with target.open("wb") as out:
        subprocess.run(
            [busybox, "cpio", "-o", "-H", "newc"],
            cwd=root,
            input=names.encode(),
            stdout=out,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    return target


def distributions(name: str, seen: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """An installed distribution and all that it needs."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return
    seen.add(key)
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # needed elsewhere only
    yield found
    for need in found.requires or ():
        match = re.match(r"[\w.-]+", need)
        if match and "extra ==" not in need:
            yield from distributions(match[0], seen)


def copy_packages(site: Path) -> None:
    """What `dsec` imports, without itself."""
    for found in distributions("dsec-engine", set()):
        if found.name == "dsec-engine":
            continue
        for file in found.files or ():
            source, target = Path(str(file.locate())), site / file
            if ".." in file.parts or not source.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def copy_tool(name: str, tree: Path) -> None:
    """A program of this machine with its libraries, where base `system` has neither."""
    program = shutil.which(name, path="/usr/sbin:/usr/bin")
    if program is None:
        sys.exit(f"{name} is not installed")
    (tree / "usr/sbin").mkdir(parents=True)
    shutil.copy2(program, tree / "usr/sbin")
    libraries = tree / "usr/lib/x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    for path in re.findall(r"=> (/\S+)", run("ldd", program)):
        shutil.copy2(Path(path).resolve(), libraries / Path(path).name)


def copy_store(image: Image, store: Path) -> None:
    """The one image, current whatever packages the guest has."""
    (store / "images").mkdir(parents=True, mode=0o700)
    (store / "names").mkdir(mode=0o700)
    for path in (image.path, image.path.with_suffix(".json")):
        shutil.copy2(path, store / "images")
    meaning = {"digest": image.digest, "status": "none", "key": ""}
    (store / "names" / image.name).write_text(json.dumps(meaning))


def disk(image: Image, work: Path, checks: list[str]) -> Path:
    """The guest's disk: everything but the kernel and the initial file system."""
    content = work / "disk"
    for name in ("tree/disk", "upper", "work", "tmp", "site"):
        (content / name).mkdir(parents=True)
    copy_store(image, content / "store")
    copy_tool("mkfs.btrfs", content / "tree")
    copy_packages(content / "site")
    shutil.copytree(ROOT / "src", content / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "tests/guest/v2_check.py", content)
    (content / "start").write_text(START.replace("CHECKS", shlex.join(checks)))
    # Compiling is slow where every instruction is emulated.
    run(
        "/usr/bin/python3",
        "-m",
        "compileall",
        "-q",
        "-s",
        content,
        "-p",
        "/disk",
        content / "src",
        content / "site",
    )
    target = work / "disk.ext4"
    run("mkfs.ext4", "-q", "-d", content, target, f"{DISK_BYTES // 1024}k")
    return target


def machine(tree: Path, work: Path, content: Path) -> list[str]:
    """The command line of the emulator."""
    kernel = next((tree / "boot").glob("vmlinuz-*"))
    drive = f"file={content},format=raw,if=none,id=d0,cache=unsafe"
    words = "console=ttyS0 quiet panic=-1 cgroup_no_v1=all tsc=reliable"
    return [
        *("qemu-system-x86_64", "-M", "pc,accel=tcg", "-cpu", "max,-la57", "-smp", "1", "-m", "1536"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(kernel), "-initrd", str(initial(tree, work)), "-append", words),
        *("-drive", drive, "-device", "virtio-blk-pci,drive=d0"),
    ]


def boot(command: list[str], seconds: float) -> bytes:
    """What the guest's console said until its summary, its end or the time limit."""
    said = b""
    deadline = time.monotonic() + seconds
    with subprocess.Popen(
        ["nice", "-n", "10", *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as guest:
        assert guest.stdout is not None
        out = guest.stdout.fileno()
        while not SUMMARY.search(said) and (left := deadline - time.monotonic()) > 0:
            if not select.select([out], [], [], left)[0]:
                break
            piece = os.read(out, 65536)
            if not piece:
                break
            said += piece
            sys.stdout.write(piece.decode("utf-8", "replace").replace("\r", ""))
            sys.stdout.flush()
        guest.kill()
    sys.stdout.write("\n")
    return said


def main() -> int:
    """Build, boot, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of the guest")
    parser.add_argument("checks", nargs="*", help="names of checks; all of them when none is given")
    chosen = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("run as root: the base image is built from files of every owner")
    if shutil.which("qemu-system-x86_64") is None:
        sys.exit("qemu-system-x86_64 is missing: apt-get install --no-install-recommends qemu-system-x86")
    tree = unpacked()
    image = asyncio.run(ImageStore(default_home() / "store").get("system"))
    with tempfile.TemporaryDirectory(prefix="v2-", dir=CACHE) as name:
        work = Path(name)
        said = boot(machine(tree, work, disk(image, work, chosen.checks)), chosen.seconds)
    found = SUMMARY.search(said)
    if found is None:
        sys.stderr.write("the guest gave no summary\n")
        return 2
    return 0 if int(found[1]) > 0 and int(found[2]) == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
