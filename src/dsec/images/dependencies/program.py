"""What an ELF program says of itself: its machine and the libc it needs. Read, never run."""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from dsec.errors import Unsupported
from dsec.images.dependencies.inside import find, resolved

_MACHINES: Final = {21: "ppc64le", 62: "x86_64", 183: "aarch64", 243: "riscv64", 258: "loongarch64"}
_PT_INTERP: Final = 3
_HEADERS: Final = 64  # program headers at most; a real program has a dozen
_LONGEST: Final = 4096  # bytes of the loader's path
_SEARCHED: Final = 512 * 2**20  # bytes of one file at most
_GLIBC: Final = re.compile(rb"release version (\d{1,3}\.\d{1,3})")
_MUSL: Final = re.compile(rb"\x00(1\.\d{1,3})\.\d{1,3}\x00")


@dataclass(frozen=True, slots=True)
class Program:
    """A dynamically linked program. ``loader``: path inside, as the program names it. ``libc``: ``glibc`` or ``musl``."""

    machine: str
    loader: str
    libc: str


def read_program(path: Path) -> Program:
    """Raises: Unsupported: no such program (a script, 32 bits, static, another machine). OSError."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            raise _strange(path, "is no 64-bit little-endian ELF program (a script that finds another one?)")
        (number,) = struct.unpack_from("<H", head, 18)
        machine = _MACHINES.get(number)
        if machine is None:
            raise _strange(
                path, f"is of machine {number}, and wheels are known for {', '.join(_MACHINES.values())}"
            )
        (offset,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        table = _part(file, offset, min(count, _HEADERS) * 56) if size == 56 else b""
        for start in range(0, len(table) - 55, 56):
            kind, _, at, _, _, length = struct.unpack_from("<IIQQQQ", table, start)
            if kind == _PT_INTERP:
                loader = _part(file, at, min(length, _LONGEST)).split(b"\0")[0].decode("utf-8", "replace")
                return Program(machine, loader, _libc(path, loader))
    raise _strange(path, "is linked statically: which wheels it can load cannot be told")


def libc_version(tree: Path, program: Program) -> str:
    """Major and minor, ``2.36``.  Raises: Unsupported: the libc is not in the tree, or does not say its version."""
    pattern = _GLIBC if program.libc == "glibc" else _MUSL
    for candidate in _libraries(tree, program):
        path = find(tree, candidate)
        if path is not None and path.is_file() and (found := search(path, pattern)):
            return found.decode()
    raise Unsupported(
        f"the image's Python needs {program.loader}, and no {program.libc} that says its version is in the image",
        hint="take a base that is complete",
    )


def search(path: Path, pattern: re.Pattern[bytes]) -> bytes | None:
    """The first group of the first match in a file.  Raises: OSError."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return None
        length = min(file.tell(), _SEARCHED)
        with mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ) as data:
            match = pattern.search(data)
            return bytes(match[1]) if match else None


def _part(file: BinaryIO, offset: int, length: int) -> bytes:
    """Bytes of a file, none where it has none."""
    if offset > file.seek(0, 2):
        return b""
    file.seek(offset)
    return file.read(length)


def _libraries(tree: Path, program: Program) -> tuple[str, ...]:
    """Where the libc may be: beside the loader, wherever that really is, or the loader itself."""
    try:
        real = resolved(tree, program.loader)
    except OSError:
        return ()
    triplet = f"{program.machine}-linux-gnu"
    return (
        f"{Path(real).parent}/libc.so.6",
        f"/lib/{triplet}/libc.so.6",
        f"/usr/lib/{triplet}/libc.so.6",
        "/lib64/libc.so.6",
        "/usr/lib64/libc.so.6",
        real,
    )


def _libc(path: Path, loader: str) -> str:
    name = loader.rsplit("/", 1)[-1]
    if name.startswith("ld-musl-"):
        return "musl"
    if name.startswith(("ld-linux", "ld64.so")):
        return "glibc"
    raise _strange(path, f"needs the loader {loader[:200]!r}, which is neither glibc's nor musl's")


def _strange(path: Path, what: str) -> Unsupported:
    return Unsupported(
        f"the image's Python, {path.name}, {what}", hint="CPython on glibc or musl is supported"
    )
