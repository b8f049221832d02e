"""Trees between this machine and a guest: single files, directories and archives, as the port asks for them."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Final

from dsec.errors import BadRequest
from dsec.handover import handed
from dsec.model.files import FileType, Identity, MakeDir, Transfer, WriteOptions
from dsec.ports.guest import GuestFiles
from dsec.ports.trees import Trees
from dsec.runtimes import archive_down, archive_up, archives

_PIECE: Final = 256 * 1024


class Archives(Trees):
    """See :class:`Trees`."""

    async def upload(self, files: GuestFiles, local: Path, path: str, *, who: Identity) -> Transfer:
        """See :class:`Trees`. A directory's content goes below ``path``, which is made; a file becomes ``path``."""
        with archives.local_problem("source"):
            mode = (await asyncio.to_thread(local.stat)).st_mode
        if stat.S_ISREG(mode):
            options = WriteOptions(mode=mode & 0o777, parents=True, atomic=True)
            entry = await files.write(path, content(local), who=who, options=options)
            return Transfer(entries=1, bytes=entry.size)
        if not stat.S_ISDIR(mode):
            raise BadRequest(f"source: {str(local)!r} is neither a file nor a directory")
        await files.apply(MakeDir(path, parents=True), who=who)
        return told(await archive_up.upload_directory(files, local, path, who=who))

    async def download(self, files: GuestFiles, path: str, local: Path, *, who: Identity) -> Transfer:
        """See :class:`Trees`. A directory's content goes below ``local``, which is made; a file becomes ``local``."""
        entry = await files.stat(path, who=who)
        if entry.type is not FileType.DIRECTORY:
            return await _one_file(files, path, local, who)
        with archives.local_problem("destination"):
            await asyncio.to_thread(local.mkdir, parents=True, exist_ok=True)
        return told(await archive_down.download_directory(files.tree(path, who=who), local))

    async def unpack(
        self, files: GuestFiles, archive: AsyncIterator[bytes], path: str, *, who: Identity
    ) -> Transfer:
        """See :class:`Trees`; ``path`` is made."""
        await files.apply(MakeDir(path, parents=True), who=who)
        read_end, write_end = os.pipe()
        feeding = asyncio.ensure_future(feed(archive, write_end))
        try:
            with os.fdopen(read_end, "rb") as stream:
                report = await archive_up.upload_tar(files, stream, path, who=who)
            await feeding
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        return told(report)

    def pack(self, files: GuestFiles, path: str, *, who: Identity) -> AsyncIterator[bytes]:
        """See :class:`Trees`."""
        return archive_down.download_tar(files.tree(path, who=who), archives.Transfer())


def told(report: archives.Transfer) -> Transfer:
    """What was moved, as the port says it."""
    return Transfer(
        entries=report.entries,
        bytes=report.bytes,
        skipped=tuple(report.skipped),
        skipped_count=report.skipped_count,
    )


async def content(local: Path) -> AsyncIterator[bytes]:
    """A file of this machine, in pieces."""
    with archives.local_problem("source"):
        file = await asyncio.to_thread(local.open, "rb", 0)
    try:
        while data := await asyncio.to_thread(file.read, _PIECE):
            yield data
    finally:
        await asyncio.to_thread(file.close)


def new_file(local: Path) -> tuple[IO[bytes], Path]:
    """A new file beside the target, which replaces it when it is whole."""
    half = local.with_name(f".{local.name}.{os.urandom(6).hex()}")
    return os.fdopen(
        os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb", 0
    ), half


def _undone(new: tuple[IO[bytes], Path]) -> None:
    file, half = new
    file.close()
    half.unlink(missing_ok=True)


async def _one_file(files: GuestFiles, path: str, local: Path, who: Identity) -> Transfer:
    return Transfer(entries=1, bytes=await written(files.read(path, who=who), local))


async def written(pieces: AsyncIterator[bytes], local: Path) -> int:
    """Write a file, which is there when it is whole; how many bytes it has.  Raises: as :func:`archives.local_problem`. What ``pieces`` raises."""
    with archives.local_problem("destination"):
        file, half = await handed(partial(new_file, local), _undone)
    size = 0
    try:
        async for data in pieces:
            size += len(data)
            with archives.local_problem("destination"):
                await asyncio.to_thread(write_all, file, memoryview(data))
        file.close()
        with archives.local_problem("destination"):
            await asyncio.to_thread(os.replace, half, local)
    except BaseException:
        _undone((file, half))
        raise
    return size


async def feed(archive: AsyncIterator[bytes], write_end: int) -> None:
    """The archive into a pipe, which a thread unpacks; a reader that stopped ends it."""
    with os.fdopen(write_end, "wb", 0) as sink:
        async for data in archive:
            for piece in _pieces(data):
                try:
                    await asyncio.to_thread(write_all, sink, piece)
                except BrokenPipeError:
                    return


def write_all(sink: IO[bytes], piece: memoryview) -> None:
    """All of it, however often the kernel takes a part."""
    while piece:
        piece = piece[sink.write(piece) :]


def _pieces(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), _PIECE):
        yield view[start : start + _PIECE]
