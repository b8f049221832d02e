"""A guest keeps a command until it is told to forget it: soon, together with others, and never before it is recorded."""

from __future__ import annotations

import pytest

from dsec.errors import StorageFull
from dsec.node.told import TOLD_BYTES, TOLD_MOST
from dsec.testing.harness import Harness, until

pytestmark = pytest.mark.anyio


async def test_commands_are_forgotten_in_batches() -> None:
    harness = Harness()
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        kept = harness.runtime.sandboxes[sb.id].processes
        most = 0
        for _ in range(5 * TOLD_MOST):
            await sb.exec(["true"])
            most = max(most, len(kept))
        assert 1 < most <= 2 * TOLD_MOST
        await until(lambda: not kept)


async def test_one_with_much_output_is_forgotten_at_once() -> None:
    harness = Harness()
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        kept = harness.runtime.sandboxes[sb.id].processes
        running = await sb.start(["sleep", "60"])
        await sb.exec(["echo", "x" * TOLD_BYTES])
        await until(lambda: set(kept) == {running.id}, 1)


async def test_what_is_not_recorded_is_not_forgotten() -> None:
    harness = Harness()
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        kept = harness.runtime.sandboxes[sb.id].processes
        running = await sb.start(["sleep", "0.05"])
        harness.store.full = True
        with pytest.raises(StorageFull):
            await running.wait()
        harness.store.full = False
        await sb.exec(["true"])
        await until(lambda: set(kept) == {running.id}, 1)


async def test_after_a_lost_connection_they_are_forgotten_over_the_next() -> None:
    harness = Harness()
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        inside = harness.runtime.sandboxes[sb.id]
        await sb.exec(["true"])
        for guest in inside.guests:
            await guest.cut()
        assert inside.processes
        await sb.exec(["true"])
        await until(lambda: not inside.processes)
