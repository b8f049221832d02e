"""Requests to init that have one answer: alone, several at once, and those whose answer nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from dsec.errors import DsecError
from dsec.runtimes.channel import Channel, Notice, unexpected
from dsec.runtimes.link import Link
from dsec.wire import guest as wire

_Answer = TypeVar("_Answer", bound=wire.Message)


class Call(Channel):
    """An operation with one answer: ``accepts`` it, or ERROR."""

    def __init__(self, link: Link, accepts: type[wire.Message]) -> None:
        self._link = link
        self._accepts = accepts
        self.answer: asyncio.Future[wire.Message] = link.loop.create_future()

    def on_frame(self, frame: wire.Frame) -> None:
        message = wire.decode_reply(frame)
        if not isinstance(message, self._accepts | wire.Error):
            raise unexpected(frame, f"where {self._accepts.KIND.name} was due")
        self._link.release(self)
        if not self.answer.done():
            self.answer.set_result(message)

    def on_lost(self, reason: DsecError) -> None:
        if not self.answer.done():
            self.answer.set_exception(reason)


async def call(link: Link, message: wire.Message, accepts: type[_Answer]) -> _Answer | wire.Error:
    """One request and its answer.  Raises: as :meth:`Link.start`."""
    channel = Call(link, accepts)
    await link.start(channel, message)
    try:
        answer = await channel.answer
    finally:
        link.abandon(channel)
    assert isinstance(answer, accepts | wire.Error)
    return answer


class _Told(Channel):
    """One of several requests that were sent together; ``error``: the answer was not OK."""

    def __init__(self, link: Link, waiting: set[_Told], answered: Notice) -> None:
        self._link = link
        self._waiting = waiting
        self._answered = answered
        self.error: wire.Error | None = None

    def on_frame(self, frame: wire.Frame) -> None:
        message = wire.decode_reply(frame)
        if isinstance(message, wire.Error):
            self.error = message
        elif not isinstance(message, wire.Ok):
            raise unexpected(frame, "where OK was due")
        self._link.release(self)
        self.on_lost(None)

    def on_lost(self, reason: DsecError | None) -> None:
        """It is over, one way or the other; the link knows which."""
        self._waiting.discard(self)
        if not self._waiting:
            self._answered.notify()


async def tell_all(link: Link, kind: wire.Kind, payloads: Sequence[bytes]) -> list[wire.Error | None]:
    """Requests sent together, each answered by OK (None here) or ERROR.  Raises: as :meth:`Link.start`."""
    await link.drain()
    waiting: set[_Told] = set()
    answered = Notice(link.loop)
    channels = [_Told(link, waiting, answered) for _ in payloads]
    waiting.update(channels)
    try:
        link.begin_all(channels, kind, payloads)
        while waiting:
            await answered
    finally:
        for channel in tuple(waiting):
            link.abandon(channel)
    if link.failure is not None:
        raise link.gone()
    return [channel.error for channel in channels]


class Unheard(Channel):
    """An operation whose answer nobody waits for."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def on_frame(self, frame: wire.Frame) -> None:
        if not isinstance(wire.decode_reply(frame), wire.Ok | wire.Error):
            raise unexpected(frame, "where OK was due")
        self._link.release(self)

    def on_lost(self, reason: DsecError) -> None:
        """Nobody waits."""
