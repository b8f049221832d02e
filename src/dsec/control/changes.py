"""Changes of records that are counted when they are stored, whoever still waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from dsec.errors import RuntimeUnavailable
from dsec.ports.journal import Unsettled

T = TypeVar("T")
PATIENCE: Final = 10.0  # seconds for which a change waits for an earlier one that is in doubt


class Changes:
    """Those that are under way, by the names of what they change."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[Any]] = {}

    async def make(
        self,
        name: str,
        change: Coroutine[Any, Any, T],
        stored: Callable[[T], None],
        failed: Callable[[], None],
    ) -> T:
        """Make it, to its end. Then, whether or not its caller still waits, one of the two is called: also where that is known later only.

        Raises: what the change raises.
        """
        task = asyncio.get_running_loop().create_task(change)

        def ended(future: asyncio.Future[T]) -> None:
            error = None if future.cancelled() else future.exception()
            if isinstance(error, Unsettled):
                self._follow(name, error.fate, ended)
                return
            if self._under_way.get(name) is future:
                del self._under_way[name]
            if future.cancelled() or error is not None:
                failed()
            else:
                stored(future.result())

        self._follow(name, task, ended)
        return await asyncio.shield(task)

    def _follow(
        self, name: str, future: asyncio.Future[Any], ended: Callable[[asyncio.Future[Any]], None]
    ) -> None:
        self._under_way[name] = future
        future.add_done_callback(ended)

    async def earlier(self, name: str) -> None:
        """Wait for one that is under way: it is counted first.  Raises: RuntimeUnavailable: nobody knows what became of it."""
        while (future := self._under_way.get(name)) is not None:
            in_doubt = not isinstance(future, asyncio.Task)
            done, _ = await asyncio.wait([future], timeout=PATIENCE if in_doubt else None)
            if not done:
                raise RuntimeUnavailable(
                    f"an earlier change of {name} is in doubt",
                    hint="the database of the journal does not answer; try again",
                )

    async def settled(self) -> None:
        """Wait until every change is counted that was begun, and is not in doubt."""
        while tasks := [one for one in self._under_way.values() if isinstance(one, asyncio.Task)]:
            await asyncio.wait(tasks)
