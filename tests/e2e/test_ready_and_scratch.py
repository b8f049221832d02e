"""Sandboxes made ahead, and commands in throw-away copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import Dsec, Settings, Volume
from dsec.errors import BadRequest, Unsupported
from dsec.model.sandbox import State

pytestmark = pytest.mark.needs_root


@pytest.fixture(scope="module")
def dsec(image_store: Path) -> Iterator[Dsec]:
    with Dsec(settings=Settings(images=image_store, pool=0)) as opened:
        with opened.sandboxes.create() as sandbox:
            sandbox.exec("true")  # what an engine and its loop open once, they open now
        yield opened


def test_a_scratch_command_sees_the_files_and_changes_none(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as sandbox:
        sandbox.files.write("kept", b"1")
        sandbox.exec("rm /etc/hosts", user="root")
        seen = sandbox.exec(
            "cat kept; test -e /etc/hosts || echo gone; echo 2 > kept; rm -rf /usr/bin",
            user="root",
            scratch=True,
        )
        assert seen.stdout == b"1gone\n"
        after = sandbox.exec("cat kept; ls /usr/bin | wc -l")
        assert after.stdout.startswith(b"1")
        assert int(after.stdout[1:]) > 100


def test_a_scratch_copy_is_gone_afterwards_and_was_another_run(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as sandbox:
        inside = sandbox.exec("echo $SESSION_ID", scratch=True).text
        assert inside != sandbox.exec("echo $SESSION_ID").text
        assert [one.id for one in dsec.sandboxes.list()] == [sandbox.id]


def test_scratch_of_a_paused_sandbox_leaves_it_paused(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as sandbox:
        sandbox.files.write("a", b"1")
        sandbox.pause()
        assert sandbox.exec("cat a", scratch=True).stdout == b"1"
        assert sandbox.inspect().state is State.PAUSED


@pytest.mark.parametrize("target", ["/dev/null", "/etc/passwd", "/etc/passwd/below"])
def test_a_volume_that_does_not_fit_its_place_is_the_callers_mistake(
    dsec: Dsec, tmp_path: Path, target: str
) -> None:
    with pytest.raises(BadRequest, match="volumes: "):
        dsec.sandboxes.create(volumes=[Volume(tmp_path, target)])
    assert {one.state for one in dsec.sandboxes.list()} <= {State.FAILED}


def test_a_volume_is_read_only_in_a_copy(dsec: Dsec, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with dsec.sandboxes.create(volumes=[Volume(tmp_path, "/data")]) as sandbox:
        assert sandbox.exec("touch /data/real").exit_code == 0
        assert sandbox.exec("touch /data/copy", scratch=True).exit_code != 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["real"]


def test_level_process_has_no_copies(dsec: Dsec) -> None:
    with dsec.sandboxes.create(level="process") as sandbox, pytest.raises(Unsupported):
        sandbox.exec("true", scratch=True)


def test_a_ready_sandbox_is_claimed_once_and_is_clean(image_store: Path) -> None:
    with Dsec(settings=Settings(images=image_store, pool=2)) as dsec:
        sessions = set()
        for turn in range(6):
            with dsec.sandboxes.create() as sandbox:
                assert sandbox.exec("cat /tmp/left; echo x > /tmp/left").exit_code == 0
                assert sandbox.exec("ls /tmp").stdout == b"left\n", turn
                sessions.add(sandbox.exec("echo $SESSION_ID").text)
            time.sleep(0.05)  # let one be made ahead
        assert len(sessions) == 6
        assert {one.state for one in dsec.sandboxes.list()} <= {State.FAILED}


def test_a_ready_sandbox_has_the_ttl_of_whoever_claims_it(image_store: Path) -> None:
    with Dsec(settings=Settings(images=image_store, pool=2)) as dsec:
        dsec.sandboxes.create().destroy()
        time.sleep(0.2)
        sandbox = dsec.sandboxes.create(ttl=0.3)
        deadline = time.monotonic() + 10
        while sandbox.inspect().state is not State.GONE and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sandbox.inspect().state is State.GONE
