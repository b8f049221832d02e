"""One connection to a spawner: requests out, answers and events in."""

from __future__ import annotations

import array
import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dsec.errors import RuntimeUnavailable
from dsec.wire import spawn
from dsec.wire.spawn import Answer, EndedEvent, Op

_ANSWER_SECONDS: Final = 60.0


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that waits for its answer. ``since``: the loop's seconds."""

    op: Op
    since: float
    answer: asyncio.Future[Answer]


class SpawnerLink:
    """See the module. One timer serves all requests: almost none is ever late."""

    def __init__(
        self,
        sock: socket.socket,
        on_ended: Callable[[EndedEvent], None],
        on_lost: Callable[[SpawnerLink], None],
    ) -> None:
        self._sock = sock
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._waiting: dict[int, _Asked] = {}  # oldest first
        self._overdue: asyncio.TimerHandle | None = None
        self._seq = 0
        self.alive = True
        self._loop.add_reader(sock.fileno(), self._readable)

    def _readable(self) -> None:
        # One message a call: the loop calls again at once while there are more.
        try:
            message = self._sock.recv(spawn.MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lose()
            return
        answer = spawn.decode(message)
        if answer.seq:
            asked = self._waiting.pop(answer.seq, None)
            if asked is not None and not asked.answer.done():
                asked.answer.set_result(answer)
        elif answer.errno == 0:
            self._on_ended(spawn.decode_ended(answer.body))

    def _lose(self) -> None:
        if self.alive:
            self.close()
            self._on_lost(self)

    def close(self) -> None:
        """Drop it; whoever waits learns that the spawner is gone."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        if self._overdue is not None:
            self._overdue.cancel()
        for asked in self._waiting.values():
            if not asked.answer.done():
                asked.answer.set_exception(
                    RuntimeUnavailable("the spawner ended", hint="it is started again: retry")
                )
        self._waiting.clear()

    async def ask(self, op: Op, body: bytes = b"", fds: Sequence[int] = ()) -> Answer:
        """Raises: RuntimeUnavailable: it ended, or does not answer."""
        return await self.answer(await self.send(op, body, fds))

    async def send(self, op: Op, body: bytes = b"", fds: Sequence[int] = ()) -> int:
        """The number that :meth:`answer` wants.  Raises: RuntimeUnavailable: it ended, and has not read this."""
        if not self.alive:
            raise RuntimeUnavailable("the spawner ended", hint="it is started again: retry")
        self._seq = seq = self._seq % 0xFFFF_FFFF + 1
        now = self._loop.time()
        self._waiting[seq] = asked = _Asked(op, now, self._loop.create_future())
        if self._overdue is None:
            self._overdue = self._loop.call_at(now + _ANSWER_SECONDS, self._check)
        try:
            await self._send(spawn.encode(op, seq, body), fds, asked)
        except BaseException:
            self._waiting.pop(seq, None)
            raise
        return seq

    def _check(self) -> None:
        """Tell those who have waited too long, and look again when the next one would have."""
        self._overdue = None
        now = self._loop.time()
        for asked in self._waiting.values():
            due = asked.since + _ANSWER_SECONDS
            if due > now:
                self._overdue = self._loop.call_at(due, self._check)
                return
            if not asked.answer.done():
                asked.answer.set_exception(
                    RuntimeUnavailable(
                        f"the spawner did not answer {asked.op.name} within {_ANSWER_SECONDS:.0f} s",
                        hint="see its log; `dsec doctor` tells what is missing",
                    )
                )

    async def answer(self, seq: int) -> Answer:
        """Raises: RuntimeUnavailable: it ended, or does not answer."""
        asked = self._waiting.get(seq)
        if asked is None:
            raise RuntimeUnavailable("the spawner ended", hint="it is started again: retry")
        try:
            return await asked.answer
        finally:
            self._waiting.pop(seq, None)

    async def _send(self, message: bytes, fds: Sequence[int], asked: _Asked) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                self._sock.sendmsg([message], ancillary)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)  # its queue is full: it is working through it
                if asked.answer.done():
                    await asked.answer  # overdue, or the spawner is gone
            except OSError as error:
                self._lose()
                raise RuntimeUnavailable(f"the spawner cannot be reached: {error.strerror}") from error
