"""Who serves a home now, and taking over from a server that commands started for themselves.

Such a server is nobody's: whoever starts one on purpose gets the engine from it. Sandboxes live on, and commands that talk to it find its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.cli.output import note
from dsec.cli.starting import SOCKET, SPARE, alone

_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_ASK: Final = 2.0  # seconds
_HAND_OVER: Final = 20.0  # seconds: it answers what it was asked first


@dataclass(frozen=True, slots=True)
class Incumbent:
    """A server that answers.

    Attributes:
        pid: of its process. spare: commands started it for themselves. handle: on the process; it never means another one.
    """

    pid: int
    spare: bool
    handle: int

    def end(self) -> None:
        """Ask it to end, and wait until it has, not for ever; one that has ended is no error."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGTERM)
            select.select([self.handle], [], [], _HAND_OVER)


@contextlib.asynccontextmanager
async def succession(home: Path) -> AsyncIterator[None]:
    """Take over from a spare server of ``home``; meanwhile no command starts another one. One that somebody else started is left alone, and told of.

    Raises: as :func:`~dsec.cli.starting.alone`.
    """
    async with alone(home):
        await asyncio.to_thread(_take_over, home)
        yield


def _take_over(home: Path) -> None:
    with incumbent(home) as found:
        if found is None:
            return
        if not found.spare:
            note(f"process {found.pid} serves {home} already: waiting until it ends")
            return
        note("taking over from the server that a command had started; sandboxes live on")
        with contextlib.suppress(PermissionError):  # another user's: its lock will tell
            found.end()


@contextlib.contextmanager
def incumbent(home: Path) -> Iterator[Incumbent | None]:
    """The server that answers at the socket of ``home``, None: there is none, or it cannot be seen."""
    handle = -1
    try:
        pid = _peer(home / SOCKET)
        handle = os.pidfd_open(pid)
        if _peer(home / SOCKET) != pid:  # it ended in between, and another process may have its number
            raise ProcessLookupError
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        yield None
    else:
        yield Incumbent(pid, {os.fsencode(one) for one in SPARE} <= set(words), handle)
    finally:
        if handle >= 0:
            os.close(handle)


def _peer(path: Path) -> int:
    """Id of the process that listens there.  Raises: OSError: none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_ASK)
        asking.connect(str(path))
        pid: int = _CREDENTIALS.unpack(
            asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )[0]
    return pid
