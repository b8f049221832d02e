"""From nothing to a command in Debian with Python: our base `debian:bookworm`, beside mmdebstrap, `podman import` and `podman run`.

Both sides install the same packages with the same mmdebstrap from the same mirror. Podman keeps its images below a directory of its own; it
runs without a network, in a mount namespace that shows the tree of cgroups that its runtime understands.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns

from benchmarks.common import Findings, Script, main
from benchmarks.figures import milliseconds, quantile, ratio
from benchmarks.peers import HIDDEN, PeerFailedError
from dsec import Dsec, Settings

SUITE = "bookworm"
PROGRAM = ["/usr/bin/python3", "-c", "print('hi')"]
IMAGE = "localhost/dsec-bench:latest"
PODMAN = "/usr/bin/podman"
ULIMITS = (
    "--ulimit=nofile=1024:1024",
    "--ulimit=nproc=1000:1000",
)  # its own are more than a machine may allow
MIB = 2**20
_HIDE = f'[ -d {HIDDEN} ] && umount {HIDDEN}; exec "$@"'


@dataclass(slots=True)
class Times:
    """Nanoseconds of each step, of as many runs."""

    image: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    def whole(self) -> list[int]:
        """From nothing to the end of the first command."""
        return [one + other for one, other in zip(self.image, self.first, strict=True)]


def _ours(times: Times) -> None:
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as place:
        settings = Settings(pool=0, images=Path(place) / "store", pool_bytes=512 * MIB)
        document = f"name: debian\nversion: 1\nruntime: {{base: 'debian:{SUITE}'}}\n".encode()
        with Dsec(settings=settings) as dsec:
            begun = perf_counter_ns()
            dsec.templates.build(document)
            times.image.append(perf_counter_ns() - begun)
            for taken in (times.first, times.next):
                begun = perf_counter_ns()
                with dsec.sandboxes.create("debian") as sandbox:
                    assert sandbox.exec(PROGRAM).stdout == b"hi\n"
                taken.append(perf_counter_ns() - begun)


def _podman(times: Times) -> None:
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as place:
        store = Path(place) / "podman"
        tool = [PODMAN, "--root", f"{store}/root", "--runroot", f"{store}/run", "--cgroup-manager=cgroupfs"]
        try:
            begun = perf_counter_ns()
            archive = f"{place}/debian.tar"
            _run(
                [
                    "mmdebstrap",
                    "--quiet",
                    "--variant=minbase",
                    "--include=ca-certificates,python3",
                    SUITE,
                    archive,
                ]
            )
            _run([*tool, "import", "--quiet", archive, IMAGE])
            times.image.append(perf_counter_ns() - begun)
            for taken in (times.first, times.next):
                begun = perf_counter_ns()
                _run(
                    [
                        *tool,
                        "run",
                        "--rm",
                        "--network=none",
                        "--cgroups=disabled",
                        *ULIMITS,
                        IMAGE,
                        *PROGRAM,
                    ]
                )
                taken.append(perf_counter_ns() - begun)
        finally:
            subprocess.run(
                [*_hidden(tool), "system", "reset", "--force"], capture_output=True, check=False, timeout=60
            )
            shutil.rmtree(store, ignore_errors=True)


def _hidden(argv: Sequence[str]) -> list[str]:
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", _HIDE, "sh", *argv]


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(_hidden(argv), capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise PeerFailedError(
            f"{' '.join(argv[:3])}: exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        )


def measure(options: argparse.Namespace) -> Findings:
    """Each side in turn."""
    ours, theirs = Times(), Times()
    unavailable = {} if os.access(PODMAN, os.X_OK) else {"podman": f"{PODMAN} is not installed"}
    for _ in range(options.n):
        _ours(ours)
        if not unavailable:
            try:
                _podman(theirs)
            except PeerFailedError as error:
                unavailable["podman"] = str(error)
    lines = [
        milliseconds("image: mmdebstrap, digest, EROFS", ours.image),
        milliseconds("first sandbox and command", ours.first),
        milliseconds("next sandbox and command", ours.next),
    ]
    figures = {"debian_s": quantile(ours.whole(), 0.5) / 1e9}
    if not unavailable:
        lines += [
            milliseconds("mmdebstrap, podman import", theirs.image, peer=True),
            milliseconds("podman run, first", theirs.first, peer=True),
            milliseconds("podman run, next", theirs.next, peer=True),
        ]
        figures["podman_s"] = quantile(theirs.whole(), 0.5) / 1e9
        figures["podman_ratio"] = ratio(figures["debian_s"], figures["podman_s"])
    return Findings(samples=options.n, series=tuple(lines), figures=figures, unavailable=unavailable)


SCRIPT = Script(
    name="bases",
    claim="Debian with Python, from its packages to a command in a sandbox",
    n=3,
    n_help="times that each side begins with nothing",
    measure=measure,
)

if __name__ == "__main__":
    main(SCRIPT)
