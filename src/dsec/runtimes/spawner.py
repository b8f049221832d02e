"""The engine's side of the spawner: starting it, finding it again, asking it.

The spawner outlives a durable engine; a private one ends everything when the pipe that its engine holds closes.
A spawner that died is started again, and adopts what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest, Busy, Conflict, DsecError, NotFound, ProtocolError, RuntimeUnavailable
from dsec.handover import handed
from dsec.model.sandbox import Level
from dsec.runtimes.spawner_link import SpawnerLink
from dsec.wire import spawn
from dsec.wire.spawn import Answer, Created, CreateRequest, EndedEvent, Listed, Op

log: Final = logging.getLogger("dsec.spawner")
_SAFE_FD: Final = 64
_TRIES: Final = 3
_STEADY_SECONDS: Final = 5.0  # one that lived this long is replaced at once, others after a growing pause
_LONGEST_PAUSE: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnerConfig:
    """How to start one.

    Attributes:
        directory: of its socket and log; private to the engine (0700).
        sockets: where inits listen, likewise private; best in memory (a socket file a sandbox).
        programs: the directory of the built programs ``spawner`` and ``init``.
        cgroups: arguments for ``--cgroup``. uids: directory of the machine-wide locks of id blocks, or None.
        readable: host paths that every sandbox of level ``process`` may read.
    """

    level: Level
    directory: Path
    sockets: Path
    programs: Path
    durable: bool
    cgroups: Sequence[str] = ()
    uids: Path | None = None
    readable: Sequence[str] = ()

    def arguments(self) -> list[str]:
        """Its command line."""
        found = [str(self.programs / "spawner"), "--level", self.level.value, "--state", str(self.directory)]
        found += ["--init", str(self.programs / "init")]
        found += ["--durable"] if self.durable else []
        found += ["--uids", str(self.uids)] if self.uids else []
        for group in self.cgroups:
            found += ["--cgroup", group]
        for path in self.readable:
            found += ["--readable", path]
        return found


def _high(fd: int) -> int:
    """A duplicate above those that the new process gets, so that none is overwritten on the way."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _SAFE_FD)


def _nothing() -> None:
    """There is nothing to do meanwhile."""


class Spawner:
    """One spawner process of one level, started when first needed and again when it died.

    Args:
        on_ended: a sandbox ended unasked.
        on_start: run after each (re)connection, before anything else is asked: attaches trees.
    """

    def __init__(
        self,
        config: SpawnerConfig,
        on_ended: Callable[[EndedEvent], None],
        on_start: Callable[[Spawner], Awaitable[None]],
    ) -> None:
        self._config = config
        self._on_ended = on_ended
        self._on_start = on_start
        self._link: SpawnerLink | None = None
        self._greeted: SpawnerLink | None = None  # one that nobody else may use yet: ``on_start`` does
        self._lock = asyncio.Lock()
        self._reviving: asyncio.Task[None] | None = None
        self._pause = 0.0
        self._closed = False
        self._lifeline = -1
        self._child = 0
        self.pid = 0
        self.oom_adj = 0

    async def ready(self) -> SpawnerLink:
        """A live connection.  Raises: RuntimeUnavailable: it cannot be started; its log says why."""
        if self._link is not None and self._link.alive:
            return self._link
        async with self._lock:
            for _ in range(_TRIES):
                if self._closed:
                    raise RuntimeUnavailable("the engine is closing")
                if self._link is not None and self._link.alive:
                    break
                self._link = await self._greet(
                    SpawnerLink(
                        await handed(self._find_or_start, socket.socket.close), self._on_ended, self._lost
                    )
                )
            if self._link is None:
                raise RuntimeUnavailable(
                    f"the spawner of level {self._config.level} does not start: {self._log_tail()}",
                    hint="`dsec doctor` tells which layer of isolation is missing",
                )
            return self._link

    async def _greet(self, link: SpawnerLink) -> SpawnerLink | None:
        """The connection, ready to be used; None when the spawner at the other end was just leaving."""
        try:
            answer = await link.ask(Op.HELLO, spawn.hello())
            if answer.errno:
                raise ProtocolError(f"the spawner refused us: {answer.step}")
            self.pid, self.oom_adj = spawn.decode_hello(answer.body)
            self._greeted = link
            await self._on_start(self)
        except RuntimeUnavailable:
            link.close()
            return None
        except BaseException:
            link.close()
            raise
        finally:
            self._greeted = None
        return link

    def _lost(self, link: SpawnerLink) -> None:
        """It died under us: start another now, so that deadlines are held and deaths are noticed again."""
        known = link is self._link or link is self._greeted
        if self._closed or not known or (self._reviving and not self._reviving.done()):
            return
        loop = asyncio.get_running_loop()
        steady = loop.time() - link.since > _STEADY_SECONDS
        self._pause = 0.0 if steady else min(max(2 * self._pause, 0.02), _LONGEST_PAUSE)
        self._reviving = loop.create_task(self._revive())

    async def _revive(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._pause)
            try:
                await self.ready()
                return
            except (DsecError, OSError) as error:
                log.warning("the spawner of level %s ended and does not start: %s", self._config.level, error)
                self._pause = min(max(2 * self._pause, 0.02), _LONGEST_PAUSE)

    def _log_tail(self) -> str:
        try:
            text = (self._config.directory / "spawner.log").read_text(errors="replace")
        except OSError:
            return "it left no log"
        return text.strip().splitlines()[-1] if text.strip() else "it ended without a word"

    def _find_or_start(self) -> socket.socket:
        directory = os.open(self._config.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # A path through the descriptor: a socket's path may only have 107 bytes.
        path = f"/proc/self/fd/{directory}/spawner.sock"
        try:
            sock = _connect(path)
            if sock is None:
                self._start(path)
                sock = _connect(path)
            if sock is None:
                raise RuntimeUnavailable("the spawner does not listen")
            return sock
        finally:
            os.close(directory)

    def _start(self, path: str) -> None:
        self._reap()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(8)
            log_path = self._config.directory / "spawner.log"
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, log)
            if self._lifeline >= 0:
                os.close(self._lifeline)
            theirs, self._lifeline = os.pipe()
            stack.callback(os.close, theirs)
            sources = {3: _high(listener.fileno()), 4: _high(theirs), 2: _high(log)}
            for fd in sources.values():
                stack.callback(os.close, fd)
            actions: list[tuple[int, int, int]] = [
                (os.POSIX_SPAWN_DUP2, fd, target) for target, fd in sources.items()
            ]
            argv = self._config.arguments()
            try:
                self._child = os.posix_spawn(argv[0], argv, {}, file_actions=actions)
            except OSError as error:
                raise RuntimeUnavailable(
                    f"{argv[0]} cannot be run: {error.strerror}", hint="reinstall the package: it builds it"
                ) from error
        if self._config.durable:  # it goes on in a child of its own
            _wait_for(self._child)
            self._child = 0

    def _reap(self) -> None:
        if self._child:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, os.WNOHANG)

    async def _ask(
        self, op: Op, body: bytes = b"", fds: Sequence[int] = (), meanwhile: Callable[[], None] | None = None
    ) -> Answer:
        """Whatever can be asked twice is asked again when the spawner ends meanwhile; so is what it never read."""
        for left in reversed(range(_TRIES)):
            link = await self.ready()
            sent = False
            try:
                seq = await link.send(op, body, fds)
                sent = True
                if meanwhile is not None:
                    meanwhile()
                return await link.answer(seq)
            except RuntimeUnavailable:
                if not left or link.alive or (sent and op is Op.CREATE):
                    raise
        raise AssertionError("unreachable")

    async def _greeting(self, op: Op, body: bytes = b"", fds: Sequence[int] = ()) -> Answer:
        """As :meth:`_ask`, on the connection that is being made: for ``on_start``, which may not wait for another."""
        if self._greeted is None:
            raise RuntimeUnavailable("the spawner is not connected")
        return await self._greeted.ask(op, body, fds)

    async def tree(self, name: str, fd: int) -> None:
        """As :meth:`add_tree`, for ``on_start``."""
        self._check_tree(name, await self._greeting(Op.TREE, spawn.tree(name), [fd]))

    async def add_tree(self, name: str, fd: int) -> None:
        """Attach a detached mount under this name; one that is attached already is no error.  Raises: RuntimeUnavailable."""
        self._check_tree(name, await self._ask(Op.TREE, spawn.tree(name), [fd]))

    async def remove_tree(self, name: str) -> None:
        """Detach it; what is made of it goes on. Absent is no error.  Raises: RuntimeUnavailable."""
        self._check_tree(name, await self._ask(Op.UNTREE, spawn.tree(name)))

    async def forget_trees(self) -> None:
        """Detach all trees of images, for ``on_start``.  Raises: RuntimeUnavailable."""
        self._check_tree("", await self._greeting(Op.UNTREE, spawn.tree("")))

    @staticmethod
    def _check_tree(name: str, answer: Answer) -> None:
        # One of an earlier release, which lives on for its sandboxes, cannot detach: EPROTO.
        if answer.errno not in (0, errno.EEXIST, errno.ENOENT, errno.EPROTO):
            raise RuntimeUnavailable(f"tree {name!r}: {os.strerror(answer.errno)} ({answer.step})")

    async def create(
        self, request: CreateRequest, fds: Sequence[int], meanwhile: Callable[[], None]
    ) -> Created:
        """``meanwhile`` is called when the spawner has been asked; it must not raise.

        Raises:
            BadRequest, Conflict, Busy, RuntimeUnavailable: with the step of the set-up that failed.
        """
        answer = await self._ask(Op.CREATE, request.encode(), fds, meanwhile)
        if (
            answer.errno == errno.ESRCH
        ):  # killed on its way, perhaps while it waited, before it was anybody's: once more
            answer = await self._ask(Op.CREATE, request.encode(), fds, _nothing)
        if not answer.errno:
            return spawn.decode_created(answer.body)
        words = f"sandbox {request.id}: set-up failed at {answer.step!r}: {os.strerror(answer.errno)}"
        step, code = answer.step, answer.errno
        if answer.errno == errno.EEXIST:
            raise Conflict(words, step=step, errno=code)
        if answer.errno in (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC):
            raise Busy(
                words, hint="the machine holds all the processes or sandboxes it can: retry later", step=step
            )
        if step == "volumes":
            raise BadRequest(
                f"volumes: one of sandbox {request.id} cannot be put in its place: {os.strerror(code)}",
                hint="a directory needs the place of a directory, a file that of a file, and the way there no links",
                errno=code,
            )
        if answer.errno == errno.ECANCELED:
            raise RuntimeUnavailable(f"sandbox {request.id} was destroyed while it was made", step=step)
        raise RuntimeUnavailable(
            words, hint="`dsec doctor` tells which layer of isolation is missing", step=step, errno=code
        )

    async def destroy(self, sandbox: str) -> None:
        """Returns when every process of it is dead.  Raises: Busy, RuntimeUnavailable."""
        answer = await self._ask(Op.DESTROY, spawn.of_id(sandbox))
        if answer.errno:
            raise Busy(f"sandbox {sandbox}: {answer.step}: {os.strerror(answer.errno)}")

    async def freeze(self, sandbox: str, frozen: bool) -> None:
        """Raises: NotFound, RuntimeUnavailable."""
        self._check(sandbox, await self._ask(Op.FREEZE, spawn.of_id(sandbox, int(frozen))))

    async def deadline(self, sandbox: str, at_ns: int) -> None:
        """Raises: NotFound, RuntimeUnavailable."""
        self._check(sandbox, await self._ask(Op.DEADLINE, spawn.of_id(sandbox, at_ns)))

    @staticmethod
    def _check(sandbox: str, answer: Answer) -> None:
        if answer.errno == errno.ENOENT:
            raise NotFound(f"sandbox {sandbox} does not run")
        if answer.errno:
            raise RuntimeUnavailable(f"sandbox {sandbox}: {answer.step}: {os.strerror(answer.errno)}")

    async def remind(self, sandbox: str, at_ns: int) -> None:
        """As :meth:`deadline`, of one that this spawner adopted; for ``on_start``. One that ended is no error."""
        await self._greeting(Op.DEADLINE, spawn.of_id(sandbox, at_ns))

    async def adopted(self) -> tuple[Listed, ...]:
        """As :meth:`list`, for ``on_start``."""
        return await self._list(self._greeting)

    async def list(self) -> tuple[Listed, ...]:
        """What runs.  Raises: RuntimeUnavailable."""
        return await self._list(self._ask)

    @staticmethod
    async def _list(ask: Callable[[Op, bytes], Awaitable[Answer]]) -> tuple[Listed, ...]:
        found: list[Listed] = []
        number = 0
        while True:
            answer = await ask(Op.LIST, spawn.bucket(number))
            if answer.errno:
                raise RuntimeUnavailable(f"list: {answer.step}")
            number, some = spawn.decode_list(answer.body)
            found.extend(some)
            if not number:
                return tuple(found)

    async def idle(self) -> bool:
        """Connected, and it has no sandbox."""
        if self._link is None or not self._link.alive:
            return False
        try:
            return not await self.list()
        except RuntimeUnavailable:
            return False

    async def close(self, *, end: bool) -> None:
        """Leave it (``end=False``: its sandboxes live on), or end it and everything it holds."""
        self._closed = True
        async with self._lock:
            if self._reviving is not None:
                self._reviving.cancel()
            link, self._link = self._link, None
            if link is not None and link.alive and end:
                with contextlib.suppress(RuntimeUnavailable):
                    await link.ask(Op.SHUTDOWN)
            if link is not None:
                link.close()
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            if self._child and end:
                await asyncio.to_thread(_wait_for, self._child)
                self._child = 0


def _wait_for(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _connect(path: str) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
