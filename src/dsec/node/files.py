"""Files and trees of sandboxes: done inside by init, recorded here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeVar

from dsec.errors import DsecError, NotFound, RuntimeUnavailable
from dsec.failpoints import reach
from dsec.model.checks import check_count
from dsec.model.files import (
    Batch,
    Change,
    Entry,
    FileEvent,
    FileEventKind,
    Identity,
    Listing,
    MakeDir,
    Remove,
    Rename,
    SetAttr,
    Transfer,
    WriteOptions,
)
from dsec.model.ids import SandboxId, new_exec_id
from dsec.model.journal import Draft, Json, Phase
from dsec.node import drafts
from dsec.node.handles import Handle
from dsec.node.kit import Kit
from dsec.node.policy import absolute, identity
from dsec.node.work import ignore, settled
from dsec.ports.engine import FileService, TreeService
from dsec.ports.guest import GuestFiles
from dsec.ports.trees import Trees

T = TypeVar("T")

PIECE: Final = 1 << 18
SLICE: Final = 1 << 17  # half of what a guest takes ahead
_WATCHED: Final = FileEvent(FileEventKind.OVERFLOW, "")
_ACTS: Final[dict[type, str]] = {
    MakeDir: "files.mkdir",
    Rename: "files.rename",
    Remove: "files.remove",
    SetAttr: "files.setattr",
    Batch: "files.batch",
}


class Doing:
    """Acts on files of a running sandbox: who, where, recorded, and with errors that say what became of the sandbox."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit

    @contextmanager
    def using(self, handle: Handle) -> Iterator[None]:
        """While it is used it is not idle; a loss of the connection is told as the end of the sandbox when it was that."""
        with self.kit.table.using(handle):
            try:
                yield
            except (RuntimeUnavailable, NotFound) as exc:
                loss = handle.loss("during a file operation")
                if loss is not None:
                    raise loss from exc
                raise

    async def files(self, handle: Handle) -> GuestFiles:
        """Its inside."""
        return (await self.kit.guests.get(handle)).files

    async def recorded(
        self, handle: Handle, act: str, facts: dict[str, Json], do: Callable[[dict[str, Json]], Awaitable[T]]
    ) -> T:
        """Intent, act, result. ``do`` adds to the facts of the result. Cancelled or failed, a result is recorded too."""
        return await settled_or_cancelled(self, handle, act, facts, do)

    async def note(self, handle: Handle, act: str, facts: dict[str, Json]) -> None:
        """One record for an act that changes nothing."""
        await self.kit.journal.append(Draft(chain=handle.id, act=act, phase=Phase.NOTE, payload=facts))


async def settled_or_cancelled(
    doing: Doing,
    handle: Handle,
    act: str,
    facts: dict[str, Json],
    do: Callable[[dict[str, Json]], Awaitable[T]],
) -> T:
    """See :meth:`Doing.recorded`."""
    ref = new_exec_id().replace("ex-", "fs-")
    journal = doing.kit.journal

    def draft(phase: Phase, payload: dict[str, Json]) -> Draft:
        return Draft(chain=handle.id, act=act, phase=phase, ref=ref, payload=payload)

    reach("upload.begin")
    await journal.append(draft(Phase.INTENT, facts))
    reach("upload.recorded")
    done: dict[str, Json] = {"outcome": "interrupted"}
    try:
        value = await do(done)
        done["outcome"] = "ok"
        reach("upload.written")
        return value
    except DsecError as exc:
        done.update(drafts.failure(exc))
        raise
    finally:
        # Owned by the engine: recorded even when the caller is being cancelled.
        await settled(doing.kit.work.start(journal.append(draft(Phase.RESULT, done))), ignore)
        reach("upload.done")


class Files(FileService):
    """Single files."""

    def __init__(self, doing: Doing) -> None:
        self._doing = doing

    async def _open(self, sandbox: SandboxId, path: str, user: str) -> tuple[Handle, str, Identity]:
        handle = await self._doing.kit.table.running(sandbox)
        return handle, absolute(handle.info, path), identity(handle.info, handle.place, user)

    async def read(
        self, sandbox: SandboxId, path: str, *, offset: int = 0, length: int = 2**63 - 1, user: str = ""
    ) -> AsyncIterator[bytes]:
        check_count("offset", offset, 0, 2**63 - 1)
        check_count("length", length, 0, 2**63 - 1)
        handle, where, who = await self._open(sandbox, path, user)
        facts: dict[str, Json] = {"path": path_fact(where), "bytes": 0, "outcome": "interrupted"}
        count = 0
        with self._doing.using(handle):
            files = await self._doing.files(handle)
            try:
                async for piece in files.read(where, who=who, offset=offset, length=length):
                    count += len(piece)
                    yield piece
                facts["outcome"] = "ok"
            except DsecError as exc:
                facts.update(drafts.failure(exc))
                raise
            finally:
                facts["bytes"] = count
                await self._doing.note(handle, "files.read", facts)

    async def write(
        self,
        sandbox: SandboxId,
        path: str,
        content: bytes | AsyncIterator[bytes],
        *,
        options: WriteOptions,
        user: str = "",
    ) -> Entry:
        handle, where, who = await self._open(sandbox, path, user)
        if options.root:
            options = replace(options, root=absolute(handle.info, options.root, "root"))
            where = path
        facts: dict[str, Json] = {"path": path_fact(where)}
        whole = isinstance(content, bytes | bytearray | memoryview)
        if isinstance(content, bytes | bytearray | memoryview):
            facts.update(digest=drafts.digest(bytes(content)), bytes=len(content))
            content = _pieces(bytes(content))
        source = content

        async def write(done: dict[str, Json]) -> Entry:
            files = await self._doing.files(handle)
            stream = source if whole else _sliced(source, done)
            return await files.write(where, stream, who=who, options=options)

        with self._doing.using(handle):
            return await self._doing.recorded(handle, "files.write", facts, write)

    async def stat(self, sandbox: SandboxId, path: str, *, follow: bool = True, user: str = "") -> Entry:
        handle, where, who = await self._open(sandbox, path, user)
        with self._doing.using(handle):
            return await (await self._doing.files(handle)).stat(where, who=who, follow=follow)

    async def list(self, sandbox: SandboxId, path: str, *, limit: int = 100_000, user: str = "") -> Listing:
        check_count("limit", limit, 1, 1_000_000)
        handle, where, who = await self._open(sandbox, path, user)
        with self._doing.using(handle):
            return await (await self._doing.files(handle)).list(where, who=who, limit=limit)

    async def change(self, sandbox: SandboxId, change: Change, *, user: str = "") -> None:
        handle = await self._doing.kit.table.running(sandbox)
        who = identity(handle.info, handle.place, user)
        placed, facts = _placed(handle, change)

        async def apply(done: dict[str, Json]) -> None:
            await (await self._doing.files(handle)).apply(placed, who=who)

        with self._doing.using(handle):
            await self._doing.recorded(handle, _ACTS[type(change)], facts, apply)

    async def watch(
        self, sandbox: SandboxId, path: str, *, recursive: bool = False, user: str = ""
    ) -> AsyncIterator[FileEvent]:
        handle, where, who = await self._open(sandbox, path, user)
        with self._doing.using(handle):
            found = await (await self._doing.files(handle)).watch(where, who=who, recursive=recursive)
        events = self._watched(handle, found)
        await anext(events)
        return events

    async def _watched(
        self, handle: Handle, found: AsyncGenerator[FileEvent, None]
    ) -> AsyncIterator[FileEvent]:
        """First one that says nothing: a generator that has begun cleans up also when it is forgotten."""
        async with aclosing(found):
            with self._doing.using(handle):
                yield _WATCHED
                async for event in found:
                    yield event


class WholeTrees(TreeService):
    """Directories and archives, up and down."""

    def __init__(self, doing: Doing, trees: Trees) -> None:
        self._doing = doing
        self._trees = trees

    async def _open(self, sandbox: SandboxId, path: str, user: str) -> tuple[Handle, str, Identity]:
        handle = await self._doing.kit.table.running(sandbox)
        return handle, absolute(handle.info, path), identity(handle.info, handle.place, user)

    async def upload(self, sandbox: SandboxId, local: Path, path: str, *, user: str = "") -> Transfer:
        handle, where, who = await self._open(sandbox, path, user)

        async def upload(done: dict[str, Json]) -> Transfer:
            moved = await self._trees.upload(await self._doing.files(handle), local, where, who=who)
            done.update(_moved(moved))
            return moved

        with self._doing.using(handle):
            return await self._doing.recorded(handle, "files.upload", {"path": path_fact(where)}, upload)

    async def unpack(
        self, sandbox: SandboxId, archive: AsyncIterator[bytes], path: str, *, user: str = ""
    ) -> Transfer:
        handle, where, who = await self._open(sandbox, path, user)

        async def unpack(done: dict[str, Json]) -> Transfer:
            stream = _digested(archive, done)
            moved = await self._trees.unpack(await self._doing.files(handle), stream, where, who=who)
            done.update(_moved(moved))
            return moved

        with self._doing.using(handle):
            return await self._doing.recorded(handle, "files.unpack", {"path": path_fact(where)}, unpack)

    async def download(self, sandbox: SandboxId, path: str, local: Path, *, user: str = "") -> Transfer:
        handle, where, who = await self._open(sandbox, path, user)
        with self._doing.using(handle):
            moved = await self._trees.download(await self._doing.files(handle), where, local, who=who)
            await self._doing.note(handle, "files.download", {"path": path_fact(where), **_moved(moved)})
            return moved

    async def pack(self, sandbox: SandboxId, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        handle, where, who = await self._open(sandbox, path, user)
        count = 0
        with self._doing.using(handle):
            files = await self._doing.files(handle)
            try:
                async for piece in self._trees.pack(files, where, who=who):
                    count += len(piece)
                    yield piece
            finally:
                await self._doing.note(handle, "files.pack", {"path": path_fact(where), "bytes": count})


def path_fact(path: str) -> str:
    """A path as the journal can hold it: undecodable bytes as escapes."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _moved(moved: Transfer) -> dict[str, Json]:
    return {"entries": moved.entries, "bytes": moved.bytes, "skipped": moved.skipped_count}


def _placed(handle: Handle, change: Change) -> tuple[Change, dict[str, Json]]:
    """The change with absolute paths, and what the journal says of it."""
    info = handle.info
    if isinstance(change, Rename):
        source, target = absolute(info, change.source, "source"), absolute(info, change.target, "target")
        return replace(change, source=source, target=target), {
            "source": path_fact(source),
            "target": path_fact(target),
        }
    if isinstance(change, Batch):
        root = absolute(info, change.root, "root")
        return replace(change, root=root), {"path": path_fact(root), "entries": len(change.ops)}
    where = absolute(info, change.path)
    return replace(change, path=where), {"path": path_fact(where)}


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    if len(content) <= PIECE:
        if content:
            yield content
        return
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]


async def _digested(content: AsyncIterator[bytes], done: dict[str, Json]) -> AsyncIterator[bytes]:
    """The same pieces; digest and size go into the result when the last has been taken."""
    running, count = sha256(), 0
    async for piece in content:
        running.update(piece)
        count += len(piece)
        yield piece
    done.update(digest="sha256:" + running.hexdigest(), bytes=count)


async def _sliced(content: AsyncIterator[bytes], done: dict[str, Json]) -> AsyncIterator[memoryview]:
    """As :func:`_digested`, in slices: each is digested while it is on its way and the guest writes it."""
    running, count = sha256(), 0
    async for piece in content:
        view = memoryview(piece)
        for start in range(0, len(view), SLICE):
            part = view[start : start + SLICE]
            yield part
            running.update(part)
        count += len(view)
    done.update(digest="sha256:" + running.hexdigest(), bytes=count)
