"""Connections to what listens inside a network namespace, begun by a thread that enters it and ends there.

That thread only begins: a program that listens and takes nobody keeps a socket waiting, and no thread.

A pid says nothing by itself: its process may have ended, and the number be another's. What is entered is a process that a pidfd
holds, of which two things were found *after* the pidfd was opened: it is in the control group of the sandbox's slot, and the spawner,
who gives slots away, still has the sandbox in that slot. So it is a process of that sandbox, whichever one, and a sandbox's
processes share one network: seccomp lets none of them enter or make another.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import select
import socket
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from dsec.errors import Busy, Conflict, DsecError, NotFound, RuntimeUnavailable, TimedOut
from dsec.handover import handed
from dsec.model.ids import SandboxId

_CLONE_NEWNET: Final = 0x4000_0000
_HELD: Final = 128  # pidfds

Runs = Callable[[SandboxId], Awaitable[tuple[int, int] | None]]


class Dialer:
    """Connects into sandboxes.

    Args:
        member: whether a pid is in the control group of a slot; blocking. runs: pid and slot of a sandbox as the spawner has it, None when it has none.
    """

    def __init__(self, member: Callable[[int, int], bool], runs: Runs) -> None:
        self._member = member
        self._runs = runs
        self._held: OrderedDict[SandboxId, int] = OrderedDict()  # proven pidfds, the longest unused first

    async def dial(self, sandbox: SandboxId, pid: int, slot: int, port: int, timeout: float) -> socket.socket:
        """See :meth:`dsec.ports.runtime.Runtime.dial`; ``pid`` and ``slot`` as they are remembered here."""
        pidfd = self._held.get(sandbox)
        if pidfd is None:
            pidfd = self._hold(sandbox, await self._proven(sandbox, pid, slot))
        self._held.move_to_end(sandbox)
        try:
            return await _taken(await _in_thread(_again(pidfd), sandbox, port), sandbox, port, timeout)
        except NotFound:  # that process ended; a sandbox that was made anew meanwhile has another
            self.forget(sandbox)
            raise

    def forget(self, sandbox: SandboxId) -> None:
        """It is being ended. Absent is no error."""
        pidfd = self._held.pop(sandbox, None)
        if pidfd is not None:
            os.close(pidfd)

    def close(self) -> None:
        """Forget all."""
        for sandbox in tuple(self._held):
            self.forget(sandbox)

    def _hold(self, sandbox: SandboxId, pidfd: int) -> int:
        self.forget(sandbox)  # two at once
        self._held[sandbox] = pidfd
        if len(self._held) > _HELD:
            self.forget(next(iter(self._held)))
        return pidfd

    async def _proven(self, sandbox: SandboxId, pid: int, slot: int) -> int:
        pidfd = await handed(partial(self._opened, sandbox, pid, slot), os.close)
        try:
            if await self._runs(sandbox) != (pid, slot):
                raise _absent(sandbox)
        except BaseException:
            os.close(pidfd)
            raise
        return pidfd

    def _opened(self, sandbox: SandboxId, pid: int, slot: int) -> int:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise _absent(sandbox) from None
        except OSError as exc:
            raise Busy(f"sandbox {sandbox}: {exc.strerror}", hint="retry in a moment") from exc
        # The second look: what was read of the pid was read of the process that the descriptor holds.
        if self._member(slot, pid) and not _ended(pidfd):
            return pidfd
        os.close(pidfd)
        raise _absent(sandbox)


def _absent(sandbox: SandboxId) -> NotFound:
    return NotFound(f"sandbox {sandbox} does not run here")


def _ended(pidfd: int) -> bool:
    """A pidfd is readable when its process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _again(pidfd: int) -> int:
    """A descriptor of the same.  Raises: Busy: there are no more."""
    try:
        return os.dup(pidfd)
    except OSError as error:
        raise Busy(
            f"no more descriptors: {error.strerror}",
            hint="close connections, or raise the limit of open files",
        ) from error


async def _in_thread(pidfd: int, sandbox: SandboxId, port: int) -> socket.socket:
    """Begin to connect in a thread that nobody else ever uses: it is in another network until it ends. Closes ``pidfd``."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[socket.socket] = loop.create_future()

    def hand(result: socket.socket | BaseException) -> None:
        if isinstance(result, socket.socket):
            result.close() if made.done() else made.set_result(result)
        elif not made.done():
            made.set_exception(result)

    def run() -> None:
        result: socket.socket | BaseException
        try:
            result = _begun(pidfd, port)
        except OSError as exc:
            result = _refused(sandbox, port, exc)
        except BaseException as exc:  # noqa: BLE001 - whoever waits is told, whatever it was
            result = exc
        finally:
            os.close(pidfd)
        try:
            loop.call_soon_threadsafe(hand, result)
        except RuntimeError:  # the loop is closed: nobody waits
            if isinstance(result, socket.socket):
                result.close()

    try:
        threading.Thread(target=run, name=f"dial {port}", daemon=True).start()
    except RuntimeError as exc:
        os.close(pidfd)
        raise Busy("no thread can be started now", hint="retry in a moment") from exc
    return await _arrival(made)


async def _arrival(made: asyncio.Future[socket.socket]) -> socket.socket:
    try:
        return await made
    except asyncio.CancelledError:
        if made.done() and not made.cancelled() and made.exception() is None:
            made.result().close()  # it came in the moment in which nobody wanted it any more
        raise


async def _taken(sock: socket.socket, sandbox: SandboxId, port: int, timeout: float) -> socket.socket:
    """The same, when the program has taken it; otherwise it is closed."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    try:
        loop.add_writer(sock, told.set)
        try:
            async with asyncio.timeout(timeout):
                await told.wait()
        finally:
            loop.remove_writer(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except OSError as exc:
        sock.close()
        raise _refused(sandbox, port, exc) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _begun(pidfd: int, port: int) -> socket.socket:
    """A socket in that network, which connects by itself from now on.  Raises: OSError."""
    outside = os.stat("/proc/self/ns/net").st_ino  # of the main thread
    libc = ctypes.CDLL(None, use_errno=True)  # `os.setns` came with Python 3.12
    if libc.setns(pidfd, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.stat("/proc/thread-self/ns/net").st_ino == outside:
        raise OSError(errno.EPERM, "it has no network of its own")
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(("127.0.0.1", port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def _refused(sandbox: SandboxId, port: int, error: OSError) -> DsecError:
    match error.errno:
        case errno.ECONNREFUSED:
            return Conflict(
                f"nothing listens on port {port} of {sandbox}",
                hint="start the program there, let it listen on 127.0.0.1 or 0.0.0.0, and retry",
                port=port,
            )
        case errno.ESRCH:
            return _absent(sandbox)
        case None | errno.ETIMEDOUT:
            return TimedOut(
                f"port {port} of {sandbox}: the program that listens does not take the connection", port=port
            )
        case _:
            words = error.strerror or type(error).__name__
            return RuntimeUnavailable(f"port {port} of {sandbox}: {words}", hint="retry", port=port)
