"""`dsec serve` as a process: stopped, killed, started again, refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import pytest

from dsec.testing.own_socket import Unix, ask

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

PATIENCE = 60.0


@contextlib.contextmanager
def serve(home: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers, killed at the end if it has not ended by then."""
    words = [sys.executable, "-m", "dsec", "serve", "--socket-only", "--pool", "0", *options]
    env = {**os.environ, "DSEC_HOME": str(home)}
    with subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and process.poll() is None:
                with contextlib.suppress(OSError, HTTPException):
                    if ask(home, "GET", "/health")[0] == 200:
                        break
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    return process.wait(PATIENCE)


@pytest.fixture
def home(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSEC_DATABASE", database_url)
    return tmp_path / "home"


@pytest.mark.both_databases
def test_sandboxes_and_commands_outlive_a_killed_server(home: Path) -> None:
    with serve(home) as process:
        status, made = ask(home, "POST", "/v1/sandboxes", {"level": "process"})
        assert status == 201, made
        one = f"/v1/sandboxes/{made['id']}"
        body = {"command": "echo before; sleep 1; echo after; exit 3", "wait": False}
        _, started = ask(home, "POST", f"{one}/execs", body)
        process.kill()
        process.wait(PATIENCE)
    with serve(home) as process:
        assert ask(home, "GET", one)[1]["state"] == "running"
        status, result = ask(home, "GET", f"{one}/execs/{started['id']}/result?timeout=30")
        assert (status, result["exit_code"], result["stdout"]) == (200, 3, "before\nafter\n")
        assert ask(home, "DELETE", one) == (204, None)
        assert ended(process) == 0


@pytest.mark.both_databases
def test_the_same_key_makes_one_sandbox_across_a_crash(home: Path) -> None:
    key = {"Idempotency-Key": "one"}
    with serve(home) as process:
        _, made = ask(home, "POST", "/v1/sandboxes", {"level": "process"}, **key)
        process.kill()
        process.wait(PATIENCE)
    with serve(home) as process:
        _, again = ask(home, "POST", "/v1/sandboxes", {"level": "process"}, **key)
        assert again["id"] == made["id"]
        assert len(ask(home, "GET", "/v1/sandboxes")[1]["items"]) == 1
        ask(home, "DELETE", f"/v1/sandboxes/{made['id']}")
        assert ended(process) == 0


def test_a_second_server_is_refused_and_the_first_goes_on(home: Path) -> None:
    with serve(home) as first, serve(home, "--wait", "0.1") as second:
        assert second.wait(PATIENCE) == 75
        assert ask(home, "GET", "/health") == (200, {"status": "ok"})
        assert ended(first) == 0
        assert not (home / "dsec.sock").exists()


def test_a_server_that_is_started_on_purpose_takes_over_from_one_of_commands(home: Path) -> None:
    with serve(home, "--until-idle", "300") as spare:
        _, made = ask(home, "POST", "/v1/sandboxes", {"level": "process"})
        with serve(home) as process:
            assert spare.wait(PATIENCE) == 0
            assert process.stderr is not None
            assert b"taking over" in process.stderr.readline()
            until = time.monotonic() + PATIENCE
            while not (home / "dsec.sock").exists() and time.monotonic() < until:
                time.sleep(0.05)
            assert ask(home, "DELETE", f"/v1/sandboxes/{made['id']}")[0] == 204
            assert ended(process) == 0


def test_it_ends_when_nobody_needs_it(home: Path) -> None:
    with serve(home, "--until-idle", "0.5") as process:
        assert process.wait(PATIENCE) == 0


def test_a_stop_lets_what_runs_be_answered_and_the_next_one_does_not(home: Path) -> None:
    with serve(home) as process:
        _, made = ask(home, "POST", "/v1/sandboxes", {"level": "process"})
        one = f"/v1/sandboxes/{made['id']}"
        connection = Unix(home / "dsec.sock")
        body = json.dumps({"command": "touch begun; sleep 0.7; echo done"})
        connection.request("POST", f"{one}/execs", body, {"content-type": "application/json"})
        until = time.monotonic() + PATIENCE
        while ask(home, "GET", f"{one}/files/stat?path=begun")[0] != 200 and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert json.loads(connection.getresponse().read())["stdout"] == "done\n"
        connection.close()
        assert process.wait(PATIENCE) == 0
    with serve(home) as process:
        ask(home, "POST", f"{one}/execs", {"argv": ["sleep", "60"], "wait": False})
        ask(home, "DELETE", one)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) in (0, 128 + signal.SIGTERM)
    with serve(home) as process:
        assert ended(process) == 0
