"""What every isolation level does, seen through the SDK. Subclasses bring ``dsec`` and ``level`` as for the engine's contract.

A guarantee that the level does not give (a missing flag) is skipped with that flag as the reason.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.errors import BadRequest, FileKind, FileMissing, FileProblem, Unsupported
from dsec.model.files import FileEventKind, FileType
from dsec.model.sandbox import Flag, Level, Limits, State
from dsec.testing.contracts.engine import Contract, EngineContract


def need(sb: AsyncSandbox, flag: Flag) -> None:
    """Skip what this level does not promise."""
    if flag not in sb.flags:
        pytest.skip(f"level {sb.info.spec.level} here has no flag {flag}")


async def grows(sb: AsyncSandbox, path: str, seconds: float = 0.4) -> bool:
    """Whether somebody still writes to a beacon file."""
    async with asyncio.timeout(5):
        while not await sb.files.exists(path):  # noqa: ASYNC110 - seen from outside only
            await asyncio.sleep(0.02)
    before = (await sb.files.stat(path)).size
    await asyncio.sleep(seconds)
    return (await sb.files.stat(path)).size > before


BEACON = "(while :; do echo x >> beacon; sleep 0.05; done)"


class ShellContract(Contract):
    """Commands in a shell."""

    async def test_streams_codes_and_signals(self, sb: AsyncSandbox) -> None:
        result = await sb.exec("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3)
        killed = await sb.exec("kill -TERM $$")
        assert (killed.signal, killed.exit_code) == (15, 143)

    async def test_not_found_and_not_executable(self, sb: AsyncSandbox) -> None:
        await sb.files.write("script", b"#!/bin/sh\necho ran\n", mode=0o644)
        assert (await sb.exec(["./script"])).exit_code == 126
        missing = await sb.exec(["./nothing"])
        assert (missing.exit_code, missing.start_errno) == (127, errno.ENOENT)
        assert (await sb.exec("exit 127")).start_errno == 0
        await sb.exec(["chmod", "755", "script"])
        assert (await sb.exec(["./script"])).text == "ran\n"

    async def test_variables_and_directory(self, sb: AsyncSandbox) -> None:
        await sb.files.mkdir("sub")
        result = await sb.exec('printf "%s|%s|%s" "$PWD" "$X" "$SESSION_ID"', cwd="sub", env={"X": "a b\n'"})
        assert result.text == f"{sb.info.workdir}/sub|a b\n'|{sb.info.session_id}"
        assert (await sb.exec('test -w "$HOME" && test -w . && echo yes')).text == "yes\n"

    async def test_nothing_is_inherited(self, sb: AsyncSandbox) -> None:
        fds = (await sb.exec("ls /proc/self/fd")).text.split()
        assert set(fds) <= {"0", "1", "2", "3"}, fds
        names = {line.partition("=")[0] for line in (await sb.exec(["env"])).text.splitlines()}
        allowed = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "SESSION_ID", "TMPDIR"}
        assert names <= {*allowed, "PWD", "_", "SHLVL", "OLDPWD"}, names

    async def test_processes_lock_each_other_out(self, sb: AsyncSandbox) -> None:
        lock = "import multiprocessing; multiprocessing.Lock(); print('named')"
        named = await sb.exec(["python3", "-I", "-c", lock])
        if Flag.ROOT_FS in sb.flags:
            assert named.text == "named\n"
        else:  # what is named is shared with the machine
            assert b"PermissionError" in named.stderr
        flock = 'flock lock sh -c "flock -n lock true || echo held"'
        assert (await sb.exec(f"{flock}; flock -n lock echo free")).text == "held\nfree\n"

    async def test_a_time_out_ends_grandchildren(self, sb: AsyncSandbox) -> None:
        result = await sb.exec(f"setsid sh -c '{BEACON}' & {BEACON} & sleep 60", timeout=0.5)
        assert result.timed_out
        assert (await sb.files.stat("beacon")).size > 0
        assert not await grows(sb, "beacon")
        assert (await sb.exec(["true"])).ok

    async def test_positive_control_the_beacon_grows_when_nothing_ends_it(self, sb: AsyncSandbox) -> None:
        p = await sb.start(f"{BEACON} & sleep 60")
        await asyncio.sleep(0.3)
        assert await grows(sb, "beacon")
        await p.kill()
        await p.wait()
        assert not await grows(sb, "beacon")

    async def test_a_background_process_outlives_its_command(self, sb: AsyncSandbox) -> None:
        async with asyncio.timeout(10):
            result = await sb.exec(f"{BEACON} & echo started")
        assert result.text == "started\n"
        assert await grows(sb, "beacon")

    async def test_binary_output_is_exact(self, sb: AsyncSandbox) -> None:
        content = bytes(range(256)) * 8000
        await sb.files.write("blob", content)
        result = await sb.exec("cat blob; cat blob >&2")
        assert result.stdout == content
        assert result.stderr == content

    async def test_a_flood_is_cut_and_counted(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level, limits=Limits(output_bytes=4096)) as sb:
            result = await sb.exec("head -c 20000000 /dev/zero")
            assert result.stdout == bytes(4096)
            assert (result.truncated, result.dropped) == (True, 20_000_000 - 4096)

    async def test_following_a_command_from_an_offset(self, sb: AsyncSandbox) -> None:
        p = await sb.start("printf 0123456789; sleep 0.3; printf abc")
        again = await p.attach(stdout=4)
        assert b"".join([chunk.data async for chunk in again.output]) == b"456789abc"
        assert (await p.wait()).stdout == b"0123456789abc"

    async def test_a_stalled_reader_blocks_nobody_else(self, sb: AsyncSandbox) -> None:
        p = await sb.start("head -c 50000000 /dev/zero")
        output = p.output
        await anext(output)  # and no further
        async with asyncio.timeout(10):
            assert (await sb.exec(["echo", "hi"])).text == "hi\n"
            await sb.files.write("a", b"x")
            size = 0
            async for chunk in output:
                size = max(size, chunk.offset + len(chunk.data))
            assert size == 50_000_000
            assert (await p.wait()).ok

    async def test_a_terminal(self, sb: AsyncSandbox) -> None:
        if Flag.PTY not in sb.flags:
            with pytest.raises(Unsupported):
                await sb.terminal()
            return
        async with await sb.terminal(
            "stty size; read line; stty size; echo got $line", rows=30, cols=90
        ) as t:
            await asyncio.sleep(0.3)
            await t.resize(40, 100)
            await t.send(b"word\n")
            text = b"".join([chunk.data async for chunk in t.output]).decode()
        assert "30 90" in text
        assert "40 100" in text
        assert "got word" in text

    async def test_orphans_end_with_it(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level) as sb:
            await sb.exec("i=0; while [ $i -lt 150 ]; do (setsid sleep 600 &) ; i=$((i+1)); done")
            async with asyncio.timeout(15):
                await sb.destroy()
        assert (await sb.inspect()).state is State.GONE


class UserContract(Contract):
    """Who runs a command."""

    async def test_the_ordinary_user(self, sb: AsyncSandbox) -> None:
        uid = int((await sb.exec(["id", "-u"])).text)
        if Flag.USERS in sb.flags:
            assert uid == 1000
            assert (await sb.exec("echo ~")).text == "/home/user\n"
        assert (await sb.exec("cat /proc/self/status | grep -i nonewprivs")).text.split()[-1] == "1"

    async def test_root_on_request(self, sb: AsyncSandbox) -> None:
        if Flag.USERS not in sb.flags:
            with pytest.raises(Unsupported):
                await sb.exec(["id"], user="root")
            return
        assert (await sb.exec(["id", "-u"], user="root")).text == "0\n"
        with pytest.raises(BadRequest, match=r"'nobody'.*'root' or 'user'"):
            await sb.exec(["id"], user="nobody")
        await sb.files.write("/etc/mine", b"x", user="root")
        with pytest.raises(PermissionError):
            await sb.files.write("/etc/mine", b"y")


class FileContract(Contract):
    """Files, where a kernel is needed."""

    async def test_kinds_and_links(self, sb: AsyncSandbox) -> None:
        await sb.exec("mkfifo pipe; ln -s /nowhere dangling; ln -s a link; echo x > a; mkdir dir")
        kinds = {entry.name: entry.type for entry in await sb.files.list()}
        assert kinds["pipe"] is FileType.FIFO
        assert kinds["link"] is FileType.SYMLINK
        assert kinds["dir"] is FileType.DIRECTORY
        assert await sb.files.read("link") == b"x\n"
        async with asyncio.timeout(5):
            with pytest.raises(FileKind):
                await sb.files.read("pipe")
            with pytest.raises(IsADirectoryError):
                await sb.files.read("dir")
            with pytest.raises(FileNotFoundError):
                await sb.files.read("dangling")

    async def test_undecodable_names(self, sb: AsyncSandbox) -> None:
        await sb.files.write("odd-\udcff", b"1")
        assert [entry.name for entry in await sb.files.list() if entry.name.startswith("odd")] == [
            "odd-\udcff"
        ]
        assert (await sb.exec([b"cat", b"odd-\xff"])).stdout == b"1"

    async def test_an_atomic_write_that_fails_leaves_the_old(self, sb: AsyncSandbox) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"new"
            raise RuntimeError("the source failed")

        await sb.files.write("a", b"old")
        with pytest.raises(RuntimeError):
            await sb.files.write("a", broken(), atomic=True)
        assert await sb.files.read("a") == b"old"
        assert [entry.name for entry in await sb.files.list()].count("a") == 1

    async def test_watch(self, sb: AsyncSandbox) -> None:
        with pytest.raises(FileMissing):
            await sb.files.watch("nothing")
        watching = await sb.files.watch(".")
        await sb.exec("echo x > fresh")
        async with asyncio.timeout(5):
            event = await anext(watching)
        assert (event.kind, event.path) == (FileEventKind.CREATED, "fresh")
        await watching.aclose()  # type: ignore[attr-defined]

    async def test_trees_up_and_down(self, sb: AsyncSandbox, tmp_path: Path) -> None:
        source = tmp_path / "up"
        (source / "d").mkdir(parents=True)
        (source / "d" / "a").write_bytes(b"1" * 1000)
        (source / "b").write_bytes(b"2")
        (source / "link").symlink_to("b")
        await sb.files.upload(source, "tree")
        assert (await sb.exec("cat tree/link; wc -c < tree/d/a")).text.split() == ["21000"]
        await sb.files.download("tree", tmp_path / "down")
        assert (tmp_path / "down" / "d" / "a").read_bytes() == b"1" * 1000
        assert (tmp_path / "down" / "link").is_symlink()

    async def test_no_host_path_is_followed(self, sb: AsyncSandbox, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("host")
        await sb.exec(["ln", "-s", str(secret), "escape"])
        with pytest.raises((FileNotFoundError, PermissionError, FileProblem)):
            await sb.files.read("escape")
        assert secret.read_text() == "host"  # the control: it is there


class LimitContract(Contract):
    """Ceilings, where the level has them."""

    async def test_memory(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level, limits=Limits(memory_mib=64)) as sb:
            need(sb, Flag.MEMORY_LIMIT)
            # Several processes: no limit of a single one can be what stops them.
            hog = "import time; x = bytearray(40_000_000); time.sleep(1)"
            script = f"for i in 1 2 3 4; do python3 -c '{hog}' & p=\"$p $!\"; done; for q in $p; do wait $q || exit; done"
            result = await sb.exec(script, timeout=30)
            assert result.oom, result
            assert not result.ok
            assert (await sb.exec(["true"])).ok
            assert (await sb.metrics()).oom_kills >= 1

    async def test_processes(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level, limits=Limits(pids=16)) as sb:
            need(sb, Flag.PIDS_LIMIT)
            script = "i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i+1)); done; jobs | wc -l"
            result = await sb.exec(script, timeout=20)
            assert not result.ok or int(result.text or 0) < 17, result
            await asyncio.sleep(0)
            assert (await sb.metrics()).pids <= 17

    async def test_disk(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level, limits=Limits(disk_mib=16)) as sb:
            need(sb, Flag.DISK_QUOTA)
            result = await sb.exec("head -c 50000000 /dev/urandom > big", timeout=60)
            assert not result.ok
            assert (await sb.files.stat("big")).size < 20_000_000
            await sb.files.remove("big")
            assert (await sb.exec("echo ok > small && cat small")).text == "ok\n"

    async def test_open_files(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level, limits=Limits(open_files=64)) as sb:
            assert (await sb.exec("ulimit -n")).text == "64\n"


class PauseContract(Contract):
    """Freezing, where the level can."""

    async def test_a_pause_stops_everything_and_does_not_count(self, sb: AsyncSandbox) -> None:
        need(sb, Flag.PAUSE)
        p = await sb.start(f"{BEACON} & sleep 0.8; echo end", timeout=2.0)
        await asyncio.sleep(0.3)
        await sb.pause()
        metrics = await sb.metrics()
        await asyncio.sleep(1.5)
        assert (await sb.metrics()).cpu_seconds == pytest.approx(metrics.cpu_seconds, abs=0.02)
        await sb.resume()
        result = await p.wait()
        assert (result.text, result.timed_out) == ("end\n", False)


class IsolationContract(Contract):
    """The plainest facts of each flag; escape attempts have tests of their own."""

    async def test_processes_of_others_are_invisible(self, sb: AsyncSandbox) -> None:
        need(sb, Flag.PID_NAMESPACE)
        pids = [int(name) for name in (await sb.exec("ls /proc")).text.split() if name.isdigit()]
        assert len(pids) < 8
        assert 1 in pids

    async def test_loopback_only(self, sb: AsyncSandbox) -> None:
        need(sb, Flag.LOOPBACK)
        lines = (await sb.exec(["cat", "/proc/net/dev"])).text.splitlines()[2:]
        assert [line.split(":")[0].strip() for line in lines] == ["lo"]

    async def test_no_sockets(self, sb: AsyncSandbox) -> None:
        need(sb, Flag.NO_SOCKETS)
        script = "import socket; socket.socketpair(); socket.socket()"
        result = await sb.exec(["python3", "-c", script])
        assert not result.ok
        assert b"PermissionError" in result.stderr

    async def test_nothing_carries_over(self, dsec: AsyncDsec, level: Level) -> None:
        async with await dsec.sandboxes.create(level=level) as first:
            await first.exec('echo mine > left; echo mine > "${TMPDIR:-/tmp}/left"; echo mine > ~/left')
        async with await dsec.sandboxes.create(level=level) as second:
            found = await second.exec('cat left "${TMPDIR:-/tmp}/left" ~/left 2>/dev/null')
            assert found.stdout == b""
            assert second.info.session_id != first.info.session_id


class RuntimeContract(
    EngineContract,
    ShellContract,
    UserContract,
    FileContract,
    LimitContract,
    PauseContract,
    IsolationContract,
):
    """All of it."""
