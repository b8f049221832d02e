"""What every engine does, seen through the SDK. A subclass brings the fixture ``dsec``: an open ``AsyncDsec``, and ``level``.

Only `true`, `false`, `echo`, `cat` and `sleep` are run, so that fakes can pass too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.errors import BadRequest, Conflict, DsecError, NotFound, SandboxFailed, UnknownOutcome, Unsupported
from dsec.model.ids import new_exec_id, new_sandbox_id
from dsec.model.journal import Phase
from dsec.model.sandbox import Flag, Level, Limits, State


class Contract:
    """The fixture that every suite needs."""

    @pytest.fixture
    async def sb(self, dsec: AsyncDsec, level: Level) -> AsyncIterator[AsyncSandbox]:
        async with await dsec.sandboxes.create(level=level) as sandbox:
            yield sandbox


class LifecycleContract(Contract):
    """Create, look, pause, destroy."""

    async def test_a_new_sandbox_runs_and_says_what_it_is(self, sb: AsyncSandbox, level: Level) -> None:
        info = await sb.inspect()
        assert info.state is State.RUNNING
        assert info.spec.level is level
        assert info.workdir.startswith("/")
        assert info.expires_at == 0.0

    async def test_every_step_is_a_record(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level) as sb:
            await sb.exec(["true"])
        steps = [(record.act, record.phase) for record in await sb.events(limit=10_000)]
        assert steps == [
            (act, phase)
            for act in ("sandbox.create", "exec", "sandbox.destroy")
            for phase in (Phase.INTENT, Phase.RESULT)
        ]

    async def test_destroying_twice_and_at_once(self, dsec: AsyncDsec, level: Level) -> None:
        sb = await dsec.sandboxes.create(level=level)
        await asyncio.gather(*[sb.destroy() for _ in range(20)])
        await sb.destroy()
        assert (await sb.inspect()).state is State.GONE
        assert sb.id not in [info.id for info in await dsec.sandboxes.list()]
        with pytest.raises(NotFound):
            await sb.exec(["true"])

    async def test_destroy_during_an_exec_tells_it(self, dsec: AsyncDsec, level: Level) -> None:
        sb = await dsec.sandboxes.create(level=level)
        p = await sb.start(["sleep", "60"])
        waiting = asyncio.ensure_future(p.wait())
        await sb.destroy()
        with pytest.raises((UnknownOutcome, SandboxFailed)):
            await waiting

    async def test_unknown_ids(self, dsec: AsyncDsec, sb: AsyncSandbox) -> None:
        with pytest.raises(NotFound):
            await dsec.sandboxes.get(new_sandbox_id())
        with pytest.raises(BadRequest):
            await dsec.sandboxes.get("sb-1")
        with pytest.raises(NotFound):
            await sb.attach(new_exec_id())

    async def test_ttl_ends_it(self, dsec: AsyncDsec, level: Level) -> None:
        sb = await dsec.sandboxes.create(level=level, ttl=0.3)
        async with asyncio.timeout(10):
            info = await sb.wait()
        assert (info.state, info.reason) == (State.GONE, "ttl")

    async def test_pause_and_resume(self, sb: AsyncSandbox) -> None:
        if Flag.PAUSE not in sb.flags:
            with pytest.raises(Unsupported):
                await sb.pause()
            return
        p = await sb.start(["sleep", "0.4"], timeout=2.0)
        assert (await sb.pause()).state is State.PAUSED
        with pytest.raises(Conflict):
            await sb.exec(["true"])
        await asyncio.sleep(0.2)
        assert (await sb.resume()).state is State.RUNNING
        assert (await p.wait()).ok
        assert (await sb.exec(["true"])).ok

    async def test_destroying_a_paused_one(self, dsec: AsyncDsec, level: Level) -> None:
        sb = await dsec.sandboxes.create(level=level)
        if Flag.PAUSE not in sb.flags:
            await sb.destroy()
            pytest.skip("this level cannot pause")
        await sb.pause()
        await sb.destroy()
        assert (await sb.inspect()).state is State.GONE

    async def test_many_at_once(self, dsec: AsyncDsec, level: Level) -> None:
        async def life(number: int) -> None:
            async with await dsec.sandboxes.create(level=level) as sb:
                assert (await sb.exec(["echo", str(number)])).text == f"{number}\n"

        await asyncio.gather(*[life(number) for number in range(8)])
        assert await dsec.problems() == ()

    async def test_anything_at_once_gives_typed_results(self, dsec: AsyncDsec, level: Level) -> None:
        sb = await dsec.sandboxes.create(level=level)
        acts = [sb.exec(["sleep", "5"]), sb.files.write("a", b"x" * 100_000), sb.files.list(), sb.destroy()]
        outcomes = await asyncio.gather(*acts, *[sb.destroy() for _ in range(5)], return_exceptions=True)
        for outcome in outcomes:
            assert not isinstance(outcome, BaseException) or isinstance(outcome, DsecError), outcome
        assert (await sb.inspect()).state is State.GONE


class CommandContract(Contract):
    """Commands, as far as a fake can run them."""

    async def test_exit_codes_are_values(self, sb: AsyncSandbox) -> None:
        assert (await sb.exec(["true"])).exit_code == 0
        assert (await sb.exec(["false"])).exit_code == 1
        missing = await sb.exec(["no-such-program"])
        assert missing.exit_code == 127
        assert not missing.ok

    async def test_output_and_input_are_exact(self, sb: AsyncSandbox) -> None:
        every = bytes(range(256)) * 700
        result = await sb.exec(["cat"], stdin=every)
        assert result.stdout == every
        assert not result.truncated

    async def test_time_out(self, sb: AsyncSandbox) -> None:
        late = await sb.exec(["sleep", "60"], timeout=0.2)
        assert late.timed_out
        assert not late.ok
        assert (await sb.exec(["true"])).ok

    async def test_background_signal_and_attach(self, sb: AsyncSandbox) -> None:
        p = await sb.start(["sleep", "60"])
        again = await sb.attach(p.id)
        assert p.id in [info.id for info in await sb.execs() if info.exit is None]
        await p.signal(15)
        assert (await again.wait()).signal == 15
        await p.kill()
        assert p.id in [info.id for info in await sb.execs() if info.exit is not None]

    async def test_kill(self, sb: AsyncSandbox) -> None:
        p = await sb.start(["sleep", "60"])
        await p.kill()
        result = await p.wait()
        assert (result.signal, result.timed_out, result.oom) == (9, False, False)

    async def test_stdin_piece_by_piece(self, sb: AsyncSandbox) -> None:
        p = await sb.start(["cat"], stdin=True)
        await p.send_stdin(b"one ")
        await p.send_stdin(b"two")
        await p.close_stdin()
        assert b"".join([chunk.data async for chunk in p.output]) == b"one two"
        assert (await p.wait()).stdout == b"one two"

    async def test_output_beyond_the_limit_is_counted(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level, limits=Limits(output_bytes=1000)) as sb:
            result = await sb.exec(["cat"], stdin=b"x" * 300_000)
        assert result.stdout == b"x" * 1000
        assert (result.truncated, result.dropped) == (True, 299_000)

    async def test_a_caller_that_stops_waiting_ends_its_command(self, sb: AsyncSandbox) -> None:
        run = asyncio.ensure_future(sb.exec(["sleep", "60"]))
        await asyncio.sleep(0.2)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        async with asyncio.timeout(5):
            while any(info.exit is None for info in await sb.execs()):  # noqa: ASYNC110 - seen from outside only
                await asyncio.sleep(0.02)


class SmallFileContract(Contract):
    """The verbs on files."""

    async def test_write_read_list_move_remove(self, sb: AsyncSandbox) -> None:
        content = bytes(range(256)) * 4000
        entry = await sb.files.write("d/a.bin", content)
        assert entry.size == len(content)
        assert await sb.files.read("d/a.bin") == content
        assert await sb.files.read(f"{sb.info.workdir}/d/a.bin", offset=1, length=3) == b"\1\2\3"
        await sb.files.move("d/a.bin", "d/b.bin")
        assert [entry.name for entry in await sb.files.list("d")] == ["b.bin"]
        assert (await sb.files.stat("d/b.bin")).size == len(content)
        await sb.files.remove("d", recursive=True)
        assert not await sb.files.exists("d")

    async def test_append_and_exclusive(self, sb: AsyncSandbox) -> None:
        await sb.files.write("a", b"1")
        await sb.files.write("a", b"2", append=True)
        assert await sb.files.read("a") == b"12"
        with pytest.raises(DsecError):
            await sb.files.write("a", b"3", exclusive=True)
        await sb.files.write("a", b"4")
        assert await sb.files.read("a") == b"4"

    async def test_a_missing_file_is_a_missing_file(self, sb: AsyncSandbox) -> None:
        with pytest.raises(FileNotFoundError):
            await sb.files.read("nope")
        with pytest.raises(FileNotFoundError):
            await sb.files.stat("nope")
        with pytest.raises(BadRequest):
            await sb.files.read("a\0b")
        with pytest.raises(BadRequest):
            await sb.files.read("")

    async def test_streams(self, sb: AsyncSandbox) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for number in range(20):
                yield bytes([number]) * 50_000

        await sb.files.write("s", pieces())
        read = b"".join([piece async for piece in sb.files.open_read("s")])
        assert read == b"".join([bytes([number]) * 50_000 for number in range(20)])


class EngineContract(LifecycleContract, CommandContract, SmallFileContract):
    """All of it."""
