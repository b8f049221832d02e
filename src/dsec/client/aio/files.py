"""Files of one sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from dsec.client.aio_link import AsyncLink
from dsec.client.requests import GIB, Content, closed, collected, content_of, streamed
from dsec.model.checks import check_flag, check_user, local_path
from dsec.model.files import Entry, FileEvent, MakeDir, Remove, Rename, Transfer, WriteOptions
from dsec.model.ids import SandboxId


class AsyncFiles:
    """Files of one sandbox. A relative ``path`` is below its working directory; ``user`` is as for a command.

    Every method raises:
        FileMissing, FileDenied, FileIsDirectory, FileKind, QuotaExceeded, FileProblem: as the kernel inside said.
        BadRequest: an argument. NotFound, Conflict, SandboxFailed: the sandbox does not run.
    """

    def __init__(self, link: AsyncLink, sandbox: SandboxId) -> None:
        self._link = link
        self._sandbox = sandbox

    async def read(
        self, path: str, *, offset: int = 0, length: int = 2**63 - 1, max_bytes: int = GIB, user: str = ""
    ) -> bytes:
        """Content, all of it or ``length`` bytes from ``offset``.  Raises: TooLarge: it is more than ``max_bytes``."""
        check_user(user)
        files = self._link.services.files
        stream = files.read(self._sandbox, path, offset=offset, length=length, user=user)
        return await self._link.call(collected(stream, max_bytes, path))

    def open_read(
        self, path: str, *, offset: int = 0, length: int = 2**63 - 1, user: str = ""
    ) -> AsyncIterator[bytes]:
        """Content in pieces, however large; all of it or ``length`` bytes from ``offset``. Leaving the iterator ends the transfer."""
        check_user(user)
        files = self._link.services.files
        return self._link.iterate(files.read(self._sandbox, path, offset=offset, length=length, user=user))

    async def write(
        self,
        path: str,
        content: Content,
        *,
        mode: int = 0o644,
        append: bool = False,
        exclusive: bool = False,
        parents: bool = True,
        atomic: bool = False,
        user: str = "",
    ) -> Entry:
        """Write a file; what is told of it afterwards.

        Args:
            content: bytes, a binary file, or an iterator of bytes.
            mode: permission bits of a new file. append: after what is there. exclusive: an existing one is an error.
            parents: make missing directories. atomic: readers see the old content or the whole new one.
        """
        check_user(user)
        options = WriteOptions(mode=mode, append=append, exclusive=exclusive, parents=parents, atomic=atomic)
        source = content_of(content)
        return await self._link.call(
            self._link.services.files.write(self._sandbox, path, source, options=options, user=user)
        )

    async def stat(self, path: str, *, follow: bool = True, user: str = "") -> Entry:
        """What is there; with ``follow`` a symlink's target."""
        check_user(user)
        check_flag("follow", follow)
        return await self._link.call(
            self._link.services.files.stat(self._sandbox, path, follow=follow, user=user)
        )

    async def exists(self, path: str, *, user: str = "") -> bool:
        """Something is there (a symlink's target counts)."""
        check_user(user)
        try:
            await self.stat(path, user=user)
        except FileNotFoundError:
            return False
        return True

    async def list(self, path: str = ".", *, limit: int = 100_000, user: str = "") -> tuple[Entry, ...]:
        """Entries of a directory, sorted by name, the first ``limit`` of them (at most 1,000,000)."""
        check_user(user)
        listing = await self._link.call(
            self._link.services.files.list(self._sandbox, path, limit=limit, user=user)
        )
        return listing.entries

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True, user: str = "") -> None:
        """Make a directory with the permission bits ``mode``; with ``parents`` the missing ones above too, and an existing one is no error."""
        check_user(user)
        change = MakeDir(path, mode, parents)
        await self._link.call(self._link.services.files.change(self._sandbox, change, user=user))

    async def move(self, source: str, target: str, *, replace: bool = True, user: str = "") -> None:
        """Rename ``source`` to ``target``; without ``replace`` an existing target is an error."""
        check_user(user)
        change = Rename(source, target, replace)
        await self._link.call(self._link.services.files.change(self._sandbox, change, user=user))

    async def remove(self, path: str, *, recursive: bool = False, user: str = "") -> None:
        """Remove a file or an empty directory, or with ``recursive`` a tree."""
        check_user(user)
        change = Remove(path, recursive)
        await self._link.call(self._link.services.files.change(self._sandbox, change, user=user))

    async def watch(
        self, path: str = ".", *, recursive: bool = False, user: str = ""
    ) -> AsyncIterator[FileEvent]:
        """What happens in a directory, with ``recursive`` also in those below it, from the moment on at which this returns. Leaving the iterator ends it.

        Raises:
            SandboxFailed, UnknownOutcome: while iterating, the sandbox ended.
        """
        check_user(user)
        check_flag("recursive", recursive)
        work = self._link.services.files.watch(self._sandbox, path, recursive=recursive, user=user)
        return await self._link.make(work, self._link.iterate, closed)

    async def upload(self, local: str | Path, path: str, *, user: str = "") -> Transfer:
        """Copy a file or directory ``local`` of this machine to ``path``.  Raises: TooLarge. OSError: it cannot be read here."""
        check_user(user)
        return await self._link.call(
            self._link.services.trees.upload(self._sandbox, local_path("local", local), path, user=user)
        )

    async def download(self, path: str, local: str | Path, *, user: str = "") -> Transfer:
        """Copy a file or directory of the sandbox to ``local``; nothing outside it is written.  Raises: TooLarge. Conflict: a file of a directory is there already. OSError: it cannot be written here."""
        check_user(user)
        return await self._link.call(
            self._link.services.trees.download(self._sandbox, path, local_path("local", local), user=user)
        )

    async def unpack(self, archive: Content, path: str, *, user: str = "") -> Transfer:
        """Unpack a tar ``archive`` (bytes, a binary file, or an iterator of bytes) below ``path``.  Raises: TooLarge. BadRequest: a member would escape, or it is no archive."""
        check_user(user)
        source = streamed(archive, "archive")
        return await self._link.call(self._link.services.trees.unpack(self._sandbox, source, path, user=user))

    def pack(self, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        """A tar archive of ``path``, in pieces."""
        check_user(user)
        return self._link.iterate(self._link.services.trees.pack(self._sandbox, path, user=user))
