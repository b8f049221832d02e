"""What a build is doing, as it is shown; sizes as they are written."""

from __future__ import annotations

import io
import logging
import threading

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from dsec.cli import progress
from dsec.cli.numbers import mib
from dsec.cli.options import size_of
from dsec.cli.progress import Display, Lines, amount, shown
from dsec.errors import BadRequest
from dsec.model.images import Step


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step("x"), ""),
        (Step("x", 1_500_000, 30_500_000, "bytes"), "1.5 of 30.5 MB"),
        (Step("x", 1_500_000, 0, "bytes"), "1.5 MB"),
        (Step("x", 3, 81, "packages"), "3 of 81 packages"),
        (Step("x", 3, 0, "packages"), "3 packages"),
    ],
)
def test_how_far_it_is(step: Step, words: str) -> None:
    assert amount(step) == words


def test_who_is_quiet_is_told_nothing() -> None:
    assert shown(quiet=True) is None
    assert isinstance(shown(), Lines)  # standard error is no terminal here


def test_a_line_for_each_step(caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines()
    with caplog.at_level(logging.INFO, "dsec.progress"):
        for step in (
            Step("one", 1),
            Step("one", 2),
            Step("two\x1b[2J"),
            Step("done", over=True),
            Step("two"),
        ):
            lines(step)
    assert caplog.messages == ["one", "two\\x1b[2J", "two"]


def test_a_step_that_takes_long_is_told_unasked(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())

    def end() -> None:
        for each in set(threading.enumerate()) - before:
            each.join(10)

    lines = Lines(after=0)
    with caplog.at_level(logging.WARNING, "dsec.progress"):
        lines(Step("one\n", 1))
        end()
        lines(Step("one\n", 2))
        lines(Step("done", over=True))
        patient = Lines(after=3600)
        for step in (Step("two"), Step("three"), Step("done", over=True)):
            patient(step)
        end()
    assert caplog.messages == ["one\\n"]
    assert set(threading.enumerate()) <= before, "nothing waits any longer"


def test_a_terminal_shows_how_far_it_is_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    made: list[Bars] = []

    def bars() -> Bars:
        made.append(
            Bars(
                *Bars.get_default_columns(),
                console=Console(file=out, force_terminal=True),
                auto_refresh=False,
            )
        )
        return made[-1]

    monkeypatch.setattr(progress, "_bars", bars)
    display = Display()
    display(Step("done", over=True))
    assert not made  # nothing was built
    for step in (Step("fetching [bold]", 1, 4, "bytes"), Step("fetching [bold]", 2, 4, "bytes")):
        display(step)
    (task,) = made[0].tasks
    assert (task.description, task.completed, task.total) == ("fetching [bold]", 2, 4)
    display(Step("unpacking"))
    (task,) = made[0].tasks
    assert (task.description, task.total) == ("unpacking", None)
    display(Step("done", over=True))
    assert made[0].finished or not made[0].live.is_started
    display(Step("another"))
    assert len(made) == 2
    display(Step("done", over=True))
    assert threading.active_count() >= 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", None),
        ("0", 0),
        ("500", 500),
        ("1K", 1024),
        ("20G", 20 * 2**30),
        ("20GiB", 20 * 2**30),
        ("3mb", 3 * 2**20),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert size_of("budget", text) == size


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("256", 256),
        ("256M", 256),
        ("10G", 10240),
        ("1g", 1024),
        ("1GiB", 1024),
        ("1024K", 1),
        ("1048576B", 1),
    ],
)
def test_sizes_in_mib(text: str, found: int) -> None:
    assert mib(text) == found


@pytest.mark.parametrize("text", ["-1", "1.5G", "G", "1X", "99999999999T", "1 G", "１"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(BadRequest, match="budget"):
        size_of("budget", text)
