"""The client against the real init, started as an ordinary process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.errors import (
    BadRequest,
    Conflict,
    FileIsDirectory,
    FileKind,
    FileMissing,
    FileProblem,
    NotFound,
    UnknownOutcome,
)
from dsec.model.execs import Cause, Command, Exit, PtySize
from dsec.model.files import (
    Batch,
    BatchKind,
    BatchOp,
    FileEventKind,
    FileType,
    Identity,
    MakeDir,
    Remove,
    Rename,
    SetAttr,
    TreeTag,
    WriteOptions,
)
from dsec.model.ids import ExecId, new_exec_id
from dsec.runtimes.guest import GuestConnection, connect

INIT = Path(__file__).parents[2] / "native" / "build" / "init"
LAUNCH = 'fd=$1; shift; exec 3<&"$fd"; [ "$fd" = 3 ] || exec {fd}<&-; exec "$@"'
ME = Identity(os.getuid(), os.getgid())

pytestmark = pytest.mark.skipif(not INIT.exists(), reason=f"{INIT} has not been built (make -C native)")


class Running:
    """An init process and its address."""

    def __init__(self, process: subprocess.Popen[bytes], address: Path) -> None:
        self.process = process
        self.address = address


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Running]:
    address = folder / "init.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(8)
        fd = listener.fileno()
        process = subprocess.Popen(  # noqa: ASYNC220 - a test may
            ["bash", "-c", LAUNCH, "launch", str(fd), str(INIT)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    try:
        yield Running(process, address)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 20)


def go(folder: Path, body: Callable[[GuestConnection, Running], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running(folder) as init, await connect(init.address) as guest:
            await body(guest, init)
            if guest.failure is None:
                await guest.ping()
                assert guest.operations == 0

    asyncio.run(main())


def command(*argv: str, **more: object) -> Command:
    return Command(
        id=new_exec_id(),
        argv=[os.fsencode(word) for word in argv],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        uid=ME.uid,
        gid=ME.gid,
        **more,  # type: ignore[arg-type]
    )


async def run(guest: GuestConnection, what: Command, stdin: bytes | None = None) -> tuple[bytes, bytes, Exit]:
    handle = await guest.exec(what)
    if stdin is not None:
        await handle.send(stdin)
        await handle.close_stdin()
    out = {"stdout": bytearray(), "stderr": bytearray()}
    async for chunk in handle.chunks():
        assert chunk.offset == len(out[chunk.stream])
        out[chunk.stream] += chunk.data
    return bytes(out["stdout"]), bytes(out["stderr"]), await handle.wait()


def test_outcomes(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, _: Running) -> None:
        out, err, end = await run(guest, command("sh", "-c", "echo out; echo err >&2; exit 3"))
        assert (out, err, end.code, end.cause) == (b"out\n", b"err\n", 3, Cause.ITSELF)
        assert (await run(guest, command("no-such-program")))[2].code == 127
        assert (await run(guest, command("/")))[2].code == 126
        lost = (await run(guest, command("true", cwd="/no/such")))[2]
        assert (lost.code, lost.start_errno) == (127, 2)
        killed = (await run(guest, command("sh", "-c", "kill -9 $$")))[2]
        assert (killed.code, killed.signal) == (137, 9)
        late = (await run(guest, command("sleep", "60", timeout=0.2)))[2]
        assert (late.cause, late.signal) == (Cause.TIMEOUT, 9)

    go(tmp_path, body)


def test_bytes_are_exact_both_ways(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, _: Running) -> None:
        sent = os.urandom(3 * 2**20 + 17)
        handle = await guest.exec(command("cat", stdin=True))

        async def feed() -> None:
            await handle.send(sent)
            await handle.close_stdin()

        feeding = asyncio.create_task(feed())
        got = b"".join([chunk.data async for chunk in handle.chunks()])
        await feeding
        assert got == sent
        assert (await handle.wait()).stdout_bytes == len(sent)

    go(tmp_path, body)


def test_a_stalled_reader_blocks_nobody_else(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, _: Running) -> None:
        stalled = await guest.exec(command("head", "-c", "5000000", "/dev/zero"))
        assert (await run(guest, command("echo", "hi")))[0] == b"hi\n"
        running_now = {info.id for info in await guest.execs() if info.exit is None}
        assert running_now == {stalled.id}
        stalled.discard()
        assert (await stalled.wait()).stdout_bytes == 5_000_000

    go(tmp_path, body)


def test_ids_signals_and_forgetting(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, _: Running) -> None:
        what = command("sleep", "60")
        handle = await guest.exec(what)
        with pytest.raises(Conflict):
            await guest.exec(what)
        with pytest.raises(Conflict):
            await guest.forget(what.id)
        await guest.signal(what.id, signal.SIGTERM)
        assert (await handle.wait()).signal == signal.SIGTERM
        await guest.signal(what.id, signal.SIGTERM)
        await guest.forget(what.id)
        await guest.forget(what.id)
        with pytest.raises(NotFound):
            await guest.attach(what.id)
        with pytest.raises(NotFound):
            await guest.signal(new_exec_id(), signal.SIGTERM)
        tree = await guest.exec(command("sh", "-c", "sleep 60 & sleep 60"))
        await guest.signal(tree.id, signal.SIGKILL, tree=True)
        assert (await tree.wait()).cause is Cause.KILLED

    go(tmp_path, body)


def test_attach_after_detach_and_from_elsewhere(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, init: Running) -> None:
        handle = await guest.exec(command("sh", "-c", "echo one; read line; echo $line", stdin=True))
        chunks = handle.chunks()
        first = await anext(chunks)
        assert first.data == b"one\n"
        handle.detach()
        with pytest.raises(Conflict):
            await handle.wait()
        again = await guest.attach(handle.id, stdout=4)
        replaced = asyncio.create_task(again.wait())
        third = await guest.attach(handle.id, stdout=0)
        with pytest.raises(Conflict):
            await replaced
        await third.send(b"two\n")
        assert b"".join([chunk.data async for chunk in third.chunks()]) == b"one\ntwo\n"

    go(tmp_path, body)


def test_pty(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, _: Running) -> None:
        handle = await guest.exec(
            command("sh", "-c", "read x; stty size", pty=PtySize(rows=10, cols=20), stdin=True)
        )
        await guest.resize(handle.id, PtySize(rows=33, cols=44))
        await handle.send(b"\n")
        out = b"".join([chunk.data async for chunk in handle.chunks()])
        assert b"33 44" in out

    go(tmp_path, body)


def test_files(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, _: Running) -> None:
        files, root = guest.files, str(tmp_path / "files")
        await files.apply(MakeDir(root + "/a/b", parents=True), who=ME)
        data = os.urandom(2_000_001)

        async def content() -> AsyncIterator[bytes]:
            yield data[:1_000_000]
            yield data[1_000_000:]

        entry = await files.write(root + "/a/f", content(), who=ME, options=WriteOptions(atomic=True))
        assert (entry.name, entry.size) == ("f", len(data))
        assert b"".join([piece async for piece in files.read(root + "/a/f", who=ME)]) == data
        part = [piece async for piece in files.read(root + "/a/f", who=ME, offset=5, length=10)]
        assert b"".join(part) == data[5:15]
        await files.apply(Rename(root + "/a/f", root + "/a/g"), who=ME)
        await files.apply(SetAttr(path=root + "/a/g", mode=0o600, mtime_ns=7), who=ME)
        got = await files.stat(root + "/a/g", who=ME)
        assert (got.mode, got.mtime_ns, got.type) == (0o600, 7, FileType.FILE)
        assert [entry.name for entry in (await files.list(root + "/a", who=ME)).entries] == ["b", "g"]
        assert (await files.list(root + "/a", who=ME, limit=1)).truncated
        await files.apply(Remove(root, recursive=True), who=ME)
        with pytest.raises(FileMissing) as missing:
            await files.stat(root, who=ME)
        assert missing.value.facts == {"path": root, "errno": 2}

    go(tmp_path, body)


def test_file_errors(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, _: Running) -> None:
        files = guest.files
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "file").touch()
        for path, kind in (
            ("fifo", FileKind),
            ("", FileIsDirectory),
            ("none", FileMissing),
            ("file/x", FileProblem),
        ):
            with pytest.raises(kind):
                async for _piece in files.read(f"{tmp_path}/{path}", who=ME):
                    pass
        with pytest.raises(FileProblem):
            await files.apply(MakeDir(str(tmp_path / "file")), who=ME)
        with pytest.raises(BadRequest):
            await files.stat("a\0b", who=ME)

    go(tmp_path, body)


def test_leaving_a_read_early_and_a_failed_write_leave_nothing(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(8 * 2**20))

    async def body(guest: GuestConnection, _: Running) -> None:
        pieces = guest.files.read(str(big), who=ME)
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
        await guest.ping()
        assert guest.operations == 0

        async def broken() -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError("source failed")

        with pytest.raises(RuntimeError):
            await guest.files.write(
                str(tmp_path / "new"), broken(), who=ME, options=WriteOptions(atomic=True)
            )
        await guest.ping()
        assert sorted(os.listdir(tmp_path)) == ["big", "init.sock"]

    go(tmp_path, body)


def test_batch_tree_and_watch(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, _: Running) -> None:
        files, root = guest.files, tmp_path / "root"
        root.mkdir()
        watching = await files.watch(str(root), who=ME)
        seen = asyncio.ensure_future(anext(watching))
        many = [BatchOp(BatchKind.FILE, b"f%d" % n, 0o640, 1000, os.urandom(9000)) for n in range(100)]
        link = BatchOp(BatchKind.SYMLINK, b"link", 0o777, 1000, b"/etc/passwd")
        folder = BatchOp(BatchKind.DIRECTORY, b"dir\xff", 0o750, 1000)
        await files.apply(Batch(str(root), (folder, link, *many)), who=ME)
        assert (await asyncio.wait_for(seen, 20)).kind is FileEventKind.CREATED
        await watching.aclose()  # type: ignore[attr-defined]
        names, content = set(), 0
        async for piece in files.tree(str(root), who=ME):
            content += len(piece.content)
            if piece.tag is TreeTag.ENTRY and piece.entry is not None:
                names.add(piece.entry.name)
        assert names == {".", "dir\udcff", "link", *(f"f{n}" for n in range(100))}
        assert content == 900_000
        bad = BatchOp(BatchKind.FILE, b"link/x", 0o644, 0, b"x")
        with pytest.raises(FileProblem) as refused:
            await files.apply(Batch(str(root), (bad,)), who=ME)
        assert refused.value.facts["path"] == str(root / "link/x")

    go(tmp_path, body)


def test_init_killed_while_a_command_runs(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, init: Running) -> None:
        handle = await guest.exec(command("sleep", "3"))
        init.process.kill()
        with pytest.raises(UnknownOutcome):
            await handle.wait()

    go(tmp_path, body)


def test_a_newer_connection_replaces_this_one_and_finds_the_exec(tmp_path: Path) -> None:
    async def body(guest: GuestConnection, init: Running) -> None:
        handle = await guest.exec(command("sh", "-c", "echo one; read x; exit 4", stdin=True))
        async with await connect(init.address) as newer:
            with pytest.raises(UnknownOutcome):
                await handle.wait()
            again = await newer.attach(ExecId(handle.id))
            await again.close_stdin()
            assert b"".join([chunk.data async for chunk in again.chunks()]) == b"one\n"
            assert (await again.wait()).code == 4

    go(tmp_path, body)
