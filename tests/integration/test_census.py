"""The census must see what is left behind: each test leaves one thing, on purpose, and then takes it away."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.testing import census

CONFTEST = Path(__file__).parent.parent / "conftest.py"
PROJECT = CONFTEST.parent.parent / "pyproject.toml"


@pytest.fixture
def new(census_root: Path | None) -> Callable[[], list[str]]:
    """What is there now and was not when the test began."""
    before = census.take(census_root)
    return lambda: census.left_behind(before, census.take(census_root))


def test_sees_a_child(new: Callable[[], list[str]]) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert [line for line in new() if f"sleep[{child.pid}]" in line]
        child.kill()
    assert new() == []


def test_sees_a_daemon_of_ours(new: Callable[[], list[str]], tmp_path: Path) -> None:
    """Nobody's child, in a session of its own: known by its executable and its state directory."""
    program = tmp_path / "_native" / "spawner"
    program.parent.mkdir()
    shutil.copy2("/usr/bin/sleep", program)
    script = 'setsid "$0" 60 >/dev/null 2>&1 & echo $!'
    pid = int(subprocess.check_output(["sh", "-c", script, str(program)], cwd=tmp_path))
    try:
        assert _within(lambda: any(f"spawner[{pid}]" in line for line in new()))
    finally:
        os.kill(pid, signal.SIGKILL)
    assert _within(lambda: new() == [])


def test_sees_a_descriptor(new: Callable[[], list[str]]) -> None:
    left, right = socket.socketpair()
    with left, right:
        # What another run on this machine is just making is nobody's for a moment.
        assert _within(lambda: new() == ["descriptors: 2 more socket:[]"])
    assert _within(lambda: new() == [])


def test_sees_a_directory(new: Callable[[], list[str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = Path(os.environ["TMPDIR"]) / "dsec-left"
    directory.mkdir()
    assert new() == [f"directories: {directory}"]
    directory.rmdir()
    assert new() == []


@pytest.mark.needs_root
def test_sees_a_mount(new: Callable[[], list[str]], tmp_path: Path) -> None:
    where = tmp_path / "dsec-mount"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(where)], check=True)
    try:
        assert [line for line in new() if line.startswith(f"mounts: {where} ")]
    finally:
        subprocess.run(["umount", str(where)], check=True)
    assert new() == []


@pytest.mark.needs_root
def test_sees_a_loop_device(new: Callable[[], list[str]], tmp_path: Path) -> None:
    image = tmp_path / "dsec.img"
    image.write_bytes(bytes(2**20))
    found = subprocess.run(
        ["losetup", "-f", "--show", str(image)], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"no loop device here: {found.stderr.strip()}")
    device = found.stdout.strip()
    try:
        assert new() == [f"loops: {device} of {image}"]
    finally:
        subprocess.run(["losetup", "-d", device], check=True)
    assert _within(lambda: new() == [])


@pytest.mark.needs_root
def test_sees_a_cgroup(new: Callable[[], list[str]]) -> None:
    tops = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
    for top in tops:
        group = top / f"dsec-census-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        break
    else:
        pytest.skip("no cgroup hierarchy can be written to here")
    try:
        assert [line for line in new() if line == f"cgroups: {group.relative_to('/sys/fs/cgroup')}"]
    finally:
        group.rmdir()
    assert new() == []


def test_waits_for_what_is_deleted_in_the_background(census_root: Path | None) -> None:
    before = census.take(census_root)
    directory = Path(os.environ["TMPDIR"]) / "dsec-soon-gone"
    directory.mkdir()
    later = threading.Timer(0.2, directory.rmdir)
    later.start()
    assert census.settle(before, root=census_root) == []
    later.join()


def test_does_not_wait_for_ever(census_root: Path | None) -> None:
    before = census.take(census_root)
    with subprocess.Popen(["sleep", "60"]) as child:
        left = census.settle(before, root=census_root, seconds=0.1)
        child.kill()
    assert any("sleep" in line for line in left)


def test_a_test_that_leaves_something_fails(tmp_path: Path) -> None:
    """The fixtures are wired: the same test passes in the unit tier and fails in the integration tier."""
    leak = "import tempfile\ndef test_leaks(): tempfile.mkdtemp(prefix='dsec-x')\n"
    for tier in ("unit", "integration"):
        (tmp_path / "tests" / tier).mkdir(parents=True)
        (tmp_path / "tests" / tier / "test_leak.py").write_text(leak)
    impatient = CONFTEST.read_text().replace("SETTLE_SECONDS = 3.0", "SETTLE_SECONDS = 0.1")
    (tmp_path / "tests" / "conftest.py").write_text(impatient)
    shutil.copy2(PROJECT, tmp_path / "pyproject.toml")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit", "tests/integration"]
    env = {**os.environ, "DSEC_TEST_CENSUS": "own"}
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "left behind:" in done.stdout
    assert "dsec-x" in done.stdout
    assert "ERROR tests/integration/test_leak.py" in done.stdout
    assert "ERROR tests/unit" not in done.stdout


def _within(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
