"""Judging what was found of the layers of isolation."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dsec.model.health import Status
from dsec.runtimes import probe


@pytest.mark.parametrize(
    ("version", "code", "status", "words"),
    [
        (0, errno.ENOSYS, Status.UNAVAILABLE, "has none"),
        (0, errno.EOPNOTSUPP, Status.UNAVAILABLE, "switched off"),
        (3, 0, Status.DEGRADED, "without TCP ports, device ioctls, signals"),
        (6, 0, Status.ACTIVE, "signals and abstract sockets"),
        (9, 0, Status.ACTIVE, "ABI 9"),
    ],
)
def test_landlock(version: int, code: int, status: Status, words: str) -> None:
    found = probe.judge_landlock(version, code)
    assert found.status is status
    assert words in found.detail
    assert bool(found.hint) == (status is not Status.ACTIVE)


def test_seccomp() -> None:
    assert probe.judge_seccomp("kill_process kill_thread errno allow\n").status is Status.ACTIVE
    assert probe.judge_seccomp("").status is Status.UNAVAILABLE


def test_oom_protection() -> None:
    have = f"Name:\tx\nCapEff:\t{1 << 24:016x}\n"
    assert probe.judge_oom_protection(have).status is Status.ACTIVE
    assert (
        probe.judge_oom_protection(f"CapEff:\t{(1 << 41) - 1 - (1 << 24):016x}\n").status is Status.DEGRADED
    )
    assert probe.judge_oom_protection("").status is Status.DEGRADED


def _statuses(v1: dict[str, Path], v2: Path | None, have: frozenset[str], writable: bool) -> list[Status]:
    return [one.status for one in probe.judge_cgroups(v1, v2, have, lambda _: writable)]


def test_control_groups() -> None:
    active, none = Status.ACTIVE, Status.UNAVAILABLE
    v1 = {name: Path(f"/v1/{name}") for name in ("memory", "pids", "cpu")}
    assert _statuses(v1, Path("/v2"), frozenset(), True) == [active] * 4
    assert _statuses(v1, None, frozenset(), True) == [active] * 3 + [none]
    assert _statuses({}, Path("/v2"), frozenset({"memory", "pids"}), True) == [active, active, none, active]
    assert _statuses({}, None, frozenset(), True) == [none] * 4
    assert _statuses(v1, Path("/v2"), frozenset(), False) == [none] * 4


def test_a_trial_in_a_child_tells_what_failed() -> None:
    def fails() -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), "/x")

    assert probe.in_child(lambda: None) == ""
    assert "Operation not permitted" in probe.in_child(fails)
    assert probe.in_child(lambda: os.kill(os.getpid(), 9)) == "ended by SIGKILL"


def test_every_layer_that_is_not_active_says_why() -> None:
    layers = probe.kernel_layers()
    assert len({one.name for one in layers}) == len(layers)
    for one in layers:
        assert one.status is Status.ACTIVE or (one.detail and one.hint), one
