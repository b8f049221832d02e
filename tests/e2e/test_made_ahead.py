"""What the spawner makes ahead is killed, or stops, at the worst moment: creating a sandbox works all the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dsec import Dsec, Settings
from dsec.model.sandbox import Level

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(60)]
LEVELS = pytest.mark.parametrize("level", list(Level))


@pytest.fixture
def dsec(image_store: Path) -> Iterator[Dsec]:
    with Dsec(settings=Settings(images=image_store, pool=0, wait=20)) as opened:
        yield opened


def _children(pid: int, *names: str) -> list[int]:
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return [child for child in found if _name(child) in names]


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _spawner(level: Level) -> int:
    level_of = f"--level\0{level}\0".encode()
    (found,) = (
        pid
        for pid in _children(os.getpid(), "spawner")
        if level_of in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return found


def _until_there(dsec: Dsec, level: Level, name: str) -> list[int]:
    """Sandboxes are made meanwhile: nothing is made ahead where nobody makes any."""
    deadline = time.monotonic() + 20
    while not (found := _children(_spawner(level), name)):
        assert time.monotonic() < deadline, f"no {name} was made"
        assert _works(dsec, level)
        time.sleep(0.1)
    return found


def _works(dsec: Dsec, level: Level) -> bool:
    with dsec.sandboxes.create(level=level) as sandbox:
        return sandbox.exec(["/bin/true"], timeout=20).ok


def _use(dsec: Dsec, level: Level, into: list[bool]) -> None:
    into.append(_works(dsec, level))


@LEVELS
def test_one_that_is_killed_as_it_is_given_a_sandbox_fails_nobody(dsec: Dsec, level: Level) -> None:
    assert _works(dsec, level)
    spawner = _spawner(level)
    for _ in range(5):
        seeds = _until_there(dsec, level, "dsec-seed")
        os.kill(spawner, signal.SIGSTOP)  # it learns of the request and of the deaths at once
        created: list[bool] = []
        user = threading.Thread(target=_use, args=(dsec, level, created))
        user.start()
        time.sleep(0.02)
        for seed in seeds:
            os.kill(seed, signal.SIGKILL)
        os.kill(spawner, signal.SIGCONT)
        user.join(30)
        assert created == [True]


@LEVELS
@pytest.mark.parametrize("name", ["dsec-zygote", "dsec-seed"])
def test_those_that_stop_are_done_without(dsec: Dsec, level: Level, name: str) -> None:
    assert _works(dsec, level)
    stopped = _until_there(dsec, level, name)
    for one in stopped:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
    try:
        assert all(_works(dsec, level) for _ in range(12))
    finally:
        for one in stopped:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)
    assert _works(dsec, level)


def test_a_spawner_that_waits_for_a_zygote_hears_others(dsec: Dsec) -> None:
    """Orders to a zygote that does not answer block nobody, and it is replaced."""
    assert _works(dsec, Level.CONTAINER)
    first = _until_there(dsec, Level.CONTAINER, "dsec-zygote")
    for zygote in first:
        os.kill(zygote, signal.SIGSTOP)
    assert all(_works(dsec, Level.CONTAINER) for _ in range(6))
    deadline = time.monotonic() + 20
    while all(_state(zygote) == "T" for zygote in first):  # those that nothing is asked of stay as they are
        assert time.monotonic() < deadline, "a zygote that does not answer is kept"
        assert _works(dsec, Level.CONTAINER)
        time.sleep(0.1)
