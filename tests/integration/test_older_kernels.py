"""What is done in another way on older kernels, with the older kernel played here; `make v2` runs it all on a real one."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from dsec.errors import IsolationUnavailable
from dsec.model.health import Layer
from dsec.runtimes import probe
from dsec.runtimes.process import require_landlock
from dsec.stores import mounts
from dsec.stores.pool import open_pool


@pytest.fixture
def no_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 6.15: a mount that is attached nowhere cannot be cloned."""
    real = mounts._open_tree

    def refuse(directory: int) -> int:
        if mounts._detached(directory):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), "open_tree")
        return real(directory)

    monkeypatch.setattr(mounts, "_open_tree", refuse)


def same(first: int, second: int) -> bool:
    """The same file system, mounted with the same flags, reached by two descriptors."""
    one, two = os.fstatvfs(first), os.fstatvfs(second)
    return os.path.samestat(os.fstat(first), os.fstat(second)) and one.f_flag == two.f_flag


@pytest.mark.needs_root
@pytest.mark.usefixtures("no_clones")
def test_a_pool_is_mounted_again(tmp_path: Path) -> None:
    pool = open_pool(tmp_path, 256 * 2**20, durable=False)
    try:
        again = mounts.clone_detached(pool.mount, 0)
        assert same(pool.mount, again)
        os.close(again)
    finally:
        pool.close()
    assert pool.wait_gone()


@pytest.mark.needs_root
@pytest.mark.usefixtures("no_clones")
def test_an_image_is_mounted_by_a_loop_device_and_again(tmp_path: Path) -> None:
    source, image = tmp_path / "tree", tmp_path / "x.erofs"
    source.mkdir()
    (source / "f").write_text("content")
    subprocess.run(["mkfs.erofs", "--quiet", image, source], check=True, capture_output=True)
    first = mounts.mount_image(image)
    try:
        again = mounts.clone_detached(first, 0)
        assert same(first, again)
        assert os.major(os.fstat(first).st_dev) == 7, "not on a loop device"
        assert Path(f"/proc/self/fd/{again}/f").read_text() == "content"
        os.close(again)
    finally:
        os.close(first)


@pytest.mark.needs_root
def test_a_refusal_for_another_reason_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), "open_tree")

    monkeypatch.setattr(mounts, "_open_tree", refuse)
    directory = os.open(tmp_path, os.O_PATH)
    try:
        with pytest.raises(OSError, match="open_tree"):
            mounts.clone_detached(directory, 0)
    finally:
        os.close(directory)


@pytest.mark.parametrize("version", [0, 1, 5])
def test_level_process_needs_signal_scopes(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Layer = probe.judge_landlock(version, errno.EOPNOTSUPP)
    monkeypatch.setattr(probe, "landlock", lambda: found)
    with pytest.raises(IsolationUnavailable, match="Landlock"):
        require_landlock()


def test_level_process_with_signal_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe.judge_landlock(6, 0)
    monkeypatch.setattr(probe, "landlock", lambda: found)
    require_landlock()
