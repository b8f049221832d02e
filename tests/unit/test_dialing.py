"""Whose network is entered: a process is believed to be a sandbox's only when group and spawner both say so after it is held."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from dsec.errors import Conflict, NotFound, RuntimeUnavailable, TimedOut
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.runtimes import dialing
from dsec.runtimes.dialing import Dialer

pytestmark = pytest.mark.anyio

SB, SLOT = new_sandbox_id(), 7


@pytest.fixture
def other() -> Iterator[int]:
    """A process of somebody else."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def zombie() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended, and for which nobody waited yet."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    del reader
    writer.close()


class Says:
    """What group and spawner say, as a test orders it."""

    def __init__(self, pid: int) -> None:
        self.member = True
        self.runs: tuple[int, int] | None = (pid, SLOT)
        self.asked = 0
        self.dialer = Dialer(lambda slot, pid: self.member, self._runs)

    async def _runs(self, sandbox: SandboxId) -> tuple[int, int] | None:
        self.asked += 1
        return self.runs

    async def dial(self, pid: int) -> None:
        (await self.dialer.dial(SB, pid, SLOT, 1, 1.0)).close()


@pytest.fixture
async def says(other: int) -> AsyncIterator[Says]:
    made = Says(other)
    yield made
    made.dialer.close()


async def test_a_process_outside_its_group_is_a_stranger(says: Says, other: int) -> None:
    says.member = False
    with pytest.raises(NotFound):
        await says.dial(other)
    assert not says.asked


@pytest.mark.parametrize("runs", [None, (1, SLOT), "another slot"])
async def test_what_the_spawner_does_not_have_is_not_entered(says: Says, other: int, runs: object) -> None:
    says.runs = (other, SLOT + 1) if runs == "another slot" else runs  # type: ignore[assignment]
    with pytest.raises(NotFound):
        await says.dial(other)


async def test_a_process_that_ended_is_nobody(says: Says, zombie: subprocess.Popen[bytes]) -> None:
    """As long as nobody waited for it its number is there, and what could be read of it; the descriptor tells that it has ended."""
    with pytest.raises(NotFound):
        await says.dial(zombie.pid)
    zombie.wait()
    with pytest.raises(NotFound):
        await says.dial(zombie.pid)


@pytest.mark.needs_root
async def test_the_network_of_this_process_is_never_taken_for_a_sandboxs(says: Says, other: int) -> None:
    """All that is asked says yes: and still nothing of the host is reached, for that process has no network of its own."""
    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    with pytest.raises(RuntimeUnavailable, match="no network of its own"):
        await says.dialer.dial(SB, other, SLOT, port, 1.0)
    _, writer = await asyncio.open_connection("127.0.0.1", port)  # which does listen
    writer.close()
    listener.close()


@pytest.mark.needs_root
async def test_it_is_proven_once_and_nothing_is_left(says: Says, other: int) -> None:
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(RuntimeUnavailable):
            await says.dial(other)
    assert says.asked == 1
    assert threading.active_count() <= before + 1
    pidfds = [name for name in descriptors() if "pidfd" in name]
    assert len(pidfds) == 1
    says.dialer.forget(SB)
    assert not [name for name in descriptors() if "pidfd" in name]


async def test_cancelled_in_the_moment_in_which_it_comes(
    says: Says, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(dialing, "_begun", lambda *_: ours)
    loop = asyncio.get_running_loop()
    soon = loop.call_soon_threadsafe

    def handing(call: Callable[..., object], *given: object) -> asyncio.Handle:
        if call.__name__ != "hand":
            return soon(call, *given)
        return soon(lambda: (call(*given), task.cancel()))

    monkeypatch.setattr(loop, "call_soon_threadsafe", handing)
    task = asyncio.ensure_future(says.dialer.dial(SB, other, SLOT, 1, 1.0))
    with pytest.raises(asyncio.CancelledError):
        await task
    theirs.setblocking(False)
    assert theirs.recv(1) == b""  # the other end is closed
    theirs.close()


def beginning(port: int) -> socket.socket:
    """As in another network: a socket that connects."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", port))
    return sock


async def test_a_program_that_takes_nobody_keeps_no_thread_waiting(
    says: Says, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is full, so that the kernel answers nobody: hundreds wait, in as many sockets, and end in time; others get through meanwhile."""
    monkeypatch.setattr(dialing, "_begun", lambda _, port: beginning(port))
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        full = [beginning(deaf.getsockname()[1]) for _ in range(8)]
        before, port = threading.active_count(), deaf.getsockname()[1]
        dial = says.dialer.dial
        waiting = [asyncio.ensure_future(dial(SB, other, SLOT, port, 0.5)) for _ in range(300)]
        listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with listener:
            where = listener.sockets[0].getsockname()[1]
            (await dial(SB, other, SLOT, where, 10.0)).close()
        assert threading.active_count() <= before + 20
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in ended} == {TimedOut}
        for sock in full:
            sock.close()


async def test_one_that_is_refused_says_so(says: Says, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_begun", lambda _, port: beginning(port))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    before = len(descriptors())
    with pytest.raises(Conflict, match="nothing listens"):
        await says.dialer.dial(SB, other, SLOT, port, 10.0)
    says.dialer.forget(SB)
    assert len(descriptors()) <= before
