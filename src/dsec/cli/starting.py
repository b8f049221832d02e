"""The engine of lasting sandboxes as commands of ours reach it: behind `dsec serve` on its socket, which is started when nothing answers.

Two commands at once start one: who starts it holds a lock until it answers. It is no child of ours, has a session of its own and no terminal, and
ends by itself when for some minutes nobody asked for anything and nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from dsec.client.aio import AsyncDsec
from dsec.errors import Busy, Denied, RuntimeUnavailable, StorageFull
from dsec.wiring.servers import server

SOCKET: Final = "dsec.sock"
LOG: Final = "serve.log"
LOCK: Final = "serve.lock"
IDLE: Final = 300  # seconds without work until it ends
START: Final = 60.0  # seconds: an engine may have much to put in order when it opens
SPARE: Final = ("serve", "--socket-only", "--until-idle")
"""Words of a server that commands start for themselves."""
_LOOK: Final = 0.02
_LOG_BYTES: Final = 1 << 20  # beyond which a log begins anew
_TAKEN: Final = 75  # its exit code when somebody else has the engine


async def local_server(home: Path, wait: float) -> AsyncDsec:
    """An open client of the server of ``home``, which is started if need be.

    Args:
        wait: seconds for whoever else has the engine to let go of it.

    Raises:
        Busy: another process has the engine. Denied, StorageFull: ``home``. RuntimeUnavailable: it does not start; the message says why.
    """
    with contextlib.suppress(RuntimeUnavailable):
        return await _client(home)
    async with alone(home):
        with contextlib.suppress(RuntimeUnavailable):
            return await _client(home)  # somebody started it meanwhile
        process = await asyncio.to_thread(_start, home, wait)
        return await _answered(home, process)


async def _client(home: Path) -> AsyncDsec:
    """Raises: RuntimeUnavailable: nothing answers."""
    client = AsyncDsec(server(f"unix://{home / SOCKET}", ""))
    await client.open()
    return client


@contextlib.asynccontextmanager
async def alone(home: Path) -> AsyncIterator[None]:
    """Meanwhile no other command starts one.  Raises: Denied, StorageFull, RuntimeUnavailable: ``home``."""
    lock = await asyncio.to_thread(_lock_file, home)
    try:
        async with asyncio.timeout(START):
            while not _locked(lock):  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(_LOOK)
        yield
    except TimeoutError:
        raise Busy(
            f"another command has been starting `dsec serve` for {START:g} s", hint="try again"
        ) from None
    finally:
        os.close(lock)


def _lock_file(home: Path) -> int:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        kinds = {errno.EACCES: Denied, errno.EPERM: Denied, errno.EROFS: Denied, errno.ENOSPC: StorageFull}
        kind = kinds.get(error.errno or 0, RuntimeUnavailable)
        raise kind(
            f"{home}: {error.strerror}", hint="$DSEC_HOME names another place", home=str(home)
        ) from error


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(home: Path, wait: float) -> subprocess.Popen[bytes]:
    """The server, in a session of its own; what it says goes to its log."""
    log = os.open(home / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(log).st_size > _LOG_BYTES:
            os.truncate(log, 0)
        words = [*SPARE, str(IDLE), "--wait", f"{wait:g}"]
        return subprocess.Popen(
            [sys.executable, "-m", "dsec", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "DSEC_HOME": str(home)},
            start_new_session=True,
        )
    finally:
        os.close(log)


async def _answered(home: Path, process: subprocess.Popen[bytes]) -> AsyncDsec:
    """When it answers.  Raises: Busy, RuntimeUnavailable: it ended, or takes too long."""
    loop = asyncio.get_running_loop()
    until = loop.time() + START
    while loop.time() < until:
        code = process.poll()
        with contextlib.suppress(RuntimeUnavailable):
            return await _client(home)
        if code == _TAKEN:
            raise Busy(
                f"another command or engine uses {home / 'engine'}",
                hint="wait until it has ended; `dsec ls`, `ps`, `events` and `audit` work meanwhile",
                home=str(home / "engine"),
            )
        if code is not None:
            said = await asyncio.to_thread(_last_words, home / LOG)
            raise RuntimeUnavailable(f"`dsec serve` ended with code {code}: {said}", hint=f"see {home / LOG}")
        await asyncio.sleep(_LOOK)
    raise RuntimeUnavailable(f"`dsec serve` does not answer after {START:g} s", hint=f"see {home / LOG}")


def _last_words(log: Path) -> str:
    """The last line of a log."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
    return "it said nothing"
