"""Directories that hostile commands of level `process` leave are removed, whatever they look like."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.runtimes import homes


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
    homes.remove_tree(home)
    assert not home.exists()


def test_directories_that_nobody_may_enter(home: Path) -> None:
    (home / "closed/inner").mkdir(parents=True)
    (home / "closed/file").write_bytes(b"x")
    (home / "closed/inner").chmod(0)
    (home / "closed").chmod(0)
    homes.remove_tree(home)
    assert not home.exists()


@pytest.mark.parametrize("mode", [0o500, 0])
def test_one_that_its_owner_closed(tmp_path: Path, mode: int) -> None:
    """As an ordinary user, whom modes bind."""
    home = tmp_path / "homes/one"
    (home / "tmp").mkdir(parents=True)
    (home / "home").mkdir()
    (home / "file").write_bytes(b"x")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.chdir(home.parent)  # what is above it may be closed to that user
            if os.geteuid() == 0:
                for path in (home.parent, home, *home.iterdir()):
                    os.chown(path, 4242, 4242)
                os.setgid(4242)
                os.setuid(4242)
            inside = Path(home.name)
            inside.chmod(mode)
            code = homes._removed_unused(inside)
            homes.remove_tree(inside)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not home.exists()


def test_links_are_removed_and_not_followed(home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    (home / "link").symlink_to(outside)
    (home / "d").mkdir()
    (home / "d/up").symlink_to("../../outside")
    os.mkfifo(home / "d/fifo")
    homes.remove_tree(home)
    assert not home.exists()
    assert (outside / "kept").exists()


def test_one_that_is_gone_already(home: Path) -> None:
    home.rmdir()
    homes.remove_tree(home)
    assert not home.exists()


async def _reserved(place: homes.Homes) -> SandboxId:
    """An id whose directory is there already."""
    for _ in range(200):
        sandbox = place.reserve()
        if place.path(sandbox).is_dir():
            return sandbox
        await asyncio.sleep(0.01)
    raise AssertionError("none is made ahead")


def test_homes_are_made_ahead_and_each_is_used_once(tmp_path: Path) -> None:
    asyncio.run(_use_each_once(tmp_path))


async def _use_each_once(tmp_path: Path) -> None:
    place = homes.Homes(tmp_path)
    used = [await _reserved(place) for _ in range(12)]
    assert len(set(used)) == 12
    for sandbox in used:
        home = await place.make(sandbox)
        assert {entry.name: entry.stat().st_mode & 0o7777 for entry in home.iterdir()} == {
            "tmp": 0o700,
            "home": 0o700,
        }
    asked = new_sandbox_id()
    assert (await place.make(asked)).is_dir()  # an id that was not reserved has none yet
    (place.path(used[0]) / "tmp" / "left").touch()
    (place.path(used[1]) / "home").rmdir()
    for sandbox in (*used, asked, asked):
        await place.remove(sandbox)
        assert not place.path(sandbox).exists()
    place.close()
    assert place.all() == set()


def test_promised_homes_that_nobody_uses_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "PROMISED", 3)
    asyncio.run(_use_none(tmp_path))


async def _use_none(tmp_path: Path) -> None:
    place = homes.Homes(tmp_path)
    for _ in range(20):
        await _reserved(place)
    for _ in range(1000):
        if len(place.all()) <= 3 + homes.AHEAD:
            break
        await asyncio.sleep(0.01)
    assert len(place.all()) <= 3 + homes.AHEAD
    place.close()
    assert place.all() == set()
