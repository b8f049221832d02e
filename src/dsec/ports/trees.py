"""Moving whole trees between this machine and a guest."""

from __future__ import annotations

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
