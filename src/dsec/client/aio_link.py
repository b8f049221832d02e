"""How the asynchronous client reaches an engine: directly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from dsec.errors import Conflict
from dsec.ports.engine import Services

T = TypeVar("T")
U = TypeVar("U")

Connect = Callable[[], Awaitable[Services]]
Undo = Callable[[T], Awaitable[object]]


class AsyncLink:
    """An engine that is opened when first needed, and its services."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._services: Services | None = None

    @property
    def services(self) -> Services:
        """The open engine.  Raises: Conflict: it is not open."""
        if self._services is None:
            raise Conflict(
                "this client is not open", hint="use it in a `with` statement, or call open() first"
            )
        return self._services

    async def open(self) -> None:
        """Open it; twice is no error."""
        if self._services is None:
            self._services = await self._connect()

    async def close(self) -> None:
        """Close it; twice is no error."""
        services, self._services = self._services, None
        if services is not None:
            await services.close()

    def call(self, work: Awaitable[T]) -> Awaitable[T]:
        """One act of the engine."""
        return work

    async def make(self, work: Awaitable[T], build: Callable[[T], U], undo: Undo[T]) -> U:
        """One act of the engine that makes something. The engine itself undoes it when this is cancelled: nothing comes between."""
        del undo
        return build(await work)

    def iterate(self, stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """A stream of the engine."""
        return stream
