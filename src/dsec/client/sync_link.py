"""How the blocking client reaches an engine: over a background thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from types import CoroutineType
from typing import Any, Final, Generic, TypeVar

import uvloop

from dsec.errors import Conflict
from dsec.ports.engine import Services

T = TypeVar("T")
U = TypeVar("U")

Connect = Callable[[], Awaitable[Services]]
Undo = Callable[[T], Awaitable[object]]
"""Takes back what was made for a caller who was interrupted before he had it."""

JOIN_PATIENCE: Final = 10.0  # seconds
AHEAD: Final = 8  # pieces of a stream, of at most 256 KiB


class _Crossing(Generic[T]):
    """One awaitable on its way to the loop and its outcome on the way back.

    A bare lock is the cheapest thing a thread can wait on.
    """

    __slots__ = ("_begun", "_done", "_error", "_loop", "_over", "_task", "_value", "_work", "told")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Awaitable[T]) -> None:
        self._loop = loop
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self._task: asyncio.Task[None] | None = None
        self._begun = self._over = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self.told = False  # its own exception was raised: there is nothing left of it

    def begin(self) -> None:
        """On the loop."""
        self._task = self._loop.create_task(self._carry())

    async def _carry(self) -> None:
        """The task itself lets the caller go: a callback at its end would come one turn of the loop later."""
        self._begun = True
        try:
            self._value = await self._work
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self._error = error
        self._let_go()

    def _let_go(self) -> None:
        self._over = True
        self._done.release()

    def cancel(self) -> None:
        """On the loop."""
        task = self._task
        if task is None:  # the interrupt came before `begin` was asked for
            self._ended(None)
        elif not task.done():
            task.add_done_callback(self._ended)
            task.cancel()

    def _ended(self, _: object) -> None:
        """One that was cancelled before its first step never ran, so nobody else lets the caller go."""
        if not self._begun and not self._over:
            if isinstance(self._work, CoroutineType):
                self._work.close()
            self._error = asyncio.CancelledError()
            self._let_go()

    def wait(self) -> None:
        """On the caller's thread; an interrupt (Ctrl-C) leaves it. It may be called again: an interrupt can come when the wait is over."""
        if not self._over:
            self._done.acquire()

    def outcome(self) -> T:
        """Its value, or its exception raised here."""
        error = self._error
        if error is not None:
            self.told, self._error = True, None  # a traceback refers to this frame: keep no cycle
            raise error
        return self._value  # type: ignore[return-value]  # set whenever there is no error

    async def drop(self, undo: Undo[T] | None) -> None:
        """On the loop, for a caller who was interrupted: end the work, and undo what it made all the same."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._error is None and undo is not None:
            await undo(self._value)  # type: ignore[arg-type]  # set whenever there is no error
        self._error = None


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Streams that somebody stopped reading without closing them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Bridge:
    """A daemon thread that runs an event loop. It starts with the first call and ends with :meth:`stop`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        self._drops: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the thread; twice is no error."""
        if self._loop is None:
            self._loop = uvloop.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(self._loop,), name="dsec-sdk", daemon=True
            )
            self._thread.start()
            self._ident = self._thread.ident

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(_ended(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def stop(self) -> None:
        """End the thread; twice is no error."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = self._ident = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(JOIN_PATIENCE)

    def call(self, work: Awaitable[T]) -> T:
        """Run ``work`` on the loop and wait for it. An interrupt cancels it, and waits until it has ended.

        Raises:
            Conflict: the bridge does not run, or this is its own thread.
        """
        return self.make(work, _as_it_is)

    def make(self, work: Awaitable[T], build: Callable[[T], U], undo: Undo[T] | None = None) -> U:
        """As :meth:`call`, for work that makes something: what an interrupt finds made and not yet returned, ``undo`` takes back.

        It does so on the loop, before the interrupt goes on: nobody else would know of the thing. From the return of this on nothing is lost
        as long as its callers only return the value too: the interpreter handles no signal in between.

        Args:
            build: from what the work gave to what is returned; on the caller's thread.
        """
        loop = self._loop
        if loop is None or threading.get_ident() == self._ident:
            if asyncio.iscoroutine(work):
                work.close()
            raise Conflict(
                "this client is not open, or called from its own event loop", hint="use AsyncDsec there"
            )
        crossing = _Crossing(loop, work)
        try:
            loop.call_soon_threadsafe(crossing.begin)
            crossing.wait()
            return build(crossing.outcome())
        except BaseException:
            if not crossing.told:
                last = _Crossing(loop, self._drop(crossing, undo))
                loop.call_soon_threadsafe(last.begin)
                last.wait()  # another interrupt ends the waiting, and not the work
            raise

    async def _drop(self, crossing: _Crossing[T], undo: Undo[T] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._drops.add(task)
        try:
            await crossing.drop(undo)
        finally:
            self._drops.discard(task)

    async def settled(self) -> None:
        """On the loop: until everything is taken back that interrupted calls had made."""
        while self._drops:
            await asyncio.wait(set(self._drops))


def _as_it_is(value: T) -> T:
    return value


async def _close(services: Services) -> None:
    await services.close()


class Link:
    """An engine behind a bridge."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._services: Services | None = None
        self._bridge = Bridge()

    @property
    def services(self) -> Services:
        """The open engine.  Raises: Conflict: it is not open."""
        if self._services is None:
            raise Conflict(
                "this client is not open", hint="use it in a `with` statement, or call open() first"
            )
        return self._services

    def open(self) -> None:
        """Open it; twice is no error."""
        if self._services is not None:
            return
        self._bridge.start()
        try:
            self._services = self._bridge.make(self._connecting(), _as_it_is, _close)
        except BaseException:
            self._bridge.stop()
            raise

    async def _connecting(self) -> Services:
        return await self._connect()

    def close(self) -> None:
        """Close it; twice is no error."""
        services, self._services = self._services, None
        if services is not None:
            try:
                self._bridge.call(self._closing(services))
            finally:
                self._bridge.stop()

    async def _closing(self, services: Services) -> None:
        await self._bridge.settled()
        await services.close()

    def call(self, work: Awaitable[T]) -> T:
        """One act of the engine."""
        return self._bridge.call(work)

    def make(self, work: Awaitable[T], build: Callable[[T], U], undo: Undo[T]) -> U:
        """One act of the engine that makes something; ``undo`` takes it back when an interrupt keeps it from being returned."""
        return self._bridge.make(work, build, undo)

    def iterate(self, stream: AsyncIterator[T]) -> Iterator[T]:
        """A stream of the engine, read a little ahead. Leaving it early closes it there."""
        pump = _Pump(stream)
        try:
            more = True
            while more:
                pieces, more = self._bridge.call(pump.take())
                yield from pieces
        finally:
            with suppress(Conflict):  # closed meanwhile
                self._bridge.call(pump.close())


def _looked_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


class _Pump(Generic[T]):
    """Reads a stream on the loop, at most ``AHEAD`` pieces ahead of the caller's thread, so that not every piece waits for both."""

    def __init__(self, stream: AsyncIterator[T]) -> None:
        self._stream = stream
        self._pieces: list[T] = []
        self._changed: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def take(self) -> tuple[list[T], bool]:
        """All that has come, at least one piece unless the stream is at its end; False: it was the end.

        Raises: what the stream raised, after its last piece.
        """
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(_looked_at)  # the reader may have left without closing this
        while not self._pieces and not self._task.done():
            await self._change()
        pieces, self._pieces = self._pieces, []
        self._notify()
        if not pieces:
            self._task.result()
        return pieces, bool(pieces)

    async def _run(self) -> None:
        try:
            async for piece in self._stream:
                self._pieces.append(piece)
                self._notify()
                while len(self._pieces) >= AHEAD:
                    await self._change()
        finally:
            asyncio.get_running_loop().call_soon(self._notify)  # when this task is done

    async def _change(self) -> None:
        self._changed = self._changed or asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)

    async def close(self) -> None:
        """End the stream and what reads it."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            await close()
