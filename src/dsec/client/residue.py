"""Whether two runs of one template begin alike: everything that a run can see at its start, and how it differs."""

from __future__ import annotations

import asyncio
import hashlib
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, cast

from dsec.model.ids import SandboxId
from dsec.ports.engine import FileService, Services, TreeService

# What the kernel shows, and no run has made: /proc is compared by what of it tells of the sandbox.
_KERNEL: Final = frozenset({"proc", "sys", "dev"})
# Paths, and the columns that are the same in every run: of sockets, not the kernel's numbers for them.
_SHOWN: Final = {
    "/proc/net/tcp": slice(1, 4),
    "/proc/net/tcp6": slice(1, 4),
    "/proc/net/udp": slice(1, 4),
    "/proc/net/udp6": slice(1, 4),
    "/proc/net/unix": slice(7, None),
    "/proc/self/mounts": slice(None),
}
ROOT: Final = "root"
_WRITE: Final = 4 * 2**20
TRACES: Final = (
    "for place in . /tmp /home/user /etc /var/tmp /dev/shm /root; do"
    ' [ "$(stat -c %d $place)" = "$(stat -c %d /)" ] && echo residue > $place/residue; done;'  # not in volumes
    " (sleep 1000 &) ; exit 0"
)
"""What a run may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that the second run saw otherwise than the first.

    Attributes:
        what: a path, ``env NAME`` or ``process NAME``. first, second: what each saw, "" = it was not there.
    """

    what: str
    first: str
    second: str


Seen = Mapping[str, str]


async def seen(services: Services, sandbox: SandboxId, env: bytes) -> Seen:
    """What a run can see: every file with its type, mode, owner, times and content, sockets, mounts, and the variables of its commands.

    ``env``: what ``env -0`` printed; SESSION_ID, which is new for every run, does not count.
    """
    pairs = (each.partition("=") for each in env.decode(errors="backslashreplace").split("\0") if each)
    found = {f"env {name}": value for name, _, value in pairs if name != "SESSION_ID"}
    for path, columns in _SHOWN.items():
        lines = (await _content(services.files, sandbox, path)).splitlines()
        told = (" ".join(line.split()[columns]) for line in lines)
        # Sockets without a name are those of commands that were just run.
        found[path] = "\n".join(line for line in told if line)
    listing = await services.files.list(sandbox, "/", user=ROOT)
    for entry in listing.entries:
        if entry.name not in _KERNEL:
            found.update(await _tree(services.trees, sandbox, f"/{entry.name}"))
    return found


def differences(first: Seen, second: Seen) -> tuple[Difference, ...]:
    """What is not the same, by name."""
    names = sorted(first.keys() | second.keys())
    return tuple(
        Difference(what=name, first=first.get(name, ""), second=second.get(name, ""))
        for name in names
        if first.get(name) != second.get(name)
    )


async def _content(files: FileService, sandbox: SandboxId, path: str) -> str:
    try:
        pieces = [piece async for piece in files.read(sandbox, path, user=ROOT)]
    except FileNotFoundError:
        return ""
    return b"".join(pieces).decode(errors="backslashreplace")


async def _tree(trees: TreeService, sandbox: SandboxId, path: str) -> dict[str, str]:
    """Every entry below a path, by its path."""
    with tempfile.TemporaryFile() as archive:
        held = bytearray()  # thousands of small pieces: a thread for each would take most of the time
        async for piece in trees.pack(sandbox, path, user=ROOT):
            held += piece
            if len(held) >= _WRITE:
                await asyncio.to_thread(archive.write, held)
                held = bytearray()
        await asyncio.to_thread(archive.write, held)
        return await asyncio.to_thread(_entries, archive, path)


def _entries(archive: BinaryIO, path: str) -> dict[str, str]:
    archive.seek(0)
    found = {}
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        for entry in tar:
            content = tar.extractfile(entry) if entry.isfile() else None
            digest = (
                hashlib.file_digest(cast("Any", content), "sha256").hexdigest() if content else entry.linkname
            )
            facts = (
                entry.type.decode(),
                f"{entry.mode:o}",
                entry.uid,
                entry.gid,
                entry.size,
                entry.mtime,
                digest,
            )
            name = entry.name.removeprefix("./").rstrip("/")
            found[f"{path}/{name}" if name not in ("", ".") else path] = " ".join(map(str, facts))
    return found
