"""Layers into a tree, by a child process that cannot reach outside it (:mod:`dsec.images.unpacker`)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec import errors
from dsec.errors import BadRequest, Busy, DsecError, RuntimeUnavailable, StorageFull, TooLarge
from dsec.images.tools import Check, environment, mortal, require_tool, unstoppable

MAX_BYTES: Final = 16 * 2**30
"""Of all files of an image."""
MAX_ENTRIES: Final = 1_000_000
_RATIO: Final = 200
_SMALL: Final = 256 * 2**20  # bytes that a layer may be, however small its archive
_SECONDS: Final = 1800.0
_LOOK_SECONDS: Final = 0.2
_NEVER: Final = 2**62  # ns
_REFUSALS: Final[Mapping[str, type[DsecError]]] = {
    error.code: error for error in (BadRequest, TooLarge, StorageFull)
}
_HINTS: Final[Mapping[type[DsecError], str]] = {
    BadRequest: "the archive is damaged, or somebody made it to do harm: get it from its maker again",
    TooLarge: "use a smaller image",
    StorageFull: "free space where the image store is, or run: dsec gc",
}
_CODE: Final = "import sys; sys.path.insert(0, sys.argv[1]); from dsec.images.{module} import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFile:
    """A layer's archive. ``compression``: "gzip", "zstd" or "". ``diff_id``: digest of it decompressed, "" = not known."""

    path: Path
    compression: str = ""
    diff_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """``dropped``: how many entries lost something, by what. ``skipped``: the first devices, FIFOs and sockets."""

    entries: int
    bytes: int
    dropped: Mapping[str, int]
    skipped: tuple[str, ...]


def unpack(
    tree: Path,
    layers: Sequence[LayerFile],
    *,
    max_bytes: int = MAX_BYTES,
    max_entries: int = MAX_ENTRIES,
    made_after: int = _NEVER,
    apt_sources: str | None = None,
    check: Check = unstoppable,
) -> Unpacked:
    """Apply layers, lowest first, to the empty directory ``tree`` and make it what the engine expects. Blocking; needs root.

    Args:
        made_after: ns; what is dated later gets the time of the newest entry before.
        apt_sources: for a Debian system that was built here: its /etc/apt/sources.list.
        check: called several times a second; what it raises ends the work.

    Raises:
        BadRequest: a layer is malformed or hostile; what and where is in the message.
        TooLarge: it is more than allowed.
        Busy, StorageFull, Unsupported, RuntimeUnavailable.
    """
    with ExitStack() as stack:
        jobs = [stack.enter_context(_opened(layer, max_bytes)) for layer in layers]
        job = {
            "root": str(tree),
            "layers": jobs,
            "max_bytes": max_bytes,
            "max_entries": max_entries,
            "made_after": made_after,
            "apt_sources": apt_sources,
        }
        report = run_child("unpacker", job, [int(str(each["fd"])) for each in jobs], check)
    return Unpacked(
        entries=report["entries"],
        bytes=report["bytes"],
        dropped=report["dropped"],
        skipped=tuple(report["skipped"]),
    )


@contextmanager
def _opened(layer: LayerFile, max_bytes: int) -> Iterator[dict[str, object]]:
    """What the child is told of a layer; its descriptor is open meanwhile."""
    limit = min(max_bytes, max(_SMALL, layer.path.stat().st_size * _RATIO))
    told: dict[str, object] = {"gzip": layer.compression == "gzip", "limit": limit, "diff_id": layer.diff_id}
    with layer.path.open("rb") as file:
        if layer.compression != "zstd":
            yield told | {"fd": file.fileno()}
            return
        tool = require_tool("zstd", "zstd", "the image has layers that zstd compressed")
        # Damaged input ends the stream early; the digest of the decompressed layer tells.
        with subprocess.Popen(
            mortal([tool, "--decompress", "--stdout", "--quiet", "--memory=256MB"]),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
        ) as process:
            assert process.stdout is not None
            try:
                yield told | {"fd": process.stdout.fileno()}
            finally:
                process.kill()


def run_child(module: str, job: Mapping[str, object], fds: Sequence[int], check: Check) -> dict[str, Any]:
    """What a child process reports that does a job in a root directory of its own.

    Args:
        module: of this package, with a ``main`` that does what its standard input describes.
        fds: that it inherits.

    Raises: BadRequest, TooLarge, StorageFull: what it refused. Busy, RuntimeUnavailable.
    """
    report = _report(module, job, fds, check)
    refused = report.get("error")
    if refused is not None:
        kind = _REFUSALS.get(str(report.get("code")), BadRequest)
        raise kind(f"the image cannot be unpacked: {refused}", hint=_HINTS.get(kind, ""), reason=refused)
    return report


def _report(module: str, job: Mapping[str, object], fds: Sequence[int], check: Check) -> dict[str, Any]:
    package = str(Path(errors.__file__).parents[1])
    with subprocess.Popen(
        mortal([sys.executable, "-I", "-c", _CODE.format(module=module), package]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        env=environment(),
    ) as process:
        try:
            out, said = _attended(process, json.dumps(job).encode(), check)
        finally:
            process.kill()
    try:
        report = json.loads(out)
    except ValueError:
        words = said.decode("utf-8", "replace").strip()[-500:]
        raise RuntimeUnavailable(
            f"the process that unpacks images ended with {process.returncode}: {words}",
            hint="try again",
            status=process.returncode,
        ) from None
    return dict(report)


def _attended(process: subprocess.Popen[bytes], told: bytes, check: Check) -> tuple[bytes, bytes]:
    """What it wrote to standard output and error.  Raises: Busy."""
    deadline = time.monotonic() + _SECONDS
    rest: bytes | None = told
    while True:
        try:
            return process.communicate(rest, timeout=_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            rest = None  # it keeps what it was given
            check()
        if time.monotonic() > deadline:
            raise Busy(
                f"an image was not unpacked after {_SECONDS:.0f} s", hint="try again", seconds=_SECONDS
            )
