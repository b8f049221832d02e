"""What a principal reaches, and how everything else looks to it: as what never was.

An act on something that is somebody else's is done, in all earnest, on an id that nobody has; what the engine answers is told with the id
that was asked for. So the answer is, to the byte, what the engine says of unknown ids, whatever it comes to say of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from secrets import token_hex
from typing import Any, Final, Generic, TypeVar

from dsec.errors import Denied, DsecError, NotFound
from dsec.model.actors import acting
from dsec.model.ids import SandboxId, SnapshotId, new_sandbox_id, new_snapshot_id
from dsec.model.tenants import Principal, Scope
from dsec.ports.engine import SandboxService, SnapshotService

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_REMEMBERED: Final = 100_000
"""Owners of sandboxes and of snapshots, which never change."""


class _Recent(Generic[K]):
    """Projects by id, of those that were asked for last."""

    def __init__(self) -> None:
        self._known: OrderedDict[K, str] = OrderedDict()

    async def find(self, id: K, ask: Callable[[], Awaitable[str]]) -> str:
        """ "" = nobody's.  Raises: what ``ask`` raises."""
        project = self._known.get(id)
        if project is not None:
            self._known.move_to_end(id)
            return project
        try:
            project = await ask()
        except NotFound:
            return ""
        self._known[id] = project
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return project


class Owners:
    """To which project things belong, for all principals together."""

    def __init__(self, sandboxes: SandboxService, snapshots: SnapshotService) -> None:
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._of_sandboxes: _Recent[SandboxId] = _Recent()
        self._of_snapshots: _Recent[SnapshotId] = _Recent()

    async def of_sandbox(self, sandbox: SandboxId) -> str:
        """ "" = nobody's."""

        async def ask() -> str:
            return (await self._sandboxes.get(sandbox)).spec.project

        return await self._of_sandboxes.find(sandbox, ask)

    async def of_snapshot(self, snapshot: SnapshotId) -> str:
        """ "" = nobody's."""

        async def ask() -> str:
            return (await self._snapshots.get(snapshot)).spec.project

        return await self._of_snapshots.find(snapshot, ask)


class Reach:
    """Of one principal.

    Args:
        actor: as whom it acts; None: as whoever acts already.
    """

    def __init__(self, principal: Principal, owners: Owners, actor: str | None) -> None:
        self.principal = principal
        self.project = principal.project
        self.all = principal.scope is Scope.ADMIN
        self._owners = owners
        self._actor = actor

    def acting(self) -> AbstractContextManager[None]:
        """Within, records name it."""
        return acting(self._actor) if self._actor is not None else nullcontext()

    async def has(self, sandbox: SandboxId) -> bool:
        """Whether that sandbox is there for it."""
        if self.principal.scope is Scope.SANDBOX:
            return sandbox == self.principal.sandbox
        return self.all or await self._owners.of_sandbox(sandbox) == self.project

    async def has_snapshot(self, snapshot: SnapshotId) -> bool:
        if self.principal.scope is Scope.SANDBOX:
            return False
        return self.all or await self._owners.of_snapshot(snapshot) == self.project

    async def call(self, sandbox: SandboxId, act: Callable[[SandboxId], Awaitable[T]]) -> T:
        """An act on a sandbox."""
        with self.acting():
            if await self.has(sandbox):
                return await act(sandbox)
            other = new_sandbox_id()
            with told_as(sandbox, other):
                return await act(other)

    async def call_snapshot(self, snapshot: SnapshotId, act: Callable[[SnapshotId], Awaitable[T]]) -> T:
        """An act on a snapshot."""
        with self.acting():
            if await self.has_snapshot(snapshot):
                return await act(snapshot)
            other = new_snapshot_id()
            with told_as(snapshot, other):
                return await act(other)

    async def manage(self, sandbox: SandboxId, act: Callable[[SandboxId], Awaitable[T]]) -> T:
        """As :meth:`call`, an act that is not for who may only act *in* the sandbox.  Raises: Denied."""

        def checked(found: SandboxId) -> Awaitable[T]:
            if found == sandbox:
                self.need(Scope.DEVELOPER)
            return act(found)

        return await self.call(sandbox, checked)

    async def stream(
        self, sandbox: SandboxId, act: Callable[[SandboxId], AsyncIterator[T]]
    ) -> AsyncGenerator[T, None]:
        """What comes of an act on a sandbox piece by piece."""
        mine = await self.has(sandbox)
        found = sandbox if mine else new_sandbox_id()
        with nullcontext() if mine else told_as(sandbox, found):
            async with aclosing(self.steps(act(found))) as pieces:
                async for piece in pieces:
                    yield piece

    async def steps(self, stream: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """Each step of a stream is the principal's; between them its consumer acts."""
        try:
            while True:
                try:
                    with self.acting():
                        piece = await anext(stream)
                except StopAsyncIteration:
                    return
                yield piece
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    def need(self, scope: Scope) -> None:
        """Raises: Denied: it is not for whoever has this key."""
        order = (Scope.SANDBOX, Scope.DEVELOPER, Scope.ADMIN)
        if order.index(self.principal.scope) < order.index(scope):
            raise Denied(
                f"this needs a key of scope {scope}",
                hint=f"`dsec key create --scope {scope}`",
                scope=scope.value,
            )

    def named(self, project: str, *more: str) -> str:
        """The project that is meant: its own when that, none, or one of ``more`` is named; another one is a project that nobody has."""
        if self.all:
            return project or self.project
        mine = self.principal.scope is not Scope.SANDBOX and project in ("", self.project, *more)
        return self.project if mine else stranger()


def stranger() -> str:
    """A name that nobody has."""
    return f"x{token_hex(16)}"


@contextmanager
def told_as(asked: str, other: str) -> Iterator[None]:
    """Errors within speak of what was asked for."""
    try:
        yield
    except DsecError as error:
        raise renamed(error, asked, other) from None


def renamed(error: DsecError, asked: str, other: str) -> DsecError:
    """The same error, of the same class, with ``asked`` wherever it says ``other``."""

    def told(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(other, asked)
        return type(value)(map(told, value)) if isinstance(value, list | tuple) else value

    facts = {name: told(value) for name, value in error.facts.items()}
    return type(error)(told(error.message), hint=told(error.hint), **facts)
