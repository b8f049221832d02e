"""Ctrl-C in the blocking client: what a call has made by then and its caller has not got does not stay."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dsec.client
from dsec.client.requests import NEVER_HAD
from dsec.client.sync import Dsec, Sandbox
from dsec.model.sandbox import State
from dsec.ports.engine import Services
from dsec.testing.harness import Harness

CLIENT = str(Path(dsec.client.__file__).parent)
FAR: int = 100  # more calls of functions than any act makes between the end of its work and its return


@contextmanager
def interrupt(number: int) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt where the interpreter would: as the client's ``number``-th function is entered after work on the loop has ended."""
    entered: list[str] = []
    over = False

    def look(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal over
        name = frame.f_code.co_name
        if event != "call" or not frame.f_code.co_filename.startswith(CLIENT):
            return None
        if over and len(entered) < number:
            entered.append(name)
            if len(entered) == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return ended if name == "wait" and not over else None

    def ended(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal over
        over = over or event == "return"
        return ended

    sys.settrace(look)
    try:
        yield entered
    finally:
        sys.settrace(None)


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
def opened(harness: Harness) -> Iterator[Dsec]:
    with Dsec(harness.connect) as dsec:
        yield dsec


def at_every_step(act: Callable[[], object]) -> Iterator[str]:
    """Interrupt the act at one function after the other, until there is none left; the names of those functions."""
    for number in range(1, FAR):
        had: object = None
        with interrupt(number) as entered:
            try:
                had = act()
            except KeyboardInterrupt:
                pass
            else:
                assert had is not None
                assert len(entered) == number - 1
                return
        yield entered[-1]
    raise AssertionError("it never came to its end")


def test_a_sandbox_that_nobody_has_is_destroyed(opened: Dsec) -> None:
    interrupted = []
    for name in at_every_step(opened.sandboxes.create):
        assert opened.sandboxes.list() == (), name
        interrupted.append(name)
    assert interrupted[0] == "outcome"
    assert "__init__" in interrupted
    assert [one.state for one in opened.sandboxes.list()] == [State.RUNNING]
    gone = opened.sandboxes.list([State.GONE])
    assert {one.reason for one in gone} == {NEVER_HAD}
    assert len(gone) == len(interrupted)


@pytest.mark.parametrize(
    "start", [lambda sb: sb.start(["sleep", "inf"]), lambda sb: sb.terminal(["sleep", "inf"])]
)
def test_a_command_that_nobody_has_is_killed(opened: Dsec, start: Callable[[Sandbox], object]) -> None:
    sandbox = opened.sandboxes.create()
    interrupted = list(at_every_step(lambda: start(sandbox)))
    assert interrupted[0] == "outcome"
    ended = [sandbox.attach(one.id).wait().signal for one in sandbox.execs()[: len(interrupted)]]
    assert ended == [9] * len(interrupted)
    assert sandbox.execs()[-1].exit is None


def test_an_engine_that_nobody_has_is_closed() -> None:
    closed = []

    async def connect() -> Services:
        services = await Harness().connect()

        async def close() -> None:
            await services.close()
            closed.append(services)

        return replace(services, close=close)

    dsec = Dsec(connect)
    interrupted = list(at_every_step(dsec.open))
    assert len(closed) == len(interrupted) > 0
    dsec.close()
    assert len(closed) == len(interrupted) + 1


def test_a_watch_that_nobody_has_is_closed(
    opened: Dsec, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def events() -> AsyncIterator[Any]:
        try:
            yield None
            await asyncio.sleep(600)
        finally:
            closed.append("closed")

    async def watch(*arguments: object, **options: object) -> AsyncIterator[Any]:
        begun = events()
        await anext(begun)
        return begun

    sandbox = opened.sandboxes.create()
    monkeypatch.setattr(opened._link.services.files, "watch", watch)
    count = 0
    for _ in at_every_step(lambda: sandbox.files.watch(".")):
        count += 1
        assert len(closed) == count
    assert count
