"""Commands over fakes: outcomes, output, whoever still waits."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
from collections.abc import AsyncIterator

import pytest

from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.errors import (
    BadRequest,
    Conflict,
    DsecError,
    NotFound,
    RuntimeUnavailable,
    StorageFull,
    TooLarge,
    UnknownOutcome,
)
from dsec.model.execs import Chunk, Command, Stream
from dsec.model.ids import SandboxId, new_exec_id
from dsec.model.journal import Draft
from dsec.model.sandbox import Limits
from dsec.node.output import WINDOW_BYTES, Output
from dsec.ports.guest import Guest, GuestExec
from dsec.ports.journal import Receipt
from dsec.testing.fakes import FakeRuntime, Scripted, ordinary
from dsec.testing.harness import Harness, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
async def dsec(harness: Harness) -> AsyncIterator[AsyncDsec]:
    async with harness.open() as opened:
        yield opened


@pytest.fixture
async def sb(dsec: AsyncDsec) -> AsyncSandbox:
    return await dsec.sandboxes.create(env={"FROM": "spec"})


async def held() -> AsyncIterator[bytes]:
    """Standard input that neither says anything nor ends."""
    await asyncio.sleep(60)
    yield b""


async def until_running(sb: AsyncSandbox) -> None:
    async with asyncio.timeout(3):
        while not await sb.execs():  # noqa: ASYNC110 - seen from outside only
            await asyncio.sleep(0.005)


async def test_a_string_is_for_a_shell(harness: Harness) -> None:
    seen: list[Command] = []

    def script(command: Command) -> Scripted:
        seen.append(command)
        return Scripted()

    harness.runtime.script = script
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        await sb.exec("echo $HOME", cwd="sub", env={"A": "b"}, timeout=2.5)
        await sb.exec(["x", b"\xff"], user="root", cwd="/etc")
    shell, root = seen
    assert list(shell.argv) == [b"/bin/sh", b"-c", b"echo $HOME"]
    assert (shell.uid, shell.gid, shell.cwd, shell.timeout) == (1000, 1000, "/workspace/sub", 2.5)
    assert shell.env["HOME"] == "/home/user"
    assert shell.env["A"] == "b"
    assert list(root.argv) == [b"x", b"\xff"]
    assert (root.uid, root.cwd, root.env["HOME"], root.env["USER"]) == (0, "/etc", "/root", "root")


async def test_variables(sb: AsyncSandbox) -> None:
    text = (await sb.exec(["env"], env={"LANG": "C", "NEW": "1"})).text
    env = dict(line.split("=", 1) for line in text.splitlines())
    assert env["FROM"] == "spec"
    assert env["LANG"] == "C"
    assert env["NEW"] == "1"
    assert env["SESSION_ID"] == sb.info.session_id


async def test_outcomes(sb: AsyncSandbox) -> None:
    assert (await sb.exec(["false"])).exit_code == 1
    assert (await sb.exec(["nope"])).exit_code == 127
    late = await sb.exec(["sleep", "60"], timeout=0.05)
    assert late.timed_out
    assert not late.ok
    assert (await sb.exec(["true"])).ok


async def test_what_could_not_be_started_says_why(sb: AsyncSandbox) -> None:
    result = await sb.exec(["nope"])
    assert (result.exit_code, result.start_errno) == (127, errno.ENOENT)
    past = await (await sb.attach(result.id)).wait()
    assert (past.exit_code, past.start_errno) == (127, errno.ENOENT)


async def test_oom_is_said_of_the_command_that_suffered_it(sb: AsyncSandbox) -> None:
    assert (await sb.exec(["oom"])).oom
    p = await sb.start(["sleep", "60"])
    await p.signal(9)
    result = await p.wait()
    assert (result.signal, result.oom) == (9, False)


async def test_standard_input(sb: AsyncSandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"a" * 100_000, b"b", b""):
            yield piece

    assert (await sb.exec(["cat"], stdin=b"abc")).stdout == b"abc"
    assert (await sb.exec(["cat"], stdin=b"")).stdout == b""
    assert (await sb.exec(["cat"], stdin=pieces())).stdout == b"a" * 100_000 + b"b"
    assert (await sb.exec(["cat"], stdin=[b"x", b"y"])).stdout == b"xy"


async def test_standard_input_is_recorded_by_digest(harness: Harness, sb: AsyncSandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"secret"

    await sb.exec(["cat"], stdin=b"secret")
    await sb.exec(["cat"], stdin=pieces())
    digest = "sha256:" + hashlib.sha256(b"secret").hexdigest()
    records = [record.payload for record in await harness.store.read(sb.id)]
    assert sum(payload.get("stdin") == digest for payload in records) == 2
    assert "secret" not in str(records)


async def test_a_source_of_stdin_that_fails_ends_stdin_only(sb: AsyncSandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        raise OSError("gone")

    assert (await sb.exec(["cat"], stdin=pieces())).stdout == b"a"


async def test_stdin_piece_by_piece(sb: AsyncSandbox) -> None:
    p = await sb.start(["cat"], stdin=True)
    await p.send_stdin(b"one ")
    await p.send_stdin(b"two")
    await p.close_stdin()
    assert (await p.wait()).stdout == b"one two"
    q = await sb.start(["true"])
    with pytest.raises(Conflict, match="stdin"):
        await q.send_stdin(b"x")


async def test_background_is_recorded_though_nobody_waits(harness: Harness, sb: AsyncSandbox) -> None:
    await sb.start(["echo", "x"])
    await until(lambda: not harness.engine.kit.table.find(sb.id).runs)  # type: ignore[union-attr]
    assert "exec:result:ok" in await harness.acts(sb.id)


async def test_one_that_is_just_ending_can_be_attached_to(sb: AsyncSandbox) -> None:
    for _ in range(20):
        p = await sb.start(["echo", "hello"])
        said = b"".join([chunk.data async for chunk in p.output])
        again = await sb.attach(p.id)  # whoever read its output to the end is the first to know
        assert b"".join([chunk.data async for chunk in again.output]) == said != b""


async def test_attach_by_id_and_offset(sb: AsyncSandbox) -> None:
    p = await sb.start(["echo", "hello"])
    await p.wait()
    again = await sb.attach(p.id, stdout=2)
    assert [chunk async for chunk in again.output] == [Chunk(Stream.STDOUT, 2, b"llo\n")]
    assert (await again.wait()).stdout == b"hello\n"
    with pytest.raises(NotFound):
        await sb.attach(new_exec_id())
    with pytest.raises(BadRequest):
        await sb.attach("ex-1")


async def test_a_foreground_command_is_known_by_its_record(sb: AsyncSandbox) -> None:
    result = await sb.exec(["false"])
    past = await sb.attach(result.id)
    assert (await past.wait()).exit_code == 1
    assert [info.argv for info in await sb.execs()] == [("false",)]


async def test_a_caller_that_vanishes_takes_its_command_along(harness: Harness, sb: AsyncSandbox) -> None:
    run = asyncio.ensure_future(sb.exec(["sleep", "60"]))
    processes = harness.runtime.sandboxes[sb.id].processes
    await until(lambda: processes)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(lambda: not processes)
    (info,) = await sb.execs()
    assert info.exit is not None
    assert info.exit.signal == 9


@pytest.mark.parametrize("phase", ["intent", "result"])
async def test_a_caller_that_vanishes_while_its_record_is_stored(
    harness: Harness, sb: AsyncSandbox, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """What was asked of the journal is done; the command is started only with its intent stored, and has one result."""
    append, holding = harness.store.append, asyncio.Event()

    async def slow(*drafts: Draft) -> tuple[Receipt, ...]:
        if drafts[0].act == "exec" and drafts[0].phase == phase:
            holding.set()
            return await asyncio.shield(asyncio.ensure_future(later(drafts)))
        return await append(*drafts)

    async def later(drafts: tuple[Draft, ...]) -> tuple[Receipt, ...]:
        await asyncio.sleep(0.1)
        return await append(*drafts)

    monkeypatch.setattr(harness.store, "append", slow)
    run = asyncio.ensure_future(sb.exec(["true"]))
    await holding.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    handle = harness.engine.kit.table.find(sb.id)
    assert handle is not None
    await until(lambda: not handle.runs)
    assert handle.busy == 0
    await asyncio.sleep(0.2)
    acts = [act for act in await harness.acts(sb.id) if act.startswith("exec")]
    if phase == "intent":
        assert sorted(acts) == ["exec:intent", "exec:result:conflict"]
        assert not harness.runtime.sandboxes[sb.id].used
    else:
        assert acts == ["exec:intent", "exec:result:ok"]


async def test_a_foreground_command_ends_with_its_sandbox(harness: Harness, sb: AsyncSandbox) -> None:
    run = asyncio.ensure_future(sb.exec(["sleep", "60"]))
    await until(lambda: harness.runtime.sandboxes[sb.id].processes)
    await sb.destroy()
    with pytest.raises(UnknownOutcome, match="destroyed"):
        await asyncio.wait_for(run, 5)
    acts = await harness.acts(sb.id)
    assert acts.index("exec:result:unknown_outcome") < acts.index("sandbox.destroy:result:ok")


async def test_a_caller_that_vanishes_while_its_sandbox_ends(harness: Harness, sb: AsyncSandbox) -> None:
    run = asyncio.ensure_future(sb.exec(["sleep", "60"]))
    await until(lambda: harness.runtime.sandboxes[sb.id].processes)
    destroying = asyncio.ensure_future(sb.destroy())
    for _ in range(3):
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises((asyncio.CancelledError, UnknownOutcome)):
        await run
    await asyncio.wait_for(destroying, 5)
    acts = [act for act in await harness.acts(sb.id) if act.startswith("exec")]
    assert len(acts) == 2
    assert acts[1].startswith("exec:result")


async def test_a_foreground_command_can_be_followed_by_others(sb: AsyncSandbox) -> None:
    run = asyncio.ensure_future(sb.exec(["cat"], stdin=held()))
    await until_running(sb)
    (info,) = await sb.execs()
    other = await sb.attach(info.id)
    quick = asyncio.ensure_future(sb.exec(["sleep", "0.2"]))
    await asyncio.sleep(0.05)
    third = await sb.attach((await sb.execs())[-1].id)
    assert (await third.wait()).ok
    assert (await quick).id == third.id
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await other.wait()).signal == 9


async def test_a_lost_connection_is_made_again(harness: Harness, sb: AsyncSandbox) -> None:
    p = await sb.start(["cat"], stdin=True)
    await p.send_stdin(b"before ")
    await asyncio.sleep(0.02)
    await harness.runtime.sandboxes[sb.id].guests[0].cut()
    await asyncio.sleep(0.02)
    await p.send_stdin(b"after")
    await p.close_stdin()
    assert (await p.wait()).stdout == b"before after"
    assert (await sb.exec(["true"])).ok


class SlowConnections:
    """A runtime's connections, each given only when ``go`` is set: what happens in between is a test's to say."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.made = 0
        self.go = asyncio.Event()
        self._connect = runtime.connect
        runtime.connect = self.connect  # type: ignore[method-assign]

    async def connect(self, sandbox: SandboxId) -> Guest:
        guest = await self._connect(sandbox)
        self.made += 1
        await self.go.wait()
        return guest


@pytest.mark.parametrize("background", [False, True])
async def test_nothing_is_started_in_a_sandbox_that_was_paused_meanwhile(
    harness: Harness, sb: AsyncSandbox, *, background: bool
) -> None:
    slow = SlowConnections(harness.runtime)
    inside = harness.runtime.sandboxes[sb.id]
    await inside.guests[0].cut()
    run = asyncio.ensure_future((sb.start if background else sb.exec)(["sleep", "0"]))
    await until(lambda: slow.made)
    await sb.pause()
    slow.go.set()
    with pytest.raises(Conflict, match="paused"):
        await asyncio.wait_for(run, 3)
    assert (await harness.acts(sb.id)).count("exec:result:conflict") == 1
    await sb.resume()
    assert (await sb.exec(["true"])).ok


async def test_nothing_is_started_in_a_sandbox_that_is_being_destroyed(
    harness: Harness, sb: AsyncSandbox
) -> None:
    slow, destroy, may_go = SlowConnections(harness.runtime), harness.runtime.destroy, asyncio.Event()

    async def slowly(sandbox: SandboxId) -> None:
        await may_go.wait()
        await destroy(sandbox)

    harness.runtime.destroy = slowly  # type: ignore[method-assign]
    inside = harness.runtime.sandboxes[sb.id]
    await inside.guests[0].cut()
    run = asyncio.ensure_future(sb.exec(["sleep", "60"]))
    await until(lambda: slow.made)
    destroying = asyncio.ensure_future(sb.destroy())
    await asyncio.sleep(0.02)
    slow.go.set()
    with pytest.raises(UnknownOutcome, match="before the command was started"):
        await asyncio.wait_for(run, 3)
    assert not inside.processes
    may_go.set()
    await destroying


async def test_a_command_that_is_just_being_sent_is_let_go_of_when_its_engine_closes(
    harness: Harness,
) -> None:
    harness.durable = True
    sent, may_go = asyncio.Event(), asyncio.Event()
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create()
        guest = harness.runtime.sandboxes[sb.id].guests[0]
        post = guest.post

        async def slowly(command: Command) -> GuestExec:
            followed = await post(command)
            sent.set()
            await may_go.wait()
            return followed

        guest.post = slowly  # type: ignore[method-assign]
        run = asyncio.ensure_future(sb.exec(["sleep", "60"]))
        await sent.wait()
        closing = asyncio.ensure_future(harness.engine.close())
        await asyncio.sleep(0.02)
        may_go.set()
        with pytest.raises(RuntimeUnavailable, match="the command goes on"):
            await asyncio.wait_for(run, 1)
        await closing
    assert "exec:result" not in " ".join(await harness.acts(sb.id))
    await harness.runtime.destroy(sb.id)


async def test_output_beyond_the_limit_is_counted_not_kept() -> None:
    def script(command: Command) -> Scripted:
        return Scripted(stdout=b"x" * 100_000, stderr=b"y" * 10)

    harness = Harness(runtime=FakeRuntime(script))
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create(limits=Limits(output_bytes=1000))
        result = await sb.exec(["flood"])
    assert (result.stdout, result.stderr) == (b"x" * 1000, b"y" * 10)
    assert (result.truncated, result.dropped) == (True, 99_000)


async def test_a_result_that_cannot_be_recorded_is_not_told(harness: Harness, sb: AsyncSandbox) -> None:
    p = await sb.start(["cat"], stdin=True)
    harness.store.full = True
    await p.close_stdin()
    with pytest.raises(StorageFull):
        await p.wait()
    with pytest.raises(StorageFull):
        await sb.exec(["true"])
    harness.store.full = False
    assert (await sb.exec(["true"])).ok


@pytest.mark.parametrize(
    ("command", "arguments", "field"),
    [
        ([], {}, "argv"),
        ("", {}, "command"),
        ([""], {}, "argv"),
        (["a\0b"], {}, r"argv\[0\]"),
        ([1], {}, r"command\[0\]"),
        (b"x", {}, "command"),
        (["a"], {"env": {"A": "\0"}}, "env"),
        (["a"], {"env": {"": "x"}}, "env"),
        (["a"], {"cwd": "a\0"}, "cwd"),
        (["a"], {"cwd": "a" * 5000}, "cwd"),
        (["a"], {"timeout": -1}, "timeout"),
        (["a"], {"timeout": float("inf")}, "timeout"),
        (["a"], {"user": "nobody"}, "user"),
        (["a"], {"stdin": 5}, "stdin"),
    ],
)
async def test_bad_arguments_of_exec_name_the_field(
    harness: Harness, sb: AsyncSandbox, command: object, arguments: dict[str, object], field: str
) -> None:
    before = await harness.acts(sb.id)
    with pytest.raises(BadRequest, match=field):
        await sb.exec(command, **arguments)  # type: ignore[arg-type]
    assert await harness.acts(sb.id) == before


async def test_arguments_that_are_too_large(sb: AsyncSandbox) -> None:
    with pytest.raises(TooLarge):
        await sb.exec(["x" * 200_000])
    with pytest.raises(TooLarge):
        await sb.exec(["x"] * 5000)


async def test_long_arguments_are_recorded_by_digest(harness: Harness, sb: AsyncSandbox) -> None:
    await sb.exec(["x", "\x01" * 100_000], env={"\x01" * 9000: "x"})
    for record in await harness.store.read(sb.id):
        assert len(str(record.payload)) < 30_000


async def test_files_are_recorded(harness: Harness, sb: AsyncSandbox) -> None:
    await sb.files.write("d/a", b"content")
    assert await sb.files.read("/workspace/d/a") == b"content"
    await sb.files.move("d/a", "d/b")
    assert [entry.name for entry in await sb.files.list("d")] == ["b"]
    await sb.files.remove("d", recursive=True)
    assert not await sb.files.exists("d")
    with pytest.raises(FileNotFoundError):
        await sb.files.read("d/b")
    acts = [act for act in await harness.acts(sb.id) if act.startswith("files")]
    assert acts == [
        "files.write:intent",
        "files.write:result:ok",
        "files.read:note:ok",
        "files.rename:intent",
        "files.rename:result:ok",
        "files.remove:intent",
        "files.remove:result:ok",
        "files.read:note:file_not_found",
    ]


async def test_a_streamed_write_is_digested(harness: Harness, sb: AsyncSandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"c"

    await sb.files.write("a", pieces())
    result = (await harness.store.read(sb.id))[-1]
    assert result.payload["digest"] == "sha256:" + hashlib.sha256(b"abc").hexdigest()


async def test_reading_is_bounded(sb: AsyncSandbox) -> None:
    await sb.files.write("a", b"x" * 1000)
    with pytest.raises(TooLarge, match="max_bytes"):
        await sb.files.read("a", max_bytes=999)
    assert await sb.files.read("a", offset=10, length=5) == b"x" * 5
    assert [piece async for piece in sb.files.open_read("a")] == [b"x" * 1000]


def chunk(offset: int, data: bytes, stream: Stream = Stream.STDOUT) -> Chunk:
    return Chunk(stream, offset, data)


async def test_a_slow_reader_holds_its_command_and_loses_nothing() -> None:
    output = Output(limit=10)
    read: list[bytes] = []

    async def slowly() -> None:
        async for piece in output.read():
            read.append(piece.data)
            await asyncio.sleep(0)

    reading = asyncio.ensure_future(slowly())
    await asyncio.sleep(0)
    piece, waited = b"z" * (WINDOW_BYTES // 4), 0
    for number in range(40):
        if output.take(chunk(number * len(piece), piece)):
            waited += 1
            await asyncio.wait_for(output.room(), 2)
    output.finish()
    await reading
    assert b"".join(read) == piece * 40
    assert waited > 0
    assert output.kept == 10


async def test_a_reader_that_leaves_lets_go() -> None:
    output = Output(limit=10)
    reader = output.read()
    output.take(chunk(0, b"a"))
    assert (await anext(reader)).data == b"a"  # type: ignore[call-overload]
    full = output.take(chunk(1, b"b" * 2 * WINDOW_BYTES))
    assert full
    waiting = asyncio.ensure_future(output.room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await reader.aclose()  # type: ignore[attr-defined]
    await asyncio.wait_for(waiting, 1)


async def test_an_unread_iterator_does_not_keep_its_command_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = random.Random(3).randbytes(3 * WINDOW_BYTES)
    monkeypatch.setattr("dsec.node.output.STALLED_AFTER", 0.05)
    harness = Harness(runtime=FakeRuntime(lambda command: Scripted(stdout=said, stderr=b"end")))
    async with harness.open() as dsec:
        sb = await dsec.sandboxes.create(limits=Limits(output_bytes=2 * WINDOW_BYTES))
        p = await sb.start(["flood"])
        unread = p.output
        first = await anext(unread)
        result = await asyncio.wait_for(p.wait(), 3)
        assert (result.exit_code, result.truncated, result.dropped) == (0, True, WINDOW_BYTES)
        read = {Stream.STDOUT: bytearray(first.data), Stream.STDERR: bytearray()}
        async for piece in unread:  # nothing that is kept is missing, or comes twice
            assert piece.offset == len(read[piece.stream])
            read[piece.stream] += piece.data
        assert read[Stream.STDOUT].startswith(result.stdout)
        assert said.startswith(read[Stream.STDOUT])
        assert read[Stream.STDERR] == b"end"


async def test_a_reader_left_behind_is_handed_everything_again_once_he_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsec.node.output.STALLED_AFTER", 0.02)
    piece = b"z" * WINDOW_BYTES
    for kept in (5, 2):
        output = Output(limit=kept * len(piece))
        reader = output.read()
        output.take(chunk(0, piece))
        got = [await anext(reader)]  # type: ignore[call-overload]
        with output.awaited():
            assert output.take(chunk(len(piece), piece))
            await asyncio.wait_for(output.room(), 2)
            for number in range(2, 5):
                assert not output.take(chunk(number * len(piece), piece))  # nobody waits for him now
            got += [await anext(reader) for _ in range(kept - 1)]  # type: ignore[call-overload]
            following = asyncio.ensure_future(anext(reader))  # type: ignore[call-overload]
            await asyncio.sleep(0)
            output.take(chunk(5 * len(piece), b"live"))
            got.append(await asyncio.wait_for(following, 2))
        output.finish()
        assert [each.offset // len(piece) for each in got] == [*range(kept), 5]
        assert got[-1].data == b"live"


async def test_without_anybody_waiting_for_the_end_a_command_waits_for_its_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsec.node.output.STALLED_AFTER", 0.02)
    output = Output(limit=1 << 30)
    reader = output.read()
    output.take(chunk(0, b"a"))
    await anext(reader)  # type: ignore[call-overload]
    assert output.take(chunk(1, b"b" * WINDOW_BYTES))
    waiting = asyncio.ensure_future(output.room())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    with output.awaited():
        await asyncio.wait_for(waiting, 2)


async def test_a_late_reader_sees_what_is_kept_and_then_a_gap() -> None:
    output = Output(limit=4)
    output.take(chunk(0, b"abcdefgh"))
    output.take(chunk(0, b"err", Stream.STDERR))

    async def late() -> list[Chunk]:
        return [piece async for piece in output.read(stdout=1)]

    reading = asyncio.ensure_future(late())
    await asyncio.sleep(0)
    output.take(chunk(8, b"ij"))
    output.finish()
    assert await reading == [chunk(1, b"bcd"), chunk(0, b"err", Stream.STDERR), chunk(8, b"ij")]


async def test_what_was_seen_before_a_reattachment_counts_once() -> None:
    output = Output(limit=100)
    output.take(chunk(0, b"abc"))
    output.take(chunk(1, b"bcde"))
    output.take(chunk(0, b"ab"))
    assert output.stdout.first() == b"abcde"
    output.take(chunk(7, b"hi"))
    assert not output.stdout.whole
    assert output.stdout.first() == b"abcde"
    assert output.dropped == 4


def test_the_fake_knows_no_other_commands() -> None:
    assert ordinary(Command(id=new_exec_id(), argv=[b"rm"])).code == 127
    assert issubclass(TooLarge, DsecError)


async def test_what_is_kept_is_replayed_from_any_offset_whatever_the_pieces() -> None:
    rng = random.Random(7)
    for _ in range(60):
        limit = rng.choice([1, 100, 5000, 70_000, 300_000])
        output = Output(limit=limit)
        said = b""
        while len(said) < limit + 10:
            more = rng.randbytes(rng.choice([1, 7, 4095, 4096, 5000, 70_000]))
            output.take(chunk(len(said), more))
            said += more
        output.finish()
        assert output.stdout.first() == said[:limit]
        floor = rng.randrange(limit + 2)
        found = [piece async for piece in output.read(stdout=floor)]
        assert b"".join(piece.data for piece in found) == said[floor:limit]
        assert all(piece.data for piece in found)
        for piece in found:
            assert piece.data == said[piece.offset : piece.offset + len(piece.data)]


async def test_single_bytes_are_kept_without_an_object_each() -> None:
    output = Output(limit=1 << 20)
    for at in range(100_000):
        output.take(chunk(at, b"x"))
    assert len(output.stdout._held) <= 2
