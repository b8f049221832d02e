"""Files and trees behind HTTP: contents as raw bytes, trees as tar archives, events as they come."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dsec.errors import BadRequest, RuntimeUnavailable, Unsupported
from dsec.model.checks import check_path, encoded
from dsec.model.files import (
    Batch,
    Change,
    Entry,
    FileEvent,
    FileEventKind,
    FileType,
    Listing,
    MakeDir,
    Remove,
    Rename,
    SetAttr,
    Transfer,
    WriteOptions,
)
from dsec.model.ids import SandboxId
from dsec.ports.engine import FileService, TreeService
from dsec.ports.trees import LocalTrees
from dsec.remote.connection import LARGE, Call, Connection
from dsec.remote.events import events
from dsec.remote.sandboxes import sandbox_path
from dsec.remote.uploads import Upload, sliced
from dsec.remote.values import done, read, value
from dsec.wire.problems import from_body
from dsec.wire.values import encode, plain

_RAW: Final = "application/octet-stream"
_TAR: Final = "application/x-tar"
_EVENTS: Final = "text/event-stream"
_WHOLE: Final = 512 * 1024
"""Bytes of a file that are sent as they are, and again when the answer is lost, also by the HTTP library itself; a stream is sent once."""
_ALL: Final = 2**63 - 1
_OPS: Final = {MakeDir: "mkdir", Rename: "rename", Remove: "remove", SetAttr: "setattr"}
_READY: Final = FileEvent(FileEventKind.OVERFLOW, "")


class RemoteFiles(FileService):
    """See :class:`FileService`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(
        self, sandbox: SandboxId, path: str, *, offset: int = 0, length: int = _ALL, user: str = ""
    ) -> AsyncIterator[bytes]:
        check_path("path", path)
        query = {
            "path": path,
            "offset": offset or None,
            "length": None if length == _ALL else length,
            "user": user,
        }
        call = Call(method="GET", path=sandbox_path(sandbox, "/files/content"), query=query, accept=_RAW)
        async with self._connection.stream(call) as response:
            async for piece in response.content.iter_any():
                yield piece

    async def write(
        self,
        sandbox: SandboxId,
        path: str,
        content: bytes | AsyncIterator[bytes],
        *,
        options: WriteOptions,
        user: str = "",
    ) -> Entry:
        check_path("path", path)
        query = {"path": path, "user": user, **plain(options)}
        call = Call(
            method="PUT",
            path=sandbox_path(sandbox, "/files/content"),
            query=query,
            kind=_RAW,
            patience=None,
            again=not (options.append or options.exclusive),
        )
        if isinstance(content, bytes) and len(content) <= _WHOLE and call.again:
            return await value(self._connection, Entry, replace(call, body=content))
        headers = {"Content-Length": str(len(content))} if isinstance(content, bytes) else {}
        upload = Upload(sliced(content) if isinstance(content, bytes) else content)
        streamed = replace(call, body=upload.pieces(), headers=headers)
        return await upload.told(value(self._connection, Entry, streamed))

    async def stat(self, sandbox: SandboxId, path: str, *, follow: bool = True, user: str = "") -> Entry:
        check_path("path", path)
        query = {"path": path, "follow": follow, "user": user}
        call = Call(method="GET", path=sandbox_path(sandbox, "/files/stat"), query=query, again=True)
        return await value(self._connection, Entry, call)

    async def list(self, sandbox: SandboxId, path: str, *, limit: int = 100_000, user: str = "") -> Listing:
        check_path("path", path)
        query = {"path": path, "limit": limit, "user": user}
        call = Call(
            method="GET",
            path=sandbox_path(sandbox, "/files/list"),
            query=query,
            again=True,
            patience=None,
            most=LARGE,
        )
        return await value(self._connection, Listing, call)

    async def change(self, sandbox: SandboxId, change: Change, *, user: str = "") -> None:
        if isinstance(change, Batch):
            raise Unsupported("a batch of entries cannot be sent to a server", hint="unpack an archive")
        _check_paths(change)
        body = encode({"op": _OPS[type(change)], **plain(change)})
        call = Call(
            method="POST",
            path=sandbox_path(sandbox, "/files/change"),
            query={"user": user},
            body=body,
            patience=None,
            again=isinstance(change, SetAttr) or (isinstance(change, MakeDir) and change.parents),
        )
        await done(self._connection, call)

    async def watch(
        self, sandbox: SandboxId, path: str, *, recursive: bool = False, user: str = ""
    ) -> AsyncIterator[FileEvent]:
        check_path("path", path)
        query = {"path": path, "recursive": recursive, "user": user}
        call = Call(method="GET", path=sandbox_path(sandbox, "/files/watch"), query=query, accept=_EVENTS)
        found = self._watched(call)
        await anext(found)  # it is watched from here on
        return found

    async def _watched(self, call: Call) -> AsyncIterator[FileEvent]:
        """First one that says nothing but that it has begun."""
        async with (
            self._connection.stream(call) as response,
            aclosing(events(response.content.iter_any())) as told,
        ):
            async for event in told:
                if event.kind == "ready":
                    yield _READY
                elif event.kind == "file":
                    yield read(FileEvent, event.data)
                elif event.kind == "error":
                    raise from_body(_parsed(event.data), 500)
        raise RuntimeUnavailable(
            "the server stopped telling what happens to these files", hint="look at them, and watch again"
        )


def _check_paths(change: Change) -> None:
    """Raises: BadRequest: bytes that no file system takes."""
    for name in ("path", "source", "target"):
        given = getattr(change, name, None)
        if given is not None:
            encoded(name, given)


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


class RemoteTrees(TreeService):
    """See :class:`TreeService`; what is on this machine is read and written here."""

    def __init__(self, connection: Connection, files: RemoteFiles, local: LocalTrees) -> None:
        self._connection = connection
        self._files = files
        self._local = local

    async def upload(self, sandbox: SandboxId, local: Path, path: str, *, user: str = "") -> Transfer:
        check_path("path", path)
        mode = (await self._local.stat(local)).st_mode
        if stat.S_ISREG(mode):
            options = WriteOptions(mode=mode & 0o777, parents=True, atomic=True)
            content = self._local.content(local)
            entry = await self._files.write(sandbox, path, content, options=options, user=user)
            return Transfer(entries=1, bytes=entry.size)
        if not stat.S_ISDIR(mode):
            raise BadRequest(f"source: {str(local)!r} is neither a file nor a directory")
        left_out: list[tuple[str, str]] = []
        moved = await self.unpack(sandbox, self._local.packed(local, left_out), path, user=user)
        return replace(
            moved,
            skipped=(*left_out, *moved.skipped)[:1000],
            skipped_count=moved.skipped_count + len(left_out),
        )

    async def download(self, sandbox: SandboxId, path: str, local: Path, *, user: str = "") -> Transfer:
        entry = await self._files.stat(sandbox, path, user=user)
        if entry.type is FileType.DIRECTORY:
            return await self._local.unpacked(self.pack(sandbox, path, user=user), local)
        size = await self._local.written(self._files.read(sandbox, path, user=user), local)
        return Transfer(entries=1, bytes=size)

    async def unpack(
        self, sandbox: SandboxId, archive: AsyncIterator[bytes], path: str, *, user: str = ""
    ) -> Transfer:
        check_path("path", path)
        upload = Upload(archive)
        call = Call(
            method="PUT",
            path=sandbox_path(sandbox, "/tree"),
            query={"path": path, "user": user},
            body=upload.pieces(),
            kind=_TAR,
            patience=None,
        )
        return await upload.told(value(self._connection, Transfer, call))

    async def pack(self, sandbox: SandboxId, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        check_path("path", path)
        query: dict[str, Any] = {"path": path, "user": user}
        call = Call(
            method="GET", path=sandbox_path(sandbox, "/tree"), query=query, accept=_TAR, patience=None
        )
        async with self._connection.stream(call) as response:
            async for piece in response.content.iter_any():
                yield piece
