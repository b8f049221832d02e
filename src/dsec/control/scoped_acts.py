"""Commands, files, figures and ports of sandboxes as a principal reaches them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from dsec.control.reach import Reach
from dsec.errors import Denied
from dsec.model.execs import ExecInfo, ExecRequest, ExecResult
from dsec.model.files import Change, Entry, FileEvent, Listing, Transfer, WriteOptions
from dsec.model.ids import ExecId, SandboxId
from dsec.model.journal import Json, Record
from dsec.model.sandbox import Metrics, Problem, SandboxInfo
from dsec.ports.engine import (
    ExecService,
    ExecSession,
    FileService,
    ObserveService,
    PortService,
    TreeService,
)

Infos = tuple[ExecInfo, ...]  # before the class, in which `list` is a method


class ScopedExecs(ExecService):
    def __init__(self, inner: ExecService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    async def run(
        self, sandbox: SandboxId, request: ExecRequest, stdin: AsyncIterator[bytes] | None = None
    ) -> ExecResult:
        return await self._reach.call(sandbox, lambda found: self._inner.run(found, request, stdin))

    async def start(self, sandbox: SandboxId, request: ExecRequest) -> ExecSession:
        return await self._reach.call(sandbox, lambda found: self._inner.start(found, request))

    async def attach(
        self, sandbox: SandboxId, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0
    ) -> ExecSession:
        return await self._reach.call(
            sandbox, lambda found: self._inner.attach(found, exec_id, stdout=stdout, stderr=stderr)
        )

    async def list(self, sandbox: SandboxId) -> Infos:
        return await self._reach.call(sandbox, self._inner.list)


class ScopedFiles(FileService):
    def __init__(self, inner: FileService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    def read(
        self, sandbox: SandboxId, path: str, *, offset: int = 0, length: int = 2**63 - 1, user: str = ""
    ) -> AsyncIterator[bytes]:
        return self._reach.stream(
            sandbox, lambda found: self._inner.read(found, path, offset=offset, length=length, user=user)
        )

    async def write(
        self,
        sandbox: SandboxId,
        path: str,
        content: bytes | AsyncIterator[bytes],
        *,
        options: WriteOptions,
        user: str = "",
    ) -> Entry:
        return await self._reach.call(
            sandbox, lambda found: self._inner.write(found, path, content, options=options, user=user)
        )

    async def stat(self, sandbox: SandboxId, path: str, *, follow: bool = True, user: str = "") -> Entry:
        return await self._reach.call(
            sandbox, lambda found: self._inner.stat(found, path, follow=follow, user=user)
        )

    async def list(self, sandbox: SandboxId, path: str, *, limit: int = 100_000, user: str = "") -> Listing:
        return await self._reach.call(
            sandbox, lambda found: self._inner.list(found, path, limit=limit, user=user)
        )

    async def change(self, sandbox: SandboxId, change: Change, *, user: str = "") -> None:
        await self._reach.call(sandbox, lambda found: self._inner.change(found, change, user=user))

    async def watch(
        self, sandbox: SandboxId, path: str, *, recursive: bool = False, user: str = ""
    ) -> AsyncIterator[FileEvent]:
        return await self._reach.call(
            sandbox, lambda found: self._inner.watch(found, path, recursive=recursive, user=user)
        )


class ScopedTrees(TreeService):
    """Directories of the server's own machine are its owner's."""

    def __init__(self, inner: TreeService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    async def upload(self, sandbox: SandboxId, local: Path, path: str, *, user: str = "") -> Transfer:
        self._check_local()
        return await self._reach.call(
            sandbox, lambda found: self._inner.upload(found, local, path, user=user)
        )

    async def download(self, sandbox: SandboxId, path: str, local: Path, *, user: str = "") -> Transfer:
        self._check_local()
        return await self._reach.call(
            sandbox, lambda found: self._inner.download(found, path, local, user=user)
        )

    def _check_local(self) -> None:
        if not self._reach.all:
            raise Denied("local: directories of the server's machine are its owner's", hint="send an archive")

    async def unpack(
        self, sandbox: SandboxId, archive: AsyncIterator[bytes], path: str, *, user: str = ""
    ) -> Transfer:
        return await self._reach.call(
            sandbox, lambda found: self._inner.unpack(found, archive, path, user=user)
        )

    def pack(self, sandbox: SandboxId, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        return self._reach.stream(sandbox, lambda found: self._inner.pack(found, path, user=user))


class ScopedObserve(ObserveService):
    def __init__(self, inner: ObserveService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        return await self._reach.call(sandbox, self._inner.metrics)

    async def events(self, sandbox: SandboxId, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        return await self._reach.call(
            sandbox, lambda found: self._inner.events(found, after=after, limit=limit)
        )

    async def problems(self) -> tuple[Problem, ...]:
        found = await self._inner.problems()
        return tuple([each for each in found if await self._reach.has(each.sandbox)])

    async def wait(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._reach.call(sandbox, self._inner.wait)

    async def decide(self, sandbox: SandboxId, decision: Mapping[str, Json]) -> Record:
        return await self._reach.call(sandbox, lambda found: self._inner.decide(found, decision))


class ScopedPorts(PortService):
    def __init__(self, inner: PortService, reach: Reach) -> None:
        self._inner = inner
        self._reach = reach

    async def connect(self, sandbox: SandboxId, port: int) -> socket.socket:
        return await self._reach.call(sandbox, lambda found: self._inner.connect(found, port))
