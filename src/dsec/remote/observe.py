"""Looking, behind HTTP: figures, records, waiting for an end; and keys, projects and network services of sandboxes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Final

from dsec.errors import Unsupported
from dsec.model.checks import check_count
from dsec.model.ids import KeyId, SandboxId
from dsec.model.journal import Json, Record
from dsec.model.paging import MOST_IN_PAGE
from dsec.model.sandbox import Metrics, Problem, SandboxInfo, State
from dsec.model.tenants import Coinage, KeyInfo, NewKey, ProjectInfo, Quota, Scope
from dsec.ports.engine import ObserveService, PortService
from dsec.ports.tenants import TenantService
from dsec.remote.connection import LARGE, POLL, QUICK, Call, Connection, fresh_key, segment
from dsec.remote.sandboxes import sandbox_path
from dsec.remote.values import items, part, value
from dsec.wire.values import encode

KEYS: Final = "/v1/keys"
PROJECTS: Final = "/v1/projects"
MOST_RECORDS: Final = 10_000
"""That one call gives."""
_ENDED: Final = (State.GONE, State.FAILED, State.LOST)


class RemoteObserve(ObserveService):
    """See :class:`ObserveService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        call = Call(method="GET", path=sandbox_path(sandbox, "/metrics"), again=True)
        return await value(self._connection, Metrics, call)

    async def events(self, sandbox: SandboxId, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        check_count("limit", limit, 1, MOST_RECORDS)
        path = sandbox_path(sandbox, "/events")
        found: tuple[Record, ...] = ()
        while True:  # a server gives a page at a time, and fewer where they are large
            query = {"after": after, "limit": min(limit - len(found), MOST_IN_PAGE)}
            call = Call(method="GET", path=path, query=query, again=True, most=LARGE)
            page = await part(self._connection, Record, call)
            found += page.items
            if not page.next or not page.items or len(found) >= limit:
                return found
            after = page.items[-1].seq

    async def problems(self) -> tuple[Problem, ...]:
        return await items(self._connection, Problem, Call(method="GET", path="/v1/problems", again=True))

    async def wait(self, sandbox: SandboxId) -> SandboxInfo:
        call = Call(
            method="GET",
            path=sandbox_path(sandbox, "/wait"),
            query={"timeout": POLL},
            again=True,
            patience=POLL + QUICK,
        )
        while True:
            info = await value(self._connection, SandboxInfo, call)
            if info.state in _ENDED:
                return info

    async def decide(self, sandbox: SandboxId, decision: Mapping[str, Json]) -> Record:
        call = Call(
            method="POST",
            path=sandbox_path(sandbox, "/decisions"),
            body=encode(decision),
            key=fresh_key(),
        )
        return await value(self._connection, Record, call)


class RemotePorts(PortService):
    """See :class:`PortService`: a server passes on HTTP and WebSockets, and no bare connections."""

    async def connect(self, sandbox: SandboxId, port: int) -> socket.socket:
        raise Unsupported(
            "a server hands out no connections into sandboxes",
            hint=f"ask {sandbox_path(sandbox, f'/ports/{port}/')} of the server by HTTP or WebSocket",
        )


class RemoteTenants(TenantService):
    """See :class:`TenantService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create_key(
        self,
        scope: Scope,
        *,
        project: str,
        label: str = "",
        ttl: float = 0.0,
        coinage: Coinage = Coinage.DSEC,
    ) -> NewKey:
        body = {"scope": scope, "project": project, "label": label, "ttl": ttl, "coinage": coinage}
        return await value(self._connection, NewKey, _post(KEYS, body))

    async def keys(self, project: str = "", *, after: str = "", limit: int = 1000) -> tuple[KeyInfo, ...]:
        query: dict[str, Any] = {"project": project, "cursor": after, "limit": limit}
        return await items(self._connection, KeyInfo, Call(method="GET", path=KEYS, query=query, again=True))

    async def revoke_key(self, key: KeyId) -> KeyInfo:
        path = f"{KEYS}/{segment(key)}"
        return await value(self._connection, KeyInfo, Call(method="DELETE", path=path, again=True))

    async def token(self, sandbox: SandboxId, *, ttl: float = 0.0) -> NewKey:
        path = sandbox_path(sandbox, "/token")
        return await value(self._connection, NewKey, _post(path, {"ttl": ttl}))

    async def projects(self) -> tuple[ProjectInfo, ...]:
        return await items(self._connection, ProjectInfo, Call(method="GET", path=PROJECTS, again=True))

    async def project(self, name: str) -> ProjectInfo:
        path = f"{PROJECTS}/{segment(name)}"
        return await value(self._connection, ProjectInfo, Call(method="GET", path=path, again=True))

    async def set_quota(self, name: str, quota: Quota) -> ProjectInfo:
        path = f"{PROJECTS}/{segment(name)}"
        call = Call(method="PUT", path=path, body=encode(quota), again=True)
        return await value(self._connection, ProjectInfo, call)


def _post(path: str, body: dict[str, Any]) -> Call:
    return Call(method="POST", path=path, body=encode(body), key=fresh_key())
