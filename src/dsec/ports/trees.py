"""Moving whole trees between this machine and a guest."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path

from dsec.model.files import Identity, Transfer
from dsec.ports.guest import GuestFiles


class Trees(ABC):
    """Trees and archives over a guest's file operations. The guest is hostile, and so is an archive.

    Every method raises:
        TooLarge: more bytes or entries than the bound.
        FileProblem and its kinds: as the kernel on either side said.
    """

    @abstractmethod
    async def upload(self, files: GuestFiles, local: Path, path: str, *, who: Identity) -> Transfer:
        """Copy a local file or directory to ``path`` (absolute, inside)."""

    @abstractmethod
    async def download(self, files: GuestFiles, path: str, local: Path, *, who: Identity) -> Transfer:
        """Copy ``path`` to ``local``; nothing outside ``local`` is written, no device is made."""

    @abstractmethod
    async def unpack(
        self, files: GuestFiles, archive: AsyncIterator[bytes], path: str, *, who: Identity
    ) -> Transfer:
        """Unpack a tar archive below ``path``; absolute and escaping members are refused."""

    @abstractmethod
    def pack(self, files: GuestFiles, path: str, *, who: Identity) -> AsyncIterator[bytes]:
        """A tar archive of ``path``."""


class LocalTrees(ABC):
    """Files and trees of this machine, for whoever sends them away and takes them in. What comes in is hostile.

    Every method raises:
        Conflict, StorageFull, Denied, BadRequest: as this machine's kernel said.
    """

    @abstractmethod
    async def stat(self, local: Path) -> os.stat_result:
        """What is there; links are followed."""

    @abstractmethod
    def content(self, local: Path) -> AsyncIterator[bytes]:
        """A file, in pieces."""

    @abstractmethod
    def packed(self, local: Path, left_out: list[tuple[str, str]]) -> AsyncIterator[bytes]:
        """A tar archive of what is below a directory; what cannot be in one is added to ``left_out``, with why."""

    @abstractmethod
    async def unpacked(self, archive: AsyncIterator[bytes], local: Path) -> Transfer:
        """Make what a tar archive holds below a directory, which is made; nothing outside of it is written, no device is made.

        Raises: TooLarge, BadRequest: the archive. What ``archive`` raises.
        """

    @abstractmethod
    async def written(self, content: AsyncIterator[bytes], local: Path) -> int:
        """Write a file, which is there when it is whole; how many bytes it has.  Raises: what ``content`` raises."""
