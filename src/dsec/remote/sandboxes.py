"""Sandboxes and their snapshots behind HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dsec.model.ids import SandboxId, SnapshotId
from dsec.model.paging import MOST_IN_PAGE, PAGE, Page
from dsec.model.sandbox import SandboxInfo, SandboxSpec, State
from dsec.model.snapshots import Fork, SnapshotInfo, SnapshotKind
from dsec.ports.engine import SandboxService, SnapshotService
from dsec.remote.connection import Call, Connection, fresh_key, segment
from dsec.remote.values import Items, done, every, read, value
from dsec.wire.values import encode

SANDBOXES: Final = "/v1/sandboxes"
SNAPSHOTS: Final = "/v1/snapshots"
NEVER_HAD: Final = "its creator was interrupted"


def sandbox_path(sandbox: SandboxId, rest: str = "") -> str:
    """The path of a sandbox, or of something of it."""
    return f"{SANDBOXES}/{segment(sandbox)}{rest}"


class RemoteSandboxes(SandboxService):
    """See :class:`SandboxService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        return await made(self._connection, {"spec": spec})

    async def create_cold(self, spec: SandboxSpec, count: int) -> tuple[SandboxId, ...]:
        body = encode({"spec": spec, "count": count})
        call = Call(method="POST", path=f"{SANDBOXES}/batch", body=body, key=fresh_key(), patience=None)
        return tuple((await value(self._connection, dict[str, list[SandboxId]], call)).get("ids", ()))

    async def get(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._told("GET", sandbox, "")

    async def list(self, states: Sequence[State] = ()) -> tuple[SandboxInfo, ...]:
        found: list[SandboxInfo] = []
        after = ""
        while True:
            page = await self.page(states=states, after=after, limit=MOST_IN_PAGE)
            found.extend(page.items)
            after = page.next
            if not after:
                return tuple(found)

    async def page(
        self, *, states: Sequence[State] = (), project: str = "", after: str = "", limit: int = PAGE
    ) -> Page[SandboxInfo]:
        query = {"state": list(states) or None, "project": project, "cursor": after, "limit": limit}
        answer = await self._connection.send(Call(method="GET", path=SANDBOXES, query=query, again=True))
        found = read(Items[SandboxInfo], answer.body)
        return Page(items=found.items, next=found.next)

    async def destroy(self, sandbox: SandboxId, *, reason: str = "asked") -> None:
        query = {"reason": reason} if reason != "asked" else {}
        path = sandbox_path(sandbox)
        call = Call(method="DELETE", path=path, query=query, again=True, patience=None)
        await done(self._connection, call)

    async def pause(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._told("POST", sandbox, "/pause")

    async def resume(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._told("POST", sandbox, "/resume")

    async def hibernate(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._told("POST", sandbox, "/hibernate")

    async def extend(self, sandbox: SandboxId, ttl: float) -> SandboxInfo:
        return await self._told("POST", sandbox, "/extend", encode({"ttl": ttl}))

    async def _told(
        self, method: str, sandbox: SandboxId, act: str, body: bytes | None = None
    ) -> SandboxInfo:
        """An act that gives the same when it is done twice, and what is known afterwards."""
        patience = {"patience": None} if method == "POST" else {}
        call = Call(method=method, path=sandbox_path(sandbox, act), body=body, again=True, **patience)  # type: ignore[arg-type]
        return await value(self._connection, SandboxInfo, call)


async def made(connection: Connection, body: dict[str, Any]) -> SandboxInfo:
    """A new sandbox; one that nobody waits for any more is destroyed."""
    call = Call(method="POST", path=SANDBOXES, body=encode(body), key=fresh_key(), patience=None)

    async def undo(info: SandboxInfo) -> None:
        await RemoteSandboxes(connection).destroy(info.id, reason=NEVER_HAD)

    return await connection.made(value(connection, SandboxInfo, call), undo)


class RemoteSnapshots(SnapshotService):
    """See :class:`SnapshotService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def take(self, sandbox: SandboxId, kind: SnapshotKind) -> SnapshotInfo:
        call = Call(
            method="POST",
            path=sandbox_path(sandbox, "/snapshots"),
            body=encode({"kind": kind}),
            key=fresh_key(),
            patience=None,
        )
        return await value(self._connection, SnapshotInfo, call)

    async def create(self, snapshot: SnapshotId, spec: SandboxSpec) -> SandboxInfo:
        return await made(self._connection, {"spec": spec, "snapshot": snapshot})

    async def fork(self, sandbox: SandboxId, count: int) -> Fork:
        call = Call(
            method="POST",
            path=sandbox_path(sandbox, "/fork"),
            body=encode({"count": count}),
            key=fresh_key(),
            patience=None,
        )

        async def undo(fork: Fork) -> None:
            for child in fork.children:
                await RemoteSandboxes(self._connection).destroy(child, reason=NEVER_HAD)

        return await self._connection.made(value(self._connection, Fork, call), undo)

    async def rollback(self, sandbox: SandboxId, snapshot: SnapshotId) -> SandboxInfo:
        call = Call(
            method="POST",
            path=sandbox_path(sandbox, "/rollback"),
            body=encode({"snapshot": snapshot}),
            key=fresh_key(),
            patience=None,
        )
        return await value(self._connection, SandboxInfo, call)

    async def get(self, snapshot: SnapshotId) -> SnapshotInfo:
        call = Call(method="GET", path=f"{SNAPSHOTS}/{segment(snapshot)}", again=True)
        return await value(self._connection, SnapshotInfo, call)

    async def list(
        self, sandbox: SandboxId | None = None, *, project: str | None = None
    ) -> tuple[SnapshotInfo, ...]:
        call = Call(method="GET", path=SNAPSHOTS, query={"sandbox": sandbox}, again=True)
        found = await every(self._connection, SnapshotInfo, call)
        return found if project is None else tuple([each for each in found if each.spec.project == project])

    async def remove(self, snapshot: SnapshotId) -> None:
        path = f"{SNAPSHOTS}/{segment(snapshot)}"
        await done(self._connection, Call(method="DELETE", path=path, again=True, patience=None))
