"""Files of one sandbox over the init protocol: windows both ways, and a check on every name that comes back."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from typing import Final

from dsec.errors import BadRequest, DsecError, ProtocolError, TooLarge
from dsec.model.files import (
    Batch,
    BatchOp,
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
    TreePiece,
    TreeTag,
    WriteOptions,
)
from dsec.ports.guest import GuestFiles
from dsec.runtimes.calls import call
from dsec.runtimes.channel import Channel, Notice, unexpected
from dsec.runtimes.flow import Inlet, Outlet
from dsec.runtimes.guest_errors import file_error
from dsec.runtimes.link import Link
from dsec.wire import guest as wire

_MAX_NAME: Final = 255
_LIST_BYTES: Final = 64 * 2**20
_WATCH_BYTES: Final = 4 * 2**20
_EVENT_COST: Final = 256
_WATCHED: Final = FileEvent(FileEventKind.OVERFLOW, "")
_EVENTS: Final = (
    FileEventKind.CREATED,
    FileEventKind.MODIFIED,
    FileEventKind.REMOVED,
    FileEventKind.MOVED_FROM,
    FileEventKind.MOVED_TO,
    FileEventKind.ATTRIBUTES,
    FileEventKind.OVERFLOW,
)


def encode_path(path: str, field: str = "path") -> bytes:
    """Raises: BadRequest: empty, too long, with a NUL, or not encodable."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError as wrong:
        raise BadRequest(f"{field}: {path!r} cannot be encoded: {wrong.reason}") from None
    if not raw or len(raw) > wire.MAX_PATH or b"\0" in raw:
        raise BadRequest(
            f"{field}: {path[:80]!r} is not 1 to {wire.MAX_PATH} bytes without NUL", path=path[:80]
        )
    return raw


class _Operation(Channel):
    """A file operation that lasts: it can fail at any time, and ends once."""

    def __init__(self, link: Link, path: str) -> None:
        self._link = link
        self._path = path
        self.failure: DsecError | None = None
        self.ended = False
        self.changed = Notice(link.loop)

    def on_frame(self, frame: wire.Frame) -> None:
        message = wire.decode_reply(frame)
        if isinstance(message, wire.Error):
            self.failure = file_error(message, self._path)
            self.end()
        else:
            self.on_message(frame, message)

    def on_message(self, frame: wire.Frame, message: wire.Message) -> None:
        """Anything but ERROR.  Raises: ProtocolError."""
        raise unexpected(frame, "during a file operation")

    def on_lost(self, reason: DsecError) -> None:
        self.failure = reason
        self.end()

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._link.release(self)
        self.wake()

    def wake(self) -> None:
        """Let whoever waits look again."""
        self.changed.notify()


class _Incoming(_Operation):
    """READ or TREE: content within a window."""

    def __init__(self, link: Link, path: str, window: int, *, length: int | None) -> None:
        super().__init__(link, path)
        self._inlet = Inlet(link, self, window)
        self._left = length
        self._entry_due = length is not None

    def on_frame(self, frame: wire.Frame) -> None:
        if frame.kind != wire.Kind.DATA:
            super().on_frame(frame)
            return
        count = len(frame.payload)
        if frame.stream or self._entry_due:
            raise unexpected(frame, "before its ENTRY, or not on stream 0")
        if self._left is not None and count > self._left:
            raise ProtocolError(f"init sent {count - self._left} bytes more than were asked for")
        self._inlet.check(frame, count)
        if self._left is not None:
            self._left -= count
        self._inlet.put(0, 0, frame.payload)
        if frame.end:
            self.end()

    def on_message(self, frame: wire.Frame, message: wire.Message) -> None:
        if not self._entry_due or not isinstance(message, wire.EntryIs):
            raise unexpected(frame, "where content was due")
        self._entry_due = False

    def wake(self) -> None:
        self._inlet.arrived.notify()

    async def next(self) -> bytes | None:
        """More content, or None at the end.  Raises: what went wrong."""
        while (piece := self._inlet.pop()) is None:
            if self.failure is not None:
                raise self.failure
            if self.ended:
                return None
            await self._inlet.arrived
        return bytes(piece.data)


class _Outgoing(_Operation):
    """WRITE: OK, then content within init's credit, then ENTRY."""

    def __init__(self, link: Link, path: str) -> None:
        super().__init__(link, path)
        self.outlet = Outlet(link, self)
        self.entry: Entry | None = None
        self._ready = False
        self._sent = False

    def on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.Kind.CREDIT and self._ready:
            self.outlet.grant(frame)
        else:
            super().on_frame(frame)

    def on_message(self, frame: wire.Frame, message: wire.Message) -> None:
        if isinstance(message, wire.Ok) and not self._ready:
            self._ready = True
            self.wake()
        elif isinstance(message, wire.EntryIs) and self._sent:
            self.entry = message.entry
            self.end()
        else:
            raise unexpected(frame, "during a write")

    def wake(self) -> None:
        if self.ended:
            self.outlet.close()
        self.changed.notify()

    async def ready(self) -> None:
        """Wait for OK.  Raises: what went wrong."""
        while not (self._ready or self.ended):
            await self.changed
        if self.failure is not None:
            raise self.failure

    async def send(self, data: bytes | memoryview) -> None:
        """Raises: what went wrong, as soon as init said it."""
        if not await self.outlet.send(data) and self.failure is not None:
            raise self.failure

    async def finish(self) -> Entry:
        """The end of the content, and what became of it."""
        self._sent = True
        await self.outlet.send(b"", end=True)
        while not self.ended:
            await self.changed
        if self.failure is not None:
            raise self.failure
        assert self.entry is not None
        return self.entry


class _Listing(_Operation):
    """LIST: entries, bounded in number and in bytes."""

    def __init__(self, link: Link, path: str, limit: int) -> None:
        super().__init__(link, path)
        self.entries: list[Entry] = []
        self.truncated = False
        self._left = limit
        self._bytes = _LIST_BYTES

    def on_message(self, frame: wire.Frame, message: wire.Message) -> None:
        if not isinstance(message, wire.Entries):
            raise unexpected(frame, "during a listing")
        if len(message.entries) > self._left:
            raise ProtocolError("init listed more entries than were asked for", channel=frame.channel)
        if not message.entries and not frame.end:
            raise ProtocolError("init sent an empty part of a listing", channel=frame.channel)
        for entry in message.entries:
            _check_name(entry.name)
        self._left -= len(message.entries)
        self._bytes -= len(frame.payload)
        if self._bytes >= 0:
            self.entries += message.entries
        self.truncated = self.truncated or bool(message.truncated) or self._bytes < 0
        if frame.end:
            self.end()


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or len(os.fsencode(name)) > _MAX_NAME:
        raise ProtocolError(f"init listed {name[:80]!r}, which is no name", name=name[:80])


class _Watching(_Operation):
    """WATCH: OK, then events; a consumer that is too slow loses the oldest and is told."""

    def __init__(self, link: Link, path: str) -> None:
        super().__init__(link, path)
        self.started = False
        self._events: deque[FileEvent] = deque()
        self._held = 0

    def on_message(self, frame: wire.Frame, message: wire.Message) -> None:
        if isinstance(message, wire.Ok) and not self.started:
            self.started = True
        elif isinstance(message, wire.Events) and self.started:
            events = [_event(row) for row in message.rows]
            self._keep(events)
        else:
            raise unexpected(frame, "during a watch")
        self.wake()

    async def ready(self) -> None:
        """Wait for OK.  Raises: what went wrong."""
        while not (self.started or self.ended):
            await self.changed
        if self.failure is not None and not self.started:
            raise self.failure

    def _keep(self, events: list[FileEvent]) -> None:
        self._held += sum(map(_cost, events))
        if self._held > _WATCH_BYTES:
            self._events.clear()
            events = [FileEvent(FileEventKind.OVERFLOW, "")]
            self._held = _cost(events[0])
        self._events += events

    def take(self) -> FileEvent | None:
        """The next event, if there is one."""
        if not self._events:
            return None
        event = self._events.popleft()
        self._held -= _cost(event)
        return event


def _cost(event: FileEvent) -> int:
    return _EVENT_COST + len(event.path)


def _event(row: wire.EventRow) -> FileEvent:
    path = os.fsdecode(row.path)
    if path:
        wire.check_relative(path)
    return FileEvent(_EVENTS[row.what - 1], path, bool(row.is_dir), row.cookie)


class FilesOverLink(GuestFiles):
    """Files, over one connection."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def read(
        self, path: str, *, who: Identity, offset: int = 0, length: int = 2**63 - 1
    ) -> AsyncIterator[bytes]:
        """Content in pieces of at most 256 KiB. Leaving the iterator early cancels it."""
        window = self._link.grant()
        channel = _Incoming(self._link, path, window, length=length)
        message = wire.Read(who.uid, who.gid, encode_path(path), offset, length, window)
        await self._link.start(channel, message, window=window)
        try:
            while (data := await channel.next()) is not None:
                yield data
        finally:
            self._link.abandon(channel)

    async def write(
        self, path: str, content: AsyncIterator[bytes | memoryview], *, who: Identity, options: WriteOptions
    ) -> Entry:
        """Write all of ``content``; on any failure, or cancellation, an atomic write leaves nothing."""
        channel = _Outgoing(self._link, path)
        await self._link.start(channel, _write(path, who, options))
        try:
            await channel.ready()
            async for data in content:
                await channel.send(data)
            return _named(await channel.finish(), path)
        finally:
            self._link.abandon(channel)

    async def stat(self, path: str, *, who: Identity, follow: bool = True) -> Entry:
        """One entry, named as it was asked for."""
        message = wire.Stat(who.uid, who.gid, encode_path(path), int(follow))
        answer = await call(self._link, message, wire.EntryIs)
        if isinstance(answer, wire.Error):
            raise file_error(answer, path)
        return _named(answer.entry, path)

    async def list(self, path: str, *, who: Identity, limit: int = 100_000) -> Listing:
        """Entries of a directory, sorted by name; at most 64 MiB of them."""
        channel = _Listing(self._link, path, limit)
        await self._link.start(channel, wire.List(who.uid, who.gid, encode_path(path), limit))
        try:
            while not channel.ended:
                await channel.changed
        finally:
            self._link.abandon(channel)
        if channel.failure is not None:
            raise channel.failure
        return Listing(tuple(sorted(channel.entries, key=lambda entry: entry.name)), channel.truncated)

    async def apply(self, change: Change, *, who: Identity) -> None:
        """Make a directory, rename, remove, set attributes, or make a batch of entries."""
        if isinstance(change, Batch):
            await self._batch(change, who)
            return
        path, message = _change(change, who)
        answer = await call(self._link, message, wire.Ok)
        if isinstance(answer, wire.Error):
            raise file_error(answer, path)

    async def _batch(self, batch: Batch, who: Identity) -> None:
        root = encode_path(batch.root, "root")
        for ops in split_batch(batch, len(root)):
            message = wire.BatchOps(who.uid, who.gid, root, ops)
            answer = await call(self._link, message, wire.BatchDone)
            if isinstance(answer, wire.Error):
                raise file_error(answer, batch.root)
            if answer.errno == 0 and answer.done == len(ops):
                continue
            if answer.errno <= 0 or answer.done >= len(ops):
                wrong = ProtocolError(f"init did {answer.done} of {len(ops)} steps with errno {answer.errno}")
                self._link.fail(wrong)
                raise self._link.gone()
            raise file_error(answer, os.path.join(batch.root, os.fsdecode(ops[answer.done].path)))

    async def watch(
        self, path: str, *, who: Identity, recursive: bool = False
    ) -> AsyncGenerator[FileEvent, None]:
        """Events from the moment on at which this returns; closing the iterator ends it."""
        events = self._events(path, wire.Watch(who.uid, who.gid, encode_path(path), int(recursive)))
        await anext(events)
        return events

    async def _events(self, path: str, message: wire.Watch) -> AsyncGenerator[FileEvent, None]:
        """First one that only says that init watches. A generator that has begun cleans up also when it is forgotten."""
        channel = _Watching(self._link, path)
        await self._link.start(channel, message)
        try:
            await channel.ready()
            yield _WATCHED
            while True:
                while (event := channel.take()) is not None:
                    yield event
                if channel.failure is not None:
                    raise channel.failure
                await channel.changed
        finally:
            self._link.abandon(channel)

    async def tree(
        self, path: str, *, who: Identity, max_bytes: int = 2**40, max_entries: int = 1_000_000
    ) -> AsyncIterator[TreePiece]:
        """A directory tree, depth first, the root as ``.``; symlinks are reported, never followed."""
        window = self._link.grant()
        channel = _Incoming(self._link, path, window, length=None)
        message = wire.Tree(who.uid, who.gid, encode_path(path), max_bytes, max_entries, window)
        await self._link.start(channel, message, window=window)
        cutter = _BoundedTree(max_bytes, max_entries)
        try:
            while (data := await channel.next()) is not None:
                for piece in cutter.feed(data):
                    yield piece
            cutter.finish()
        except ProtocolError as wrong:
            self._link.fail(wrong)
            raise self._link.gone() from wrong
        finally:
            self._link.abandon(channel)


class _BoundedTree:
    """Tree pieces, and no more of them than were asked for."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._reader = wire.TreeReader()
        self._bytes = max_bytes
        self._entries = max_entries + 1

    def feed(self, data: bytes) -> Iterator[TreePiece]:
        """Raises: ProtocolError."""
        for piece in self._reader.feed(data):
            self._entries -= piece.tag is TreeTag.ENTRY
            self._bytes -= len(piece.content)
            if self._entries < 0 or self._bytes < 0:
                raise ProtocolError("init sent a larger tree than was asked for")
            yield piece

    def finish(self) -> None:
        """Raises: ProtocolError: the stream ended before the tree did."""
        if not self._reader.done:
            raise ProtocolError("a tree was cut short")


def _named(entry: Entry, path: str) -> Entry:
    """The entry under the name that was asked for: init's is not needed, so it is not trusted."""
    return replace(entry, name=path.rstrip("/").rpartition("/")[2] or "/")


def _write(path: str, who: Identity, options: WriteOptions) -> wire.Write:
    chosen = (options.create, options.exclusive, options.append, options.parents, options.atomic)
    flags = sum(1 << place for place, value in enumerate(chosen) if value)
    root = encode_path(options.root, "root") if options.root else b""
    return wire.Write(who.uid, who.gid, encode_path(path), options.mode, flags, root)


def _change(change: MakeDir | Rename | Remove | SetAttr, who: Identity) -> tuple[str, wire.Message]:
    """The path to blame, and the request."""
    uid, gid = who.uid, who.gid
    match change:
        case MakeDir():
            made = encode_path(change.path)
            return change.path, wire.Mkdir(uid, gid, made, change.mode, int(change.parents))
        case Rename():
            source, target = encode_path(change.source, "source"), encode_path(change.target, "target")
            return change.source, wire.RenameTo(uid, gid, source, target, int(change.replace))
        case Remove():
            return change.path, wire.RemoveAt(uid, gid, encode_path(change.path), int(change.recursive))
        case SetAttr():
            return change.path, _set_attr(change, who)


def _set_attr(change: SetAttr, who: Identity) -> wire.SetAttrs:
    flag = wire.AttrFlag
    owner, group = change.owner or (0, 0)
    mask = (
        (flag.MODE if change.mode is not None else 0)
        | (flag.OWNER if change.owner is not None else 0)
        | (flag.MTIME if change.mtime_ns is not None else 0)
        | (flag.FOLLOW if change.follow else 0)
    )
    path = encode_path(change.path)
    return wire.SetAttrs(who.uid, who.gid, path, mask, change.mode or 0, owner, group, change.mtime_ns or 0)


def split_batch(batch: Batch, root_bytes: int) -> Iterator[tuple[BatchOp, ...]]:
    """The ops in groups that each fit one frame.

    Raises:
        TooLarge: one op alone does not fit; write that file instead.
    """
    room = wire.MAX_PAYLOAD - wire.BatchOps.FIXED - root_bytes
    group: list[BatchOp] = []
    used = 0
    for op in batch.ops:
        size = wire.BatchOps.PER_OP + len(op.path) + len(op.data)
        if size > room:
            raise TooLarge(
                f"batch: {os.fsdecode(op.path)!r} has {len(op.data)} bytes, more than one step may",
                hint="write that file with its own write",
            )
        if used + size > room:
            yield tuple(group)
            group, used = [], 0
        group.append(op)
        used += size
    if group:
        yield tuple(group)
