"""Sandboxes and snapshots as a principal sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

from dsec.control.reach import Reach, stranger, told_as
from dsec.errors import Denied, NotFound
from dsec.model.ids import SandboxId, SnapshotId, is_snapshot, new_sandbox_id, new_snapshot_id
from dsec.model.paging import MOST_IN_PAGE, PAGE, Page
from dsec.model.sandbox import SandboxInfo, SandboxSpec, State
from dsec.model.snapshots import Fork, SnapshotInfo, SnapshotKind
from dsec.model.tenants import Scope
from dsec.ports.engine import Arrivals, Changes, SandboxService, SnapshotService, TemplateService
from dsec.ports.storage import Fill

Infos = tuple[SandboxInfo, ...]  # before the classes, in which `list` is a method
Snapshots = tuple[SnapshotInfo, ...]
Allow = Callable[[SandboxSpec], Awaitable[None]]
_NO_BASE: Final = ("oci:", "sha256:")


async def allow_all(spec: SandboxSpec) -> None:
    """For what the engine itself makes in the name of a project."""


def check_base(base: str) -> None:
    """Raises: Denied: it names a path of the server, or an image by its digest, which may be somebody else's."""
    if base.startswith(_NO_BASE):
        raise Denied(
            f"base: {base!r:.200} can be named by whoever runs the server only",
            hint="name a base (system, debian:SUITE, docker://...) or a template",
            field="base",
        )


class Allowed:
    """What of the machine and of other projects a specification may name: nothing.

    Args:
        templates: those that the project sees.
    """

    def __init__(self, templates: TemplateService) -> None:
        self._templates = templates

    async def check(self, spec: SandboxSpec) -> None:
        """Raises: Denied."""
        check_base(spec.base)
        if any(not volume.name for volume in spec.volumes):
            raise Denied(
                "volumes: paths of the server's machine are not shown to those who do not run it",
                hint="use a named volume",
                field="volumes",
            )
        if (spec.base_digest or spec.layers) and not await self._is_of_template(spec):
            raise Denied(
                "layers: images by their digests are those of a template that the project sees",
                hint="name the template",
                field="layers",
            )

    async def _is_of_template(self, spec: SandboxSpec) -> bool:
        try:
            built = await self._templates.find(spec.template)
        except (NotFound, Denied):
            return False
        return (built.base_digest, built.layers) == (spec.base_digest, spec.layers)


class ScopedSandboxes(SandboxService):
    """Args: allow: refuses what a specification may not name."""

    def __init__(self, inner: SandboxService, reach: Reach, allow: Allow) -> None:
        self._inner = inner
        self._reach = reach
        self._allow = allow

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with self._reach.acting():
            return await self._inner.create(await self._own(spec))

    async def create_cold(self, spec: SandboxSpec, count: int) -> tuple[SandboxId, ...]:
        with self._reach.acting():
            return await self._inner.create_cold(await self._own(spec), count)

    async def _own(self, spec: SandboxSpec) -> SandboxSpec:
        """Of the principal's project, whatever it says.  Raises: Denied."""
        return await owned(spec, self._reach, self._allow)

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._reach.call(sandbox, self._inner.get)

    async def list(self, states: Sequence[State] = ()) -> Infos:
        if self._reach.all:
            return await self._inner.list(states)
        found: list[SandboxInfo] = []
        after, more = "", True
        while more:
            page = await self.page(states=states, after=after, limit=MOST_IN_PAGE)
            found += page.items
            after, more = page.next, bool(page.next)
        return tuple(found)

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        reach = self._reach
        if reach.all:
            return await self._inner.page(states=states, project=project, after=after, limit=limit)
        if reach.principal.scope is Scope.SANDBOX:
            return await self._itself(states, project, after, limit)
        return await self._inner.page(states=states, project=reach.named(project), after=after, limit=limit)

    async def _itself(
        self, states: Sequence[State], project: str, after: str, limit: int
    ) -> Page[SandboxInfo]:
        await self._inner.page(
            states=states, project=stranger(), after=after, limit=limit
        )  # what is wrong is told
        sandbox = self._reach.principal.sandbox
        if after or sandbox is None or project not in ("", self._reach.project):
            return Page(items=())
        info = await self._inner.get(sandbox)
        shown = info.state in states if states else info.state is not State.GONE
        return Page(items=(info,) if shown else ())

    async def destroy(self, sandbox: SandboxId, *, reason: str = "asked") -> None:
        await self._reach.manage(sandbox, lambda found: self._inner.destroy(found, reason=reason))

    async def pause(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._reach.manage(sandbox, self._inner.pause)

    async def resume(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._reach.manage(sandbox, self._inner.resume)

    async def hibernate(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._reach.manage(sandbox, self._inner.hibernate)

    async def extend(self, sandbox: SandboxId, ttl: float) -> SandboxInfo:
        return await self._reach.manage(sandbox, lambda found: self._inner.extend(found, ttl))


async def owned(spec: SandboxSpec, reach: Reach, allow: Allow) -> SandboxSpec:
    """The same, of the principal's project; an admin's is of the one that it names.  Raises: Denied."""
    if reach.all:
        return spec
    reach.need(Scope.DEVELOPER)
    spec = replace(spec, project=reach.project)
    await allow(spec)
    return spec


class ScopedSnapshots(SnapshotService, Changes, Arrivals):
    """Args: changes, arrivals: as the engine has them."""

    def __init__(
        self,
        inner: SnapshotService,
        changes: Changes | None,
        arrivals: Arrivals | None,
        reach: Reach,
        allow: Allow,
    ) -> None:
        self._inner = inner
        self._changes = changes
        self._arrivals = arrivals
        self._reach = reach
        self._allow = allow

    async def take(self, sandbox: SandboxId, kind: SnapshotKind) -> SnapshotInfo:
        return await self._reach.manage(sandbox, lambda found: self._inner.take(found, kind))

    async def create(self, snapshot: SnapshotId, spec: SandboxSpec) -> SandboxInfo:
        with self._reach.acting():
            spec = await owned(spec, self._reach, self._above)
        return await self._reach.call_snapshot(snapshot, lambda found: self._inner.create(found, spec))

    async def _above(self, spec: SandboxSpec) -> None:
        """What it lies over is the snapshot's, or the engine refuses it.  Raises: Denied."""
        await self._allow(replace(spec, base_digest="", layers=()))

    async def fork(self, sandbox: SandboxId, count: int) -> Fork:
        return await self._reach.manage(sandbox, lambda found: self._inner.fork(found, count))

    async def rollback(self, sandbox: SandboxId, snapshot: SnapshotId) -> SandboxInfo:
        return await self._reach.manage(
            sandbox,
            lambda found: self._reach.call_snapshot(snapshot, lambda kept: self._inner.rollback(found, kept)),
        )

    async def get(self, snapshot: SnapshotId) -> SnapshotInfo:
        return await self._reach.call_snapshot(snapshot, self._inner.get)

    async def list(self, sandbox: SandboxId | None = None, *, project: str | None = None) -> Snapshots:
        if sandbox is not None:
            return await self._reach.manage(sandbox, self._inner.list)
        self._reach.need(Scope.DEVELOPER)
        return await self._inner.list(project=project if self._reach.all else self._reach.project)

    async def remove(self, snapshot: SnapshotId) -> None:
        await self._reach.call_snapshot(snapshot, self._inner.remove)

    # For what builds and shares

    def changes(self, of: SandboxId | SnapshotId) -> AbstractAsyncContextManager[Path]:
        return self._seen(of)

    @asynccontextmanager
    async def _seen(self, of: SandboxId | SnapshotId) -> AsyncIterator[Path]:
        assert self._changes is not None
        if is_snapshot(of):
            mine = await self._reach.has_snapshot(SnapshotId(of))
        else:
            mine = await self._reach.has(SandboxId(of))
        found = of if mine else (new_snapshot_id() if is_snapshot(of) else new_sandbox_id())
        with nullcontext() if mine else told_as(of, found):
            async with self._changes.changes(found) as path:
                yield path

    async def adopt(self, spec: SandboxSpec, kind: SnapshotKind, fill: Fill, size: int) -> SnapshotInfo:
        assert self._arrivals is not None
        if not self._reach.all:
            spec = replace(spec, project=self._reach.project)
        return await self._arrivals.adopt(spec, kind, fill, size)
