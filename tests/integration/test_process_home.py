"""Directories that hostile commands of level `process` leave are removed, whatever they look like."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.runtimes import process


def deep(top: Path, depth: int) -> None:
    """A directory in a directory in a directory…: too deep for one path."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


def test_deeper_than_python_recurses(home: Path) -> None:
    deep(home, 3000)
    process._remove_home(home)
    assert not home.exists()


def test_directories_that_nobody_may_enter(home: Path) -> None:
    (home / "closed/inner").mkdir(parents=True)
    (home / "closed/file").write_bytes(b"x")
    (home / "closed/inner").chmod(0)
    (home / "closed").chmod(0)
    process._remove_home(home)
    assert not home.exists()


def test_links_are_removed_and_not_followed(home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    (home / "link").symlink_to(outside)
    (home / "d").mkdir()
    (home / "d/up").symlink_to("../../outside")
    os.mkfifo(home / "d/fifo")
    process._remove_home(home)
    assert not home.exists()
    assert (outside / "kept").exists()


def test_one_that_is_gone_already(home: Path) -> None:
    home.rmdir()
    process._remove_home(home)
    assert not home.exists()
