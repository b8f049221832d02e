"""Large files into and out of a sandbox, and large output: speed, extra memory, exactness.

Each round of files, each output and each peer has a fresh process; the engine is part of it. Extra memory is its peak during
one way, less what it held before the first. Contents are checked by hash outside of what is timed. The peers are pipes
into and out of ``cat`` in bwrap, with pieces of the same size. The sandbox has the default limits but for its disk: what
does not fit into its memory goes to the machine's disk while it is timed, and a peer's stays in the page cache.
1 GiB a hundred times would take hours: ``--n`` is small here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from benchmarks.common import ROOT, Findings, Script, main
from benchmarks.figures import Series, ratio, series
from benchmarks.lifecycles import engine
from benchmarks.peers import BWRAP_TRUE, ENVIRONMENT, bwrap_problem
from benchmarks.processes import MIB, forget_peak, status_mib
from dsec import Limits
from dsec.client.sync import Sandbox

PIECE: Final = MIB
OUTPUT_BYTES: Final = 128 * 10**6  # of standard output an exec may keep
INSIDE: Final = "/workspace/blob"
PATIENCE: Final = 120.0  # seconds for one process; what takes longer is told as failed
UNREAD: Final = ""  # instead of a digest: the next way reads what this one wrote
FILES: Final = {
    "write": "write, from an iterator",
    "read": "read, as an iterator",
    "upload": "upload, from a local file",
    "download": "download, to a local file",
}
OUTPUTS: Final = {"exec_stdout": "stdout, as the result of exec", "stream_stdout": "stdout, streamed"}
PEERS: Final = {
    "bwrap_write": "bwrap cat > file, from a pipe",
    "bwrap_read": "bwrap cat file, to a pipe",
}
OUTPUT_PEERS: Final = {"bwrap_stdout": "bwrap cat file, to a pipe, collected"}


def _pieces(source: Path) -> Iterator[bytes]:
    """A file piece by piece, read into memory as it goes."""
    with source.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            yield piece


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# What is measured: each returns nanoseconds and the digest of what arrived. The ways that move files go in the order
# of FILES through one sandbox: what one has written the next reads, and so the second checks both.


def _write(sandbox: Sandbox, source: Path, target: Path) -> tuple[int, str]:
    del target
    begun = perf_counter_ns()
    sandbox.files.write(INSIDE, _pieces(source))
    return perf_counter_ns() - begun, UNREAD


def _read(sandbox: Sandbox, source: Path, target: Path) -> tuple[int, str]:
    del target
    begun = perf_counter_ns()
    size = sum(len(piece) for piece in sandbox.files.open_read(INSIDE))
    took = perf_counter_ns() - begun
    digest = hashlib.sha256()
    for piece in sandbox.files.open_read(INSIDE):
        digest.update(piece)
    sandbox.files.remove(INSIDE)
    return took, digest.hexdigest() if size == source.stat().st_size else f"{size} bytes"


def _upload(sandbox: Sandbox, source: Path, target: Path) -> tuple[int, str]:
    del target
    begun = perf_counter_ns()
    sandbox.files.upload(source, INSIDE)
    return perf_counter_ns() - begun, UNREAD


def _download(sandbox: Sandbox, source: Path, target: Path) -> tuple[int, str]:
    del source
    begun = perf_counter_ns()
    sandbox.files.download(INSIDE, target)
    return perf_counter_ns() - begun, _digest(target)


def _exec_stdout(sandbox: Sandbox, source: Path, target: Path) -> tuple[int, str]:
    del source, target
    begun = perf_counter_ns()
    result = sandbox.exec(["cat", INSIDE])
    return perf_counter_ns() - begun, hashlib.sha256(result.stdout).hexdigest()


def _stream_stdout(sandbox: Sandbox, source: Path, target: Path) -> tuple[int, str]:
    del source, target
    begun = perf_counter_ns()
    pieces = [chunk.data for chunk in sandbox.start(["cat", INSIDE]).output]
    took = perf_counter_ns() - begun
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return took, digest.hexdigest()


def _bwrap(script: str, target: Path) -> list[str]:
    return [*BWRAP_TRUE[:-1], "--bind", str(target.parent), str(target.parent), "/bin/sh", "-c", script]


def _bwrap_write(source: Path, target: Path) -> tuple[int, str]:
    begun = perf_counter_ns()
    with subprocess.Popen(_bwrap(f"cat > {target}", target), stdin=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        for piece in _pieces(source):
            _push(process.stdin.fileno(), piece)
    return perf_counter_ns() - begun, _digest(target)


def _push(fd: int, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _bwrap_read(source: Path, target: Path) -> tuple[int, str]:
    begun = perf_counter_ns()
    with _catting(source, target) as process:
        assert process.stdout is not None
        size = 0
        while piece := os.read(process.stdout.fileno(), PIECE):
            size += len(piece)
    return perf_counter_ns() - begun, _digest(source) if size == source.stat().st_size else f"{size} bytes"


def _bwrap_stdout(source: Path, target: Path) -> tuple[int, str]:
    begun = perf_counter_ns()
    with _catting(source, target) as process:
        assert process.stdout is not None
        pieces = []
        while piece := os.read(process.stdout.fileno(), PIECE):
            pieces.append(piece)
        whole = b"".join(pieces)
    return perf_counter_ns() - begun, hashlib.sha256(whole).hexdigest()


def _catting(source: Path, target: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return subprocess.Popen(
        _bwrap(f"cat {source}", target), stdout=subprocess.PIPE, bufsize=0, env=ENVIRONMENT
    )


Inside = Callable[[Sandbox, Path, Path], tuple[int, str]]
OURS: Final[dict[str, Inside]] = {
    "write": _write,
    "read": _read,
    "upload": _upload,
    "download": _download,
    "exec_stdout": _exec_stdout,
    "stream_stdout": _stream_stdout,
}
THEIRS: Final[dict[str, Callable[[Path, Path], tuple[int, str]]]] = {
    "bwrap_write": _bwrap_write,
    "bwrap_read": _bwrap_read,
    "bwrap_stdout": _bwrap_stdout,
}


@dataclass(frozen=True, slots=True)
class Moved:
    """One measurement."""

    way: str
    ns: int
    digest: str
    extra_mib: float


def part(ways: Sequence[str], source: Path, target: Path) -> list[Moved]:
    """Some ways in turn, in this process."""
    if ways[0] in THEIRS:
        before = forget_peak()
        return [_timed(way, partial(THEIRS[way], source, target), before) for way in ways]
    size_mib = source.stat().st_size // MIB
    limits = Limits(disk_mib=size_mib * 2 + 64, output_bytes=OUTPUT_BYTES)
    with engine() as dsec, dsec.sandboxes.create(level="container", limits=limits) as sandbox:
        if ways[0] in OUTPUTS:
            sandbox.files.upload(source, INSIDE)
        sandbox.exec(["true"])
        before = forget_peak()
        return [_timed(way, partial(OURS[way], sandbox, source, target), before) for way in ways]


def _timed(way: str, move: Callable[[], tuple[int, str]], before: float) -> Moved:
    """Once what others wrote is on the disk: nobody's writing is timed with somebody else's."""
    os.sync()
    forget_peak()
    took, digest = move()
    return Moved(way, took, digest, status_mib("self", "VmHWM") - before)


class Subject:
    """The local files, and what was measured with them."""

    def __init__(self, directory: Path, size: int) -> None:
        self.source = directory / "source"
        self.target = directory / "target"
        self.size = size
        self.speeds: dict[str, list[float]] = {}
        self.extra: dict[str, list[float]] = {}
        self.wrong: dict[str, str] = {}
        _fill(self.source, size)
        self._digest = _digest(self.source)

    def measure_each(self, ways: Iterable[str]) -> None:
        """Each once, in a fresh process of its own."""
        for way in ways:
            self.measure([way])

    def measure(self, ways: Sequence[str]) -> None:
        """Each once, in turn, in a fresh process."""
        arguments = ["--part", ",".join(ways), str(self.source), str(self.target)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.transfer", *arguments],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            self.wrong.update(dict.fromkeys(ways, f"not done after {PATIENCE:g} s"))
            return
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().splitlines() or ["it failed"]
            self.wrong.update(dict.fromkeys(ways, said[-1]))
            return
        finally:
            self.target.unlink(missing_ok=True)
        for moved in (Moved(**each) for each in json.loads(done.stdout)):
            if moved.digest not in (self._digest, UNREAD):
                self.wrong[moved.way] = f"what arrived differs: {moved.digest}"
            self.speeds.setdefault(moved.way, []).append(self.size / 1e6 / (moved.ns / 1e9))
            self.extra.setdefault(moved.way, []).append(moved.extra_mib)

    def lines(self, names: dict[str, str], *, peer: bool = False) -> list[Series]:
        """Speed and extra memory of each."""
        found = []
        for name, what in names.items():
            if name in self.speeds:
                found.append(series(what, self.speeds[name], unit="MB/s", peer=peer))
                found.append(series("  extra memory", self.extra[name], unit="MiB", peer=peer))
        return found

    def p50(self, name: str) -> float:
        """Speed, MB/s; 0 when it was not measured."""
        return series(name, self.speeds[name]).p50 if name in self.speeds else 0.0


def _fill(path: Path, size: int) -> None:
    """Bytes that cannot be compressed or shared."""
    with path.open("wb") as file:
        for begin in range(0, size, PIECE):
            file.write(os.urandom(min(PIECE, size - begin)))


def measure(options: argparse.Namespace) -> Findings:
    """Files, then output; ours and the peers in turn."""
    problem = bwrap_problem()
    directory = Path(tempfile.mkdtemp(prefix="dsec-bench-files-", dir=options.directory))
    try:
        files = Subject(directory, options.mib * MIB)
        for _ in range(options.n):
            files.measure(list(FILES))
            files.measure_each([] if problem else PEERS)
        output = Subject(directory, options.stdout_mb * 10**6)
        for _ in range(options.n):
            output.measure_each(OUTPUTS)
            output.measure_each([] if problem else OUTPUT_PEERS)
    finally:
        shutil.rmtree(directory)
    unavailable = {**files.wrong, **output.wrong} | ({"bwrap": problem} if problem else {})
    lines = [*files.lines(FILES), *output.lines(OUTPUTS)]
    peers = [*files.lines(PEERS, peer=True), *output.lines(OUTPUT_PEERS, peer=True)]
    return Findings(
        samples=options.n,
        series=(*lines, *peers),
        figures=_figures(files, output),
        unavailable=unavailable,
    )


def _figures(files: Subject, output: Subject) -> dict[str, float]:
    """A bar must hold for the slowest way, and for the largest memory of all measurements."""
    figures = {f"{name}_mb_s": files.p50(name) for name in FILES}
    figures |= {f"{name}_mb_s": output.p50(name) for name in OUTPUTS}
    figures["file_slowest_mb_s"] = min(files.p50(name) for name in FILES)
    figures["file_size_mib"] = files.size / MIB
    extras = [value for name in FILES for value in files.extra.get(name, [])]
    if extras:
        figures["file_extra_mib"] = max(extras)
    figures["stdout_size_mb"] = output.size / 1e6
    figures["stdout_slowest_mb_s"] = min(output.p50(name) for name in OUTPUTS)
    figures["exact"] = float(not any(name in OURS for name in (*files.wrong, *output.wrong)))
    for ours, theirs, subject in (
        ("write", "bwrap_write", files),
        ("read", "bwrap_read", files),
        ("exec_stdout", "bwrap_stdout", output),
    ):
        if subject.p50(theirs):
            figures[f"{ours}_ratio_bwrap"] = ratio(subject.p50(ours), subject.p50(theirs))
    return figures


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=1024, help="size of the files in MiB (default 1024)")
    parser.add_argument(
        "--stdout-mb",
        type=int,
        default=100,
        help="size of the standard output in MB (default 100, at most 128)",
    )
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the local files are (default: the temporary one)"
    )


SCRIPT = Script(
    name="transfer",
    claim="large files to and from a sandbox, 100 MB of standard output to the SDK",
    n=3,
    measure=measure,
    options=_options,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        moved = part(sys.argv[2].split(","), Path(sys.argv[3]), Path(sys.argv[4]))
        print(json.dumps([asdict(each) for each in moved]))
    else:
        main(SCRIPT)
