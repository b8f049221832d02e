"""One command of ours as a coroutine: its loop, its signals, its engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import typer
import uvloop

from dsec.cli.codes import SIGNALLED
from dsec.cli.output import STDERR, is_tty, note
from dsec.cli.progress import shown
from dsec.cli.starting import local_server
from dsec.client.aio import AsyncDsec as Client
from dsec.errors import BadRequest, Busy, Conflict, Denied
from dsec.model.sandbox import Level
from dsec.wiring.servers import server
from dsec.wiring.settings import Settings, default_home, host_paths_of

Forward = Callable[[int], Awaitable[None]]

_CAUGHT: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
WAIT: Final = 10.0  # seconds for another command of ours to end
URL: Final = "DSEC_URL"
"""The variable that names a server."""
GLANCE: Final = 0.5  # ... when the records will do as well
_PATIENCE: Final = 3  # signals until we leave without waiting any longer


class Signals:
    """What a signal does: it ends us, cleaning up first; or, while a command is attended, it is the command's."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._loop = task.get_loop()
        self._forward: Forward | None = None
        self._sent: set[asyncio.Task[None]] = set()
        self._count = 0
        self.first = 0
        for signo in _CAUGHT:
            if signo != signal.SIGHUP or signal.getsignal(signo) is not signal.SIG_IGN:  # under `nohup`
                self._loop.add_signal_handler(signo, self._caught, signo)

    def _caught(self, signo: int) -> None:
        if self._forward is not None:
            sending = self._loop.create_task(_quietly(self._forward(signo)))
            self._sent.add(sending)
            sending.add_done_callback(self._sent.discard)
            return
        self._count += 1
        if not self.first:
            self.first = signo
            self._task.cancel()
        elif self._count >= _PATIENCE:
            os._exit(SIGNALLED + signo)  # what is private is ended by its spawner

    @contextlib.contextmanager
    def to(self, forward: Forward) -> Iterator[None]:
        """Meanwhile signals go there."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None


async def _quietly(work: Awaitable[None]) -> None:
    with contextlib.suppress(
        Exception
    ):  # the command has ended, or its sandbox: whoever waits for it is told
        await work


def conduct(work: Callable[[Signals], Coroutine[Any, Any, int]]) -> None:
    """Run a command of ours to its end and leave with its exit code.  Raises: typer.Exit, DsecError."""
    caught: list[Signals] = []

    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None
        caught.append(Signals(task))
        return await work(caught[0])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            code = runner.run(main())
        except asyncio.CancelledError:
            code = SIGNALLED + (caught[0].first if caught else signal.SIGINT)
    if code:
        raise typer.Exit(code)


def engine_home() -> Path:
    """The state directory of the engine that lasting sandboxes belong to.  Raises: BadRequest, Denied."""
    return _home() / "engine"


def _home() -> Path:
    """What everything of ours is below.  Raises: BadRequest: it is no directory. Denied: it is somebody else's."""
    home = default_home()
    try:
        if home.exists() and not home.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if home.is_dir() and not os.access(home, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        kind = Denied if isinstance(error, PermissionError) else BadRequest
        raise kind(
            f"home: {home}: {error.strerror}",
            hint="let $DSEC_HOME name a directory of yours, or one that can be made",
            home=str(home),
        ) from error
    return home


def announce_build(level: str) -> None:
    """Tell a person at a terminal why the first sandbox takes some seconds.  Raises: BadRequest, Denied: the home."""
    if level != Level.CONTAINER:
        return  # the only one that has an image, and so needs a home for a private engine
    built = _home() / "store" / "names" / "system"
    if not built.exists() and os.geteuid() == 0 and is_tty(STDERR):
        note("the base image is built first, once: some seconds")


def elsewhere() -> str:
    """The URL of the server that ``$DSEC_URL`` names, "" = the engine is our own."""
    return os.environ.get(URL, "")


def _host_paths() -> tuple[Path, ...] | None:
    """What ``$DSEC_HOST_PATHS`` allows volumes to show.  Raises: BadRequest."""
    return host_paths_of(os.environ.get("DSEC_HOST_PATHS"))


def check_home() -> None:
    """Whether there can be a store.  Raises: BadRequest, Denied."""
    _home()


def private(pool: int = 0, *, quiet: bool = False) -> Client:
    """An engine whose sandboxes end with it: one at a time, so that nothing is made ahead unless asked for.

    Args:
        quiet: tell nobody what a build of an image is doing.
    """
    engines = import_module("dsec.wiring.engines")  # slow to load: other commands need a client alone
    settings = Settings(shelf=1 + pool, pool=pool, host_paths=_host_paths(), progress=shown(quiet))
    engine: Client = engines.AsyncDsec(settings=settings)
    return engine


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """An engine that somebody else has is busy: later it will be free.  Raises: Busy."""
    try:
        yield
    except Conflict as error:
        if "home" not in error.facts:
            raise
        raise Busy(
            f"another command or engine uses {engine_home()}",
            hint="wait until it has ended; `dsec ls`, `ps`, `events` and `audit` work meanwhile",
            home=str(engine_home()),
        ) from error


@contextlib.asynccontextmanager
async def durable(wait: float = WAIT, *, quiet: bool = False) -> AsyncIterator[Client]:
    """The engine of lasting sandboxes: behind the server that ``$DSEC_URL`` names, or behind our own, which is started if need be.

    Raises:
        Busy: another process has had the engine for ``wait`` seconds. RuntimeUnavailable: the server cannot be reached, or not started.
    """
    del quiet
    url = elsewhere()
    _host_paths()  # what is wrong with them is told here, and not in a log
    client = Client(server(url)) if url else await local_server(_home(), wait)
    async with client:
        yield client
