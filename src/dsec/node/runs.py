"""One command from intent to recorded result, whoever still waits for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Final

from dsec.errors import Busy, Conflict, DsecError, NotFound, ProtocolError, RuntimeUnavailable, UnknownOutcome
from dsec.failpoints import reach
from dsec.model.execs import Cause, Command, ExecResult, Exit, PtySize
from dsec.model.journal import Phase
from dsec.model.sandbox import Flag, State
from dsec.node import drafts
from dsec.node.clock import Clock
from dsec.node.guests import Guests
from dsec.node.handles import Handle, check_made, refusal
from dsec.node.run import Run
from dsec.node.told import Told
from dsec.node.work import Work, ignore, settled
from dsec.ports.guest import Guest, GuestExec
from dsec.ports.journal import Journal

SIGKILL: Final = int(signal.SIGKILL)
RECONNECTS: Final = 3
END_PATIENCE: Final = 2.0  # seconds for the news of a sandbox's death to follow the loss of its connection
STDIN_PIECE: Final = 1 << 16
FIND_AFTER: Final = 0.05  # seconds between two looks for a record whose append nobody waits for any more
FIND_TIMES: Final = 200
KILL_AGAIN: Final = 0.05  # seconds
BEFORE: Final = "before the command was started"


class Runner:
    """Drives runs. One that nobody waits for is a task of the engine; another is driven by the task of who waits."""

    def __init__(self, journal: Journal, guests: Guests, work: Work, clock: Clock) -> None:
        self._journal = journal
        self._guests = guests
        self._work = work
        self._clock = clock
        self._told = Told(work)

    def launch(self, run: Run) -> asyncio.Task[ExecResult]:
        """Start it as a task of the engine."""
        self._enter(run)
        run.task = self._work.start(self._owned(run))
        return run.task

    async def finished(self, run: Run) -> ExecResult:
        """Run it and wait. When the *waiter* is cancelled, it is killed, and the engine goes on until that is recorded."""
        guest = run.handle.guest
        if guest is None or guest.lost or run.stdin is not None or run.request.stdin is not None:
            self.launch(run)
            return await self.ended(run, partial(self.kill, run))
        self._enter(run)
        try:
            with run.output.awaited():
                run.result = await self._recorded(run)
        except asyncio.CancelledError:
            run.unwanted = True
            run.task = self._work.start(self._owned(run))
            raise
        except BaseException as exc:
            run.error = exc
            self._leave(run)
            raise
        self._leave(run)
        return run.result

    async def ended(self, run: Run, on_cancel: Callable[[], object] = ignore) -> ExecResult:
        """Wait for one that somebody else drives."""
        with run.output.awaited():
            if run.task is None:
                await asyncio.shield(run.settled)
            if run.task is not None:
                return await settled(run.task, on_cancel)
        if run.error is not None:
            raise run.error
        assert run.result is not None
        return run.result

    def kill(self, run: Run) -> None:
        """Nobody waits for it any more: end its tree, now or as soon as it has started."""
        run.unwanted = True
        if run.followed is not None:
            self._work.spawn(self._kill(run))

    async def _kill(self, run: Run) -> None:
        while not run.over:
            try:
                await self.signal(run, SIGKILL, tree=True)
                return
            except Busy:
                # So many commands run that there is no room to say so: nobody else would end this one.
                await asyncio.sleep(KILL_AGAIN)
            except (RuntimeUnavailable, NotFound):
                if not run.handle.ending.is_set() and run.handle.info.state is State.RUNNING:
                    raise
                return  # its sandbox is being ended, and it with that

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

    def _enter(self, run: Run) -> None:
        handle = run.handle
        run.oom_before = handle.oom_kills
        handle.runs[run.id] = run
        handle.busy += 1

    def _leave(self, run: Run) -> None:
        handle = run.handle
        run.output.finish()
        if run.leaving is not None:
            run.leaving(run)
        handle.runs.pop(run.id, None)
        handle.busy -= 1
        handle.use(self._clock.boot())
        run.finish()

    async def _owned(self, run: Run) -> ExecResult:
        """From wherever it is to its recorded end, as a task of the engine."""
        run.driven = True
        try:
            return await self._recorded(run)
        except asyncio.CancelledError:
            if run.verdict is None:
                raise  # the engine closes; a later one finds out how this ended
            await self._failed(run, run.verdict)
            raise run.verdict from None
        finally:
            self._leave(run)

    async def _recorded(self, run: Run) -> ExecResult:
        """Can be cancelled and called again: what was done is not done twice."""
        try:
            exit_ = run.exit or await self._outcome(run)
        except DsecError as exc:
            await self._failed(run, run.verdict or exc)
            if run.verdict is not None:
                raise run.verdict from None
            raise
        oom = await self._oom(run, exit_)
        result = _result(run, exit_, oom=oom)
        if run.recording:
            await self._found(run)
        else:
            run.recording = True
            reach("exec.ended")
            stdin = "sha256:" + run.fed.hexdigest() if run.fed is not None else ""
            draft = drafts.exec_result(run.handle.info.id, result, exit_, run.output, stdin)
            await self._journal.append(draft)
            reach("exec.done")
        self._told.ended(run, exit_)
        return result

    async def _found(self, run: Run) -> None:
        """Wait for the record whose append was under way when its caller was cancelled: it is stored wholly or not at all."""
        for _ in range(FIND_TIMES):
            found = await self._journal.latest(run.handle.id, drafts.EXEC, ref=run.id, limit=1)
            if any(record.phase is Phase.RESULT for record in found):
                return
            await asyncio.sleep(FIND_AFTER)
        raise UnknownOutcome(f"the end of {run.id} could not be recorded", exec=run.id)

    async def _failed(self, run: Run, error: DsecError) -> None:
        """Record that there is no outcome; whoever waits for the start hears it too."""
        if run.started is not None and not run.started.done():
            run.started.set_exception(error)
            run.started.exception()  # heard even when nobody waits
        if run.record and not run.recording:
            run.recording = True
            await self._journal.append(drafts.exec_failure(run.handle.id, run.id, error))

    async def _outcome(self, run: Run) -> Exit:
        feeding: asyncio.Task[None] | None = None
        if run.verdict is not None:
            raise run.verdict
        if run.followed is None:
            await self._begin(run)
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
        handle, command = run.handle, run.command
        if command is None:
            run.followed = await (await self._guests.get(handle)).attach(run.id)
            return
        if not run.intended:
            reach("exec.begin")
            run.intended = True  # an append that has begun is done, also when its caller is cancelled
            await self._journal.append(drafts.exec_intent(handle.info.id, command, run.request))
            reach("exec.recorded")
        if run.verdict is not None:
            raise run.verdict
        if run.unwanted:
            raise Conflict(f"who asked for {run.id} left before it was started", exec=run.id)
        run.followed = await self._posted(run, command)
        reach("exec.started")

    async def _posted(self, run: Run, command: Command) -> GuestExec:
        guest = await self._ready(run)
        try:
            return await guest.post(command)
        except RuntimeUnavailable as exc:
            loss = run.handle.loss(BEFORE)
            if loss is not None:
                raise loss from exc
            if not guest.lost:
                raise
            # Nothing was sent: once more, over a new connection.
            return await (await self._ready(run)).post(command)

    async def _ready(self, run: Run) -> Guest:
        """The connection, when the sandbox still takes commands after all that was awaited since that was asked."""
        handle = run.handle
        check_made(handle)
        guest = await self._guests.get(handle)
        if run.verdict is not None:
            raise run.verdict
        check_made(handle)
        if handle.info.state is not State.RUNNING:
            raise handle.loss(BEFORE) or refusal(handle.info)
        return guest

    async def _follow(self, run: Run) -> Exit:
        output, left = run.output, RECONNECTS
        while True:
            followed = run.followed
            assert followed is not None
            if run.verdict is not None:  # it came while there was nothing yet to let go of
                followed.detach()
                raise run.verdict
            try:
                if run.started is not None and not run.started.done():
                    await followed.begun()
                    run.started.set_result(None)
                async for chunk in followed.chunks():
                    if output.take(chunk):
                        await output.room()
                return await followed.wait()
            except (UnknownOutcome, RuntimeUnavailable, ProtocolError) as exc:
                if followed.refused:
                    raise
                left -= 1
                run.followed = await self._again(run, exc, left)

    async def _again(self, run: Run, cause: DsecError, left: int) -> GuestExec:
        """Follow on over a new connection.  Raises: SandboxFailed, UnknownOutcome: there is nothing to follow."""
        handle = run.handle
        doing = "while the command ran"
        if left > 0 and handle.loss(doing) is None:
            try:
                return await self._attached(run)
            except DsecError:
                await self._news(handle)
        raise handle.loss(doing) or UnknownOutcome(
            f"the command was lost with the connection to {handle.id}: {cause.message}",
            sandbox=handle.id,
            exec=run.id,
        ) from cause

    async def _attached(self, run: Run) -> GuestExec:
        guest, output = await self._guests.get(run.handle), run.output
        before = run.followed
        try:
            return await guest.attach(run.id, stdout=output.stdout.seen, stderr=output.stderr.seen)
        except NotFound:
            if run.command is None or before is None or before.has_begun:
                raise
            # It was sent and never came: init knows every id that it has seen, so this cannot start it twice.
            return await guest.post(run.command)

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
            await followed.begun()
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


def _result(run: Run, exit_: Exit, *, oom: bool) -> ExecResult:
    output = run.output
    stdout, stderr = output.stdout.first(), output.stderr.first()
    # What init says it produced counts too: the command may have gone on after the last byte that was sent.
    made = max(output.stdout.seen + output.stderr.seen, exit_.stdout_bytes + exit_.stderr_bytes)
    dropped = max(made - len(stdout) - len(stderr), 0)
    return ExecResult(
        id=run.id,
        exit_code=exit_.code,
        stdout=stdout,
        stderr=stderr,
        start_errno=exit_.start_errno,
        signal=exit_.signal,
        timed_out=exit_.cause is Cause.TIMEOUT,
        truncated=dropped > 0,
        dropped=dropped,
        oom=oom,
        duration=exit_.wall,
    )
