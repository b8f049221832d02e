"""The client of the init protocol against a scripted init: windows, hostility, cancellation, loss."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dsec.errors import (
    BadRequest,
    Busy,
    Conflict,
    DsecError,
    FileDenied,
    FileIsDirectory,
    FileKind,
    FileMissing,
    FileProblem,
    NotFound,
    ProtocolError,
    QuotaExceeded,
    RuntimeUnavailable,
    TooLarge,
    UnknownOutcome,
)
from dsec.model.execs import Cause, Command
from dsec.model.files import (
    Batch,
    BatchKind,
    BatchOp,
    Entry,
    FileEventKind,
    FileType,
    Identity,
    MakeDir,
    WriteOptions,
)
from dsec.model.ids import new_exec_id
from dsec.runtimes.guest import GuestConnection, connect
from dsec.runtimes.guest_exec import exit_of
from dsec.runtimes.link import Bounds
from dsec.testing.guest import FakeInit, Handler, answer, exit_status, fake_guest, pong, runs
from dsec.wire import guest as wire

Kind = wire.Kind
ME = Identity(1000, 1000)
STARTED = wire.Started(7, 0, 0)
Body = Callable[[FakeInit, GuestConnection], Awaitable[None]]


def go(body: Body, on: dict[Kind, Handler] | None = None, *, bounds: Bounds | None = None) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), fake_guest(on, bounds=bounds) as (fake, guest):
            await body(fake, guest)

    asyncio.run(main())


def command(**more: object) -> Command:
    return Command(id=new_exec_id(), argv=[b"true"], **more)  # type: ignore[arg-type]


def entry(name: str = "f", **more: object) -> Entry:
    values: dict[str, object] = {
        "type": FileType.FILE,
        "mode": 0o644,
        "size": 3,
        "uid": 1,
        "gid": 1,
        "mtime_ns": 5,
        **more,
    }
    return Entry(name=name, **values)  # type: ignore[arg-type]


async def content(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def error(number: int, code: int = 0) -> wire.Error:
    return wire.Error(number, code, b"said so")


# --- commands ----------------------------------------------------------------------------------------------------


def test_output_and_exit() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        handle = await guest.exec(command(timeout=1.0005, env={"A": "b"}))
        chunks = [chunk async for chunk in handle.chunks()]
        assert [(chunk.stream, chunk.offset, chunk.data) for chunk in chunks] == [
            ("stdout", 0, b"out"),
            ("stderr", 0, b"err"),
        ]
        end = await handle.wait()
        assert (end.code, end.user, end.system, end.max_rss, end.wall) == (3, 0.001, 0.002, 3072, 0.004)
        (sent,) = [message for _, message in fake.requests(Kind.EXEC)]
        assert isinstance(sent, wire.Exec)
        assert (sent.timeout_ms, sent.env, sent.argv, sent.flags) == (1001, (b"A=b",), (b"true",), 0)
        assert guest.operations == 0

    go(body, {Kind.EXEC: runs(b"out", b"err", 3)})


@pytest.mark.parametrize(
    ("how", "code", "expected"),
    [(0, 5, (5, 0, 0)), (1, 9, (137, 9, 0)), (2, errno.ENOENT, (127, 0, 2)), (2, errno.EACCES, (126, 0, 13))],
)
def test_how_a_command_ends(how: int, code: int, expected: tuple[int, int, int]) -> None:
    end = exit_of(exit_status(code, how=how))
    assert (end.code, end.signal, end.start_errno) == expected


def test_why_a_command_ends() -> None:
    causes = [exit_of(exit_status(reason=reason)).cause for reason in (0, 1, 2)]
    assert causes == [Cause.ITSELF, Cause.TIMEOUT, Cause.KILLED]
    all_ended = exit_of(exit_status(9, how=1, reason=3))
    assert all_ended.whole_sandbox
    assert all_ended.cause is Cause.KILLED


@pytest.mark.parametrize(
    ("answered", "kind"),
    [
        (error(errno.EEXIST), Conflict),
        (error(0, 3), Busy),
        (error(0, 4), NotFound),
        (error(errno.EINVAL, 1), BadRequest),
        (error(errno.EAGAIN), RuntimeUnavailable),
    ],
)
def test_exec_refused(answered: wire.Error, kind: type[DsecError]) -> None:
    async def body(_: FakeInit, guest: GuestConnection) -> None:
        with pytest.raises(kind):
            await guest.exec(command())
        assert guest.operations == 0
        await guest.ping()

    go(body, {Kind.EXEC: answer(answered)})


def test_credit_goes_back_only_as_the_consumer_takes() -> None:
    window = 65536

    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        handle = await guest.exec(command())
        channel = await fake.wait_for(Kind.EXEC)
        for at in range(0, window, 8192):
            fake.output(channel, 1, at, bytes(8192))
        await guest.ping()
        assert not fake.requests(Kind.CREDIT)
        chunks = handle.chunks()
        for _ in range(2):
            await anext(chunks)
        await guest.ping()
        assert [message for _, message in fake.requests(Kind.CREDIT)] == [wire.Credit(window // 4)]
        handle.discard()
        await guest.ping()
        credit = sum(message.bytes for _, message in fake.requests(Kind.CREDIT))  # type: ignore[attr-defined]
        assert credit == window
        fake.send(channel, exit_status())
        assert (await handle.wait()).code == 0

    go(body, {Kind.EXEC: answer(STARTED)}, bounds=Bounds(window=window))


def test_single_bytes_are_joined_so_that_a_window_stays_a_window() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        handle = await guest.exec(command())
        channel = await fake.wait_for(Kind.EXEC)
        for at in range(20_000):
            fake.output(channel, 1 + at % 2, at // 2, b"%d" % (at // 2 % 10))
        fake.send(channel, exit_status())
        await handle.wait()
        chunks = [chunk async for chunk in handle.chunks()]
        assert len(chunks) <= 4
        for stream in ("stdout", "stderr"):
            got = b"".join(chunk.data for chunk in chunks if chunk.stream == stream)
            assert got == b"0123456789" * 1000

    go(body, {Kind.EXEC: answer(STARTED)})


def test_standard_input_keeps_to_the_credit() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        handle = await guest.exec(command(stdin=True))
        channel = await fake.wait_for(Kind.EXEC)
        sending = asyncio.create_task(handle.send(bytes(wire.INITIAL_CREDIT + 10)))
        await guest.ping()
        await guest.ping()

        def sent() -> int:
            return sum(len(m.data) for _, m in fake.requests(Kind.DATA) if isinstance(m, wire.Data))

        assert sent() == wire.INITIAL_CREDIT
        assert not sending.done()
        fake.send(channel, wire.Credit(100))
        await sending
        await handle.close_stdin()
        await guest.ping()
        assert sent() == wire.INITIAL_CREDIT + 10
        assert fake.seen[-2][2] == wire.END
        fake.send(channel, exit_status())
        await handle.wait()
        await handle.send(b"late")

    go(body, {Kind.EXEC: answer(STARTED)})


def test_input_waits_while_init_does_not_read_and_the_command_can_still_be_lost() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        handles = [await guest.exec(command(stdin=True)) for _ in range(8)]
        fake.pause()
        tasks = [asyncio.create_task(handle.send(bytes(wire.INITIAL_CREDIT))) for handle in handles]
        await asyncio.sleep(0.05)
        assert not all(task.done() for task in tasks)
        fake.close()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, RuntimeUnavailable) for result in done)

    go(body, {Kind.EXEC: answer(STARTED)})


def test_a_command_whose_start_comes_with_its_end() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        followed = await guest.post(command(late=True))
        assert not followed.has_begun
        end = await followed.wait()
        assert (end.code, followed.pid, followed.has_begun) == (3, 7, True)
        assert b"".join([chunk.data async for chunk in followed.chunks()]) == b"outerr"
        ((_, sent),) = fake.requests(Kind.EXEC)
        assert isinstance(sent, wire.Exec)
        assert sent.flags == wire.ExecFlag.LATE

    go(body, {Kind.EXEC: runs(b"out", b"err", 3)})


def test_what_was_refused_is_told_to_whoever_follows() -> None:
    async def body(_: FakeInit, guest: GuestConnection) -> None:
        followed = await guest.post(command())
        with pytest.raises(Busy):
            await followed.wait()
        with pytest.raises(Busy):
            await anext(aiter(followed.chunks()))
        assert followed.refused
        assert not followed.has_begun
        assert guest.operations == 0

    go(body, {Kind.EXEC: answer(error(0, 3))})


def test_who_waits_for_a_command_that_is_let_go_hears_it() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        followed = await guest.post(command())
        waiting = asyncio.create_task(followed.wait())
        await fake.wait_for(Kind.EXEC)
        followed.detach()
        with pytest.raises(Conflict):
            await waiting
        await guest.ping()
        assert guest.operations == 0

    go(body)


# --- loss --------------------------------------------------------------------------------------------------------


def test_loss_before_and_after_the_start() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        handle = await guest.exec(command())
        consuming = asyncio.ensure_future(anext(aiter(handle.chunks())))
        fake.on.pop(Kind.EXEC)
        starting = asyncio.create_task(guest.exec(command()))
        listing = asyncio.create_task(guest.files.list("/", who=ME))
        await fake.wait_for(Kind.LIST)
        fake.close()
        for task, kind in (
            (consuming, UnknownOutcome),
            (starting, UnknownOutcome),
            (listing, RuntimeUnavailable),
        ):
            with pytest.raises(kind):
                await task
        with pytest.raises(UnknownOutcome):
            await handle.wait()
        with pytest.raises(RuntimeUnavailable):
            await guest.exec(command())
        assert isinstance(await guest.wait_ended(), RuntimeUnavailable)

    go(body, {Kind.EXEC: answer(STARTED)})


def test_what_came_before_the_loss_is_delivered() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        handle = await guest.exec(command())
        fake.output(await fake.wait_for(Kind.EXEC), 1, 0, b"last words")
        await guest.ping()
        fake.close()
        await guest.wait_ended()
        chunks = handle.chunks()
        assert (await anext(chunks)).data == b"last words"
        with pytest.raises(UnknownOutcome):
            await anext(chunks)

    go(body, {Kind.EXEC: answer(STARTED)})


def test_nobody_answers_hello() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs, pytest.raises(RuntimeUnavailable, match="did not answer"):
            await connect(ours, seconds=0.05)
        with pytest.raises(RuntimeUnavailable, match="cannot connect"):
            await connect("/no/such/socket")

    asyncio.run(main())


@pytest.mark.parametrize(
    "reply",
    [
        wire.Welcome(2, wire.MAX_PAYLOAD, 1, 0).frame(0),
        wire.Welcome(1, 10, 1, 0).frame(0),
        wire.Error(1, 0, b"no").frame(0),
        wire.Ok().frame(0),
        b"\xff" * 20,
    ],
)
def test_a_wrong_welcome(reply: bytes) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeUnavailable) as refused:
            async with fake_guest({Kind.HELLO: lambda fake, _channel, _message: fake.raw(reply)}):
                pass
        assert isinstance(refused.value.__cause__, ProtocolError)

    asyncio.run(main())


# --- hostility ---------------------------------------------------------------------------------------------------

BEFORE_START: list[Callable[[FakeInit, int], None]] = [
    lambda fake, channel: fake.send(channel + 1, wire.Ok()),
    lambda fake, channel: fake.send(0, wire.Ok()),
    lambda fake, channel: fake.send(channel, wire.Ok()),
    lambda fake, channel: fake.send(channel, exit_status()),
    lambda fake, channel: fake.output(channel, 1, 0, b"x"),
    lambda fake, channel: fake.send(channel, wire.Started(7, 1, 0)),
    lambda fake, channel: fake.send(channel, wire.Credit(1)),
    lambda fake, channel: fake.raw(b"\xff" * 40),
]
AFTER_START: list[Callable[[FakeInit, int], None]] = [
    lambda fake, channel: fake.send(channel, STARTED),
    lambda fake, channel: fake.output(channel, 0, 0, b"x"),
    lambda fake, channel: fake.output(channel, 3, 0, b"x"),
    lambda fake, channel: fake.output(channel, 1, 5, b"x"),
    lambda fake, channel: fake.raw(
        wire.encode_output(channel, 1, 0, b"xx") + wire.encode_output(channel, 1, 1, b"x")
    ),
    lambda fake, channel: fake.raw(
        wire.encode_output(channel, 1, 0, b"", end=True) + wire.encode_output(channel, 1, 0, b"x")
    ),
    lambda fake, channel: fake.output(channel, 1, 0, b""),
    lambda fake, channel: fake.output(channel, 1, 0, bytes(65537)),
    lambda fake, channel: fake.send(channel, wire.Credit(1)),
    lambda fake, channel: fake.send(channel, exit_status(256)),
    lambda fake, channel: fake.send(channel, exit_status(65, how=1)),
    lambda fake, channel: fake.send(channel, error(errno.EIO)),
    lambda fake, channel: fake.raw(wire.encode_frame(Kind.DATA, channel, b"1234567", 1)),
]


@pytest.mark.parametrize("act", range(len(BEFORE_START)))
def test_hostile_before_the_start(act: int) -> None:
    async def body(_: FakeInit, guest: GuestConnection) -> None:
        with pytest.raises(UnknownOutcome):
            await guest.exec(command(stdin=True))
        assert isinstance(guest.failure, ProtocolError)
        assert guest.operations == 0

    go(body, {Kind.EXEC: lambda fake, channel, _message: BEFORE_START[act](fake, channel)})


@pytest.mark.parametrize("act", range(len(AFTER_START)))
def test_hostile_after_the_start(act: int) -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        other = await guest.exec(command())
        handle = await guest.exec(command(stdin=True))
        AFTER_START[act](fake, await fake.wait_for(Kind.EXEC, 2))
        assert isinstance(await guest.wait_ended(), ProtocolError)
        for pending in (other, handle):
            if pending is other or not (
                AFTER_START[act].__code__.co_names.count("exit_status") and act == 11
            ):
                with pytest.raises(UnknownOutcome):
                    await pending.wait()

    go(body, {Kind.EXEC: answer(STARTED)}, bounds=Bounds(window=65536))


def test_frames_after_the_end_of_an_exec() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        handle = await guest.exec(command())
        fake.send(await fake.wait_for(Kind.EXEC), exit_status(), exit_status())
        assert isinstance(await guest.wait_ended(), ProtocolError)
        assert (await handle.wait()).code == 0

    go(body, {Kind.EXEC: answer(STARTED)})


def lists(*entries: Entry, end: bool = True) -> Handler:
    def handler(fake: FakeInit, channel: int, _: wire.Message) -> None:
        fake.send(channel, wire.Entries(entries, 0), flags=wire.END if end else 0)

    return handler


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "x" * 256])
def test_hostile_names_in_a_listing(name: str) -> None:
    async def body(_: FakeInit, guest: GuestConnection) -> None:
        with pytest.raises(RuntimeUnavailable):
            await guest.files.list("/", who=ME)
        assert isinstance(guest.failure, ProtocolError)

    go(body, {Kind.LIST: lists(entry(name))})


def test_more_entries_than_asked() -> None:
    async def body(_: FakeInit, guest: GuestConnection) -> None:
        assert len((await guest.files.list("/", who=ME, limit=2)).entries) == 2
        with pytest.raises(RuntimeUnavailable):
            await guest.files.list("/", who=ME, limit=1)

    go(body, {Kind.LIST: lists(entry("b"), entry("a"))})


def reads(*frames: tuple[bytes, bool], first: bool = True) -> Handler:
    def handler(fake: FakeInit, channel: int, _: wire.Message) -> None:
        if first:
            fake.send(channel, wire.EntryIs(entry()))
        for data, end in frames:
            fake.data(channel, data, end=end)

    return handler


@pytest.mark.parametrize(
    "handler",
    [
        reads((b"x", True), first=False),
        reads((b"12345678901", True)),
        reads((b"", False)),
        reads((b"x", True), (b"y", True)),
        answer(wire.Ok()),
        answer(wire.EntryIs(entry()), wire.EntryIs(entry())),
    ],
)
def test_hostile_reads(handler: Handler) -> None:
    async def body(_: FakeInit, guest: GuestConnection) -> None:
        got = b""
        try:
            async for data in guest.files.read("/f", who=ME, length=10):
                got += data
        except RuntimeUnavailable:
            pass
        assert isinstance(await guest.wait_ended(), ProtocolError)
        assert len(got) <= 10

    go(body, {Kind.READ: handler})


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answered", "kind"),
    [
        (error(errno.ENOENT), FileMissing),
        (error(errno.EACCES), FileDenied),
        (error(errno.EPERM), FileDenied),
        (error(errno.EISDIR), FileIsDirectory),
        (error(errno.ENOSPC), QuotaExceeded),
        (error(errno.EDQUOT), QuotaExceeded),
        (error(errno.EINVAL, 2), FileKind),
        (error(errno.E2BIG, 3), TooLarge),
        (error(errno.EMFILE, 3), Busy),
        (error(errno.EINVAL, 1), BadRequest),
        (error(errno.ENOTDIR), FileProblem),
        (error(errno.EEXIST), FileProblem),
    ],
)
def test_file_errors(answered: wire.Error, kind: type[DsecError]) -> None:
    async def body(_: FakeInit, guest: GuestConnection) -> None:
        with pytest.raises(kind) as refused:
            await guest.files.stat("/a/f", who=ME)
        assert type(refused.value) is kind
        assert refused.value.facts["path"] == "/a/f"
        with pytest.raises(kind):
            await guest.files.apply(MakeDir("/a/f"), who=ME)
        assert guest.operations == 0

    go(body, {Kind.STAT: answer(answered), Kind.MKDIR: answer(answered)})


def test_a_write_that_fails_half_way() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        with pytest.raises(QuotaExceeded):
            await guest.files.write(
                "/f",
                content(*[bytes(100_000)] * 50),
                who=ME,
                options=WriteOptions(exclusive=True, atomic=True),
            )
        (sent,) = [message for _, message in fake.requests(Kind.WRITE)]
        assert isinstance(sent, wire.Write)
        assert sent.flags == 1 | 2 | 16
        assert guest.operations == 0

    def refuse(fake: FakeInit, channel: int, message: wire.Message) -> None:
        if len(fake.requests(Kind.DATA)) == 2:
            fake.send(channel, error(errno.ENOSPC))

    go(body, {Kind.WRITE: answer(wire.Ok()), Kind.DATA: refuse})


def test_batches_are_cut_to_fit_and_blame_the_step() -> None:
    ops = tuple(BatchOp(BatchKind.FILE, b"f%d" % n, 0o644, 0, bytes(50_000)) for n in range(20))

    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        with pytest.raises(FileDenied) as refused:
            await guest.files.apply(Batch("/r", ops), who=ME)
        assert refused.value.facts["path"] == "/r/f6"
        huge = BatchOp(BatchKind.FILE, b"huge", 0o644, 0, bytes(wire.MAX_PAYLOAD))
        with pytest.raises(TooLarge):
            await guest.files.apply(Batch("/r", (huge,)), who=ME)

    def handler(fake: FakeInit, channel: int, message: wire.Message) -> None:
        assert isinstance(message, wire.BatchOps)
        first = len(fake.requests(Kind.BATCH)) == 1
        done = len(message.ops) if first else 1
        fake.send(channel, wire.BatchDone(done, 0 if first else errno.EACCES, b""))

    go(body, {Kind.BATCH: handler})


def test_a_watch_that_is_not_read_tells_that_events_were_lost() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        events = await guest.files.watch("/d", who=ME)
        assert (await anext(events)).path == "first"
        channel = await fake.wait_for(Kind.WATCH)
        rows = tuple(wire.EventRow(1, 0, b"x" * 200, 0) for _ in range(1000))
        for _ in range(25):
            fake.send(channel, wire.Events(rows))
        await guest.ping()
        got = [await anext(events) for _ in range(2)]
        assert got[0].kind is FileEventKind.OVERFLOW
        await events.aclose()  # type: ignore[attr-defined]
        await fake.wait_for(Kind.CLOSE)

    first = answer(wire.Ok(), wire.Events((wire.EventRow(1, 0, b"first", 0),)))
    go(body, {Kind.WATCH: first})


# --- cancellation, channels --------------------------------------------------------------------------------------


def test_cancelling_closes_the_channel_and_leaves_nothing() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        pending = [
            (Kind.EXEC, asyncio.create_task(guest.exec(command()))),
            (Kind.STAT, asyncio.create_task(guest.files.stat("/", who=ME))),
            (Kind.LIST, asyncio.create_task(guest.files.list("/", who=ME))),
            (Kind.READ, asyncio.create_task(anext(aiter(guest.files.read("/f", who=ME))))),  # type: ignore[arg-type]
            (
                Kind.WRITE,
                asyncio.create_task(guest.files.write("/f", content(b"x"), who=ME, options=WriteOptions())),
            ),
            (Kind.WATCH, asyncio.create_task(guest.files.watch("/f", who=ME))),
        ]
        channels = {await fake.wait_for(kind) for kind, _ in pending}
        for _, task in pending:
            task.cancel()
        await asyncio.gather(*(task for _, task in pending), return_exceptions=True)
        await fake.wait_for(Kind.CLOSE, len(pending))
        assert {channel for channel, _ in fake.requests(Kind.CLOSE)} == channels
        await guest.ping()
        assert guest.operations == 0

    go(body)


def test_frames_that_were_under_way_when_a_channel_closed_are_dropped() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        reading = guest.files.read("/f", who=ME)
        assert await anext(reading) == b"one"
        await reading.aclose()  # type: ignore[attr-defined]
        channel = await fake.wait_for(Kind.CLOSE)
        fake.data(channel, b"late", end=True)
        assert guest.operations == 1
        fake.on[Kind.PING] = pong
        fake.send(channel, wire.Pong(b""))
        await guest.ping()
        assert guest.operations == 0
        fake.data(channel, b"too late")
        assert isinstance(await guest.wait_ended(), ProtocolError)

    go(body, {Kind.READ: reads((b"one", False)), Kind.PING: lambda *_: None})


def test_numbers_of_open_channels_are_not_used_again() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        first = await guest.exec(command())
        used = fake.requests(Kind.EXEC)[0][0]
        guest._link._last = 0xFFFF_FFFF
        await guest.ping()
        await guest.ping()
        numbers = [channel for channel, _ in fake.requests(Kind.PING)]
        assert numbers[0] == 0xFFFF_FFFF
        assert numbers[1] not in (0, used)
        first.detach()

    go(body, {Kind.EXEC: answer(STARTED)})


def test_too_many_operations_are_busy() -> None:
    async def body(_: FakeInit, guest: GuestConnection) -> None:
        handles = [await guest.exec(command()) for _ in range(3)]
        with pytest.raises(Busy):
            await guest.exec(command())
        handles[0].detach()
        await asyncio.sleep(0.01)
        await guest.exec(command())

    go(body, {Kind.EXEC: answer(STARTED)}, bounds=Bounds(channels=3))


def test_wrong_commands_are_refused_before_anything_is_sent() -> None:
    async def body(fake: FakeInit, guest: GuestConnection) -> None:
        for wrong in (
            Command(id=new_exec_id(), argv=[]),
            Command(id=new_exec_id(), argv=[b"a\0b"]),
            Command(id=new_exec_id(), argv=[b"x" * 200_000]),
            command(env={"A=B": "c"}),
            command(uid=-1),
            command(cwd="x" * 5000),
        ):
            with pytest.raises(BadRequest):
                await guest.exec(wrong)
        assert not fake.requests(Kind.EXEC)
        assert guest.operations == 0

    go(body)
