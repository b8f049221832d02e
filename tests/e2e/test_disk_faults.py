"""A server whose disk is full goes on reading and recovers by itself; one whose records are damaged does not start, and says why."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import pytest

from dsec.testing.own_socket import ask

pytestmark = [pytest.mark.needs_root, pytest.mark.slow]

PATIENCE: Final = 60.0  # seconds
SIZE: Final = "48m"  # of a file system in memory: too small for a pool of writable layers


def cli(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DSEC_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "dsec", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@contextlib.contextmanager
def serve(home: Path) -> Iterator[subprocess.Popen[str]]:
    """A server that answers, or has ended."""
    words = [sys.executable, "-m", "dsec", "serve", "--no-http", "--pool", "0"]
    env = {**os.environ, "DSEC_HOME": str(home)}
    with subprocess.Popen(
        words, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and process.poll() is None:
                with contextlib.suppress(OSError, HTTPException):
                    if ask(home, "GET", "/health")[0] == 200:
                        break
                time.sleep(0.02)
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk that is soon full."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(path: Path) -> None:
    """Take all that is left."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def test_a_full_disk_is_said_and_over_when_there_is_room(small: Path) -> None:
    home = small / "home"
    with serve(home) as process:
        _, made = ask(home, "POST", "/v1/sandboxes", {"level": "process"})
        one = f"/v1/sandboxes/{made['id']}"
        assert ask(home, "POST", f"{one}/execs", {"argv": ["true"]})[0] == 200
        before = ask(home, "GET", f"{one}/events")[1]["items"]
        fill(small / "fill")
        writes: list[tuple[str, str, Any, dict[str, str]]] = [
            ("POST", "/v1/sandboxes", {"level": "process"}, {}),
            ("POST", "/v1/sandboxes", {"level": "process"}, {"Idempotency-Key": "one"}),
            ("POST", f"{one}/execs", {"argv": ["true"]}, {}),
            ("POST", f"{one}/execs", {"argv": ["true"], "wait": False}, {}),
            ("PUT", f"{one}/files/content?path=a", {}, {}),
            ("POST", f"{one}/files/change", {"op": "mkdir", "path": "d"}, {}),
            ("POST", f"{one}/extend", {"ttl": 600}, {}),
            ("POST", "/v1/keys", {}, {}),
            ("PUT", "/v1/projects/x", {}, {}),
        ]
        for method, path, body, headers in writes * 2:
            status, said = ask(home, method, path, body, **headers)
            assert (status, said["error"]["code"]) == (507, "storage_full"), (method, path, said)
            assert said["error"]["hint"]
        for path in ("", "/execs", "/events", "/metrics", "/files/list?path=."):
            assert ask(home, "GET", one + path)[0] == 200, path
        for path in ("/v1/sandboxes", "/v1/keys", "/v1/problems", "/health"):
            assert ask(home, "GET", path)[0] == 200
        (small / "fill").unlink()
        for method, path, body, headers in writes:
            status, said = ask(home, method, path, body, **headers)
            assert status < 300, (method, path, said)
        assert ask(home, "GET", f"{one}/events")[1]["items"][: len(before)] == before
        assert len(ask(home, "GET", "/v1/keys")[1]["items"]) == 1
        for each in ask(home, "GET", "/v1/sandboxes")[1]["items"]:
            assert ask(home, "DELETE", f"/v1/sandboxes/{each['id']}")[0] == 204
        verified = cli(home, "audit", "verify")
        assert (verified.returncode, verified.stdout) == (0, "sound\n")
    assert process.returncode == 0


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which something happened, and the records of it apart."""
    top = tmp_path_factory.mktemp("d")
    home = top / "home"
    with serve(home):
        _, made = ask(home, "POST", "/v1/sandboxes", {"level": "process"})
        for _ in range(20):
            ask(home, "POST", f"/v1/sandboxes/{made['id']}/execs", {"argv": ["true"]})
        ask(home, "POST", "/v1/keys", {})
        ask(home, "DELETE", f"/v1/sandboxes/{made['id']}")
    for name in ("journal", "control", "keys"):
        shutil.copytree(home / "engine" / name, top / "good" / name)
    return top


def _flip(path: Path, at: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        data = file.read(size)
        file.seek(at)
        file.write(bytes(each ^ 0xFF for each in data))


def _newer(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 999")
        database.commit()


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: Final[dict[str, tuple[str, Callable[[Path], object]]]] = {
    "journal, no header": ("journal/journal.db", lambda path: _flip(path, 0, 64)),
    "journal, a page": ("journal/journal.db", lambda path: _flip(path, 8192, 4096)),
    "journal, half": ("journal/journal.db", _half),
    "journal, of a newer one": ("journal/journal.db", _newer),
    "journal, not there": ("journal/journal.db", Path.unlink),
    "journal, its directory not there": ("journal", shutil.rmtree),
    "key, not there": ("keys/journal.key", Path.unlink),
    "control, a page": ("control/control.db", lambda path: _flip(path, 4096, 4096)),
    "control, another file": ("control/control.db", lambda path: path.write_bytes(b"hello" * 1000)),
    "control, not there": ("control/control.db", Path.unlink),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_damaged_is_refused_and_left_as_it_is(
    used: Path, name: str, damage: Callable[[Path], object]
) -> None:
    engine = used / "home" / "engine"
    for each in ("journal", "control", "keys"):
        shutil.rmtree(engine / each)
        shutil.copytree(used / "good" / each, engine / each)
    path = engine / name
    damage(path)
    found = path.read_bytes() if path.exists() else None
    for _ in range(1 if found else 2):  # what is not there is not made anew, either
        with serve(used / "home") as process:
            assert process.wait(PATIENCE) == 1
            assert process.stderr is not None
            said = process.stderr.read()
        assert "hint: " in said
        assert "internal error" not in said
    assert found is None or path.read_bytes() == found


def test_what_is_sound_is_taken(used: Path) -> None:
    """The control: the same home as it was."""
    engine = used / "home" / "engine"
    for each in ("journal", "control", "keys"):
        shutil.rmtree(engine / each)
        shutil.copytree(used / "good" / each, engine / each)
    with serve(used / "home") as process:
        assert process.poll() is None
        assert len(ask(used / "home", "GET", "/v1/keys")[1]["items"]) == 1
