"""One command from intent to recorded result, whoever still waits for it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from dsec.errors import DsecError, NotFound, ProtocolError, RuntimeUnavailable, UnknownOutcome
from dsec.model.execs import Cause, Command, ExecRequest, ExecResult, Exit, PtySize
from dsec.model.ids import ExecId
from dsec.model.sandbox import Flag
from dsec.node import drafts
from dsec.node.clock import Clock
from dsec.node.guests import Guests
from dsec.node.handles import Handle
from dsec.node.output import Hash, Output
from dsec.node.work import Work
from dsec.ports.guest import Guest, GuestExec
from dsec.ports.journal import Journal

SIGKILL: Final = int(signal.SIGKILL)
RECONNECTS: Final = 3
END_PATIENCE: Final = 2.0  # seconds for the news of a sandbox's death to follow the loss of its connection
STDIN_PIECE: Final = 1 << 16
TOLD_MOST: Final = 16  # ended commands that a guest is let to forget together
TOLD_BYTES: Final = 4096  # of output, beyond which it is told at once: it keeps the last of it
TOLD_AFTER: Final = 0.02  # seconds
TOLD_KEPT: Final = 256


@dataclass(slots=True, eq=False)
class Run:
    """One command.

    ``command`` is None for one that an earlier engine started. ``started`` is set (or fails) when the guest has it.
    ``verdict``: why it is no longer followed.
    """

    id: ExecId
    handle: Handle
    request: ExecRequest
    command: Command | None
    output: Output
    stdin: AsyncIterator[bytes] | None = None
    argv: tuple[str, ...] = ()
    started_at: float = field(default_factory=time.time)
    oom_before: int = 0
    followed: GuestExec | None = None
    started: asyncio.Future[None] | None = None
    task: asyncio.Task[ExecResult] | None = None
    exit: Exit | None = None
    waiter: asyncio.Future[None] | None = None
    verdict: DsecError | None = None
    record: bool = True
    fed: Hash | None = None
    unwanted: bool = False

    @property
    def settled(self) -> asyncio.Future[ExecResult]:
        if self.task is None:
            raise RuntimeError("a run is launched before it is waited for")
        return self.task

    def wake(self, _: object = None) -> None:
        """Whoever waits for the result may look at the task."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def abandon(self, error: DsecError, *, record: bool = True) -> None:
        if self.verdict is None and self.exit is None and self.task is not None and not self.task.done():
            self.verdict, self.record = error, record
            self.task.cancel()


class Runner:
    """Drives runs. Each is a task of the engine."""

    def __init__(self, journal: Journal, guests: Guests, work: Work, clock: Clock) -> None:
        self._journal = journal
        self._guests = guests
        self._work = work
        self._clock = clock

    def launch(self, run: Run) -> asyncio.Task[ExecResult]:
        """Start it."""
        run.oom_before = run.handle.oom_kills
        run.handle.runs[run.id] = run
        run.handle.busy += 1
        run.task = self._work.start(self._drive(run))
        return run.task

    async def finished(self, run: Run) -> ExecResult:
        """Launch it and wait; when the *waiter* is cancelled, it is killed and the task goes on until that is recorded."""
        run.waiter = asyncio.get_running_loop().create_future()
        task = self.launch(run)
        task.add_done_callback(
            run.wake
        )  # the job itself wakes us sooner, unless it is cancelled before it begins
        try:
            await run.waiter
        except asyncio.CancelledError:
            if not task.done():
                self.kill(run)
            raise
        return await task

    def kill(self, run: Run) -> None:
        """Nobody waits for it any more: end its tree, now or as soon as it has started."""
        run.unwanted = True
        if run.followed is not None:
            self._work.spawn(self._kill(run))

    async def _kill(self, run: Run) -> None:
        if run.task is not None and not run.task.done():
            await self.signal(run, SIGKILL, tree=True)

    async def signal(self, run: Run, signo: int, *, tree: bool) -> None:
        """Signal a command; one that has ended is not an error."""
        if run.exit is not None:
            return
        guest = await self._guests.get(run.handle)
        try:
            await guest.signal(run.id, signo, tree=tree)
        except NotFound:
            return

    async def resize(self, run: Run, size: PtySize) -> None:
        """Tell its terminal a size; one that has ended is not an error."""
        if run.exit is None:
            await (await self._guests.get(run.handle)).resize(run.id, size)

    async def _drive(self, run: Run) -> ExecResult:
        handle = run.handle
        try:
            return await self._recorded(run)
        finally:
            run.output.finish()
            handle.runs.pop(run.id, None)
            handle.busy -= 1
            handle.used = self._clock.boot()
            run.wake()

    async def _recorded(self, run: Run) -> ExecResult:
        try:
            exit_ = await self._outcome(run)
        except asyncio.CancelledError:
            if run.verdict is None:
                raise  # the engine closes; a later one finds out how this ended
            await self._failed(run, run.verdict)
            raise run.verdict from None
        except DsecError as exc:
            await self._failed(run, exc)
            raise
        oom = await self._oom(run, exit_)
        result = _result(run, exit_, oom=oom)
        stdin = "sha256:" + run.fed.hexdigest() if run.fed is not None else ""
        await self._journal.append(drafts.exec_result(run.handle.info.id, result, exit_, run.output, stdin))
        self._told(run, exit_)
        return result

    async def _failed(self, run: Run, error: DsecError) -> None:
        """Record that there is no outcome; whoever waits for the start hears it too."""
        if run.started is not None and not run.started.done():
            run.started.set_exception(error)
            run.started.exception()  # heard even when nobody waits
        if run.record:
            await self._journal.append(drafts.exec_failure(run.handle.id, run.id, error))

    async def _outcome(self, run: Run) -> Exit:
        feeding: asyncio.Task[None] | None = None
        await self._begin(run)
        if run.started is not None:
            run.started.set_result(None)
        if run.unwanted:
            self._work.spawn(self._kill(run))
        if run.request.stdin is not None or run.stdin is not None:
            feeding = self._work.start(self._feed(run))
        try:
            run.exit = await self._follow(run)
            return run.exit
        finally:
            if feeding is not None:
                feeding.cancel()

    async def _begin(self, run: Run) -> None:
        if run.command is None:
            guest = await self._guests.get(run.handle)
            run.followed = await guest.attach(run.id)
            return
        await self._journal.append(drafts.exec_intent(run.handle.info.id, run.command, run.request))
        guest = await self._guests.get(run.handle)
        try:
            run.followed = await guest.exec(run.command)
        except RuntimeUnavailable as exc:
            loss = run.handle.loss("before the command was started")
            if loss is not None:
                raise loss from exc
            if not guest.lost:
                raise
            # Only the connection was lost and the command never started: once more, over a new one.
            run.followed = await (await self._guests.get(run.handle)).exec(run.command)

    async def _follow(self, run: Run) -> Exit:
        output, left = run.output, RECONNECTS
        while True:
            followed = run.followed
            assert followed is not None
            try:
                async for chunk in followed.chunks():
                    if output.take(chunk):
                        await output.room()
                return await followed.wait()
            except (UnknownOutcome, RuntimeUnavailable, ProtocolError) as exc:
                left -= 1
                run.followed = await self._again(run, exc, left)

    async def _again(self, run: Run, cause: DsecError, left: int) -> GuestExec:
        """Follow on over a new connection.  Raises: SandboxFailed, UnknownOutcome: there is nothing to follow."""
        handle = run.handle
        doing = "while the command ran"
        if left > 0 and handle.loss(doing) is None:
            try:
                guest = await self._guests.get(handle)
                return await guest.attach(
                    run.id, stdout=run.output.stdout.seen, stderr=run.output.stderr.seen
                )
            except DsecError:
                await self._news(handle)
        raise handle.loss(doing) or UnknownOutcome(
            f"the command was lost with the connection to {handle.id}: {cause.message}",
            sandbox=handle.id,
            exec=run.id,
        ) from cause

    async def _news(self, handle: Handle) -> None:
        """Wait a little for the news that the sandbox ended."""
        try:
            async with asyncio.timeout(END_PATIENCE):
                await handle.ending.wait()
        except TimeoutError:
            return

    async def _feed(self, run: Run) -> None:
        followed = run.followed
        assert followed is not None
        try:
            if run.request.stdin is not None:
                view = memoryview(run.request.stdin)
                for start in range(0, len(view), STDIN_PIECE):
                    await followed.send(bytes(view[start : start + STDIN_PIECE]))
            if run.stdin is not None:
                run.fed = sha256()
                async for piece in run.stdin:
                    run.fed.update(piece)
                    await followed.send(piece)
            await followed.close_stdin()
        except Exception:  # noqa: BLE001 - the source of stdin failed, or the command is gone: then stdin ends here
            await self._end_stdin(followed)

    async def _end_stdin(self, followed: GuestExec) -> None:
        try:
            await followed.close_stdin()
        except DsecError:
            return

    async def _oom(self, run: Run, exit_: Exit) -> bool:
        killed = exit_.cause is Cause.ITSELF and (exit_.signal == SIGKILL or exit_.code == 128 + SIGKILL)
        if not killed or Flag.MEMORY_LIMIT not in run.handle.info.flags:
            return False
        try:
            now = (await run.handle.runtime.metrics(run.handle.id)).oom_kills
        except DsecError:
            return False
        run.handle.oom_kills = max(run.handle.oom_kills, now)
        return now > run.oom_before

    def _told(self, run: Run, exit_: Exit) -> None:
        """The guest may forget it: soon and together with others, unless it holds much of it."""
        handle = run.handle
        handle.told.append(run.id)
        if len(handle.told) >= TOLD_MOST or exit_.stdout_bytes + exit_.stderr_bytes > TOLD_BYTES:
            self._work.spawn(self._forget(handle))
        elif len(handle.told) == 1:
            self._work.spawn(self._forget_soon(handle))

    async def _forget_soon(self, handle: Handle) -> None:
        await asyncio.sleep(TOLD_AFTER)
        await self._forget(handle)

    async def _forget(self, handle: Handle) -> None:
        guest: Guest | None = handle.guest
        if guest is None or guest.lost:
            del handle.told[:-TOLD_KEPT]  # the rest with the next ones, over a new connection
            return
        told, handle.told = handle.told, []
        if not told:
            return
        try:
            await guest.forget(*told)
        except DsecError:
            return  # whoever connects next finds them ended, recorded, and forgets them then


def _result(run: Run, exit_: Exit, *, oom: bool) -> ExecResult:
    output = run.output
    stdout, stderr = bytes(output.stdout.kept), bytes(output.stderr.kept)
    # What init says it produced counts too: the command may have gone on after the last byte that was sent.
    made = max(output.stdout.seen + output.stderr.seen, exit_.stdout_bytes + exit_.stderr_bytes)
    dropped = max(made - len(stdout) - len(stderr), 0)
    return ExecResult(
        id=run.id,
        exit_code=exit_.code,
        stdout=stdout,
        stderr=stderr,
        signal=exit_.signal,
        timed_out=exit_.cause is Cause.TIMEOUT,
        truncated=dropped > 0,
        dropped=dropped,
        oom=oom,
        duration=exit_.wall,
    )
