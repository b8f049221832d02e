"""Read-only layers that lie over a base: trees that are made once and kept as images, under the key of what they are made from."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from anyio import to_thread

from dsec.errors import BadRequest, StorageFull, StoreDamaged
from dsec.images.builds import locked, work_directory
from dsec.images.shelf import Shelf
from dsec.images.system import make_erofs, require_builder
from dsec.images.tools import Check, unstoppable
from dsec.images.tree import has_attributes, tree_digest
from dsec.ports.storage import Image


class LayerStore:
    """Shares the directory of :class:`~dsec.images.store.ImageStore`.

    Args:
        root: of the store.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._shelf = Shelf(root)

    async def keep(self, key: str, fill: Callable[[Path], None], *, check: Check = unstoppable) -> Image:
        """The layer of that key, made by ``fill`` (in a thread, given an empty directory) when there is none yet.

        Two who ask at once make it once. One that fails, or is killed, leaves nothing. Whiteouts and extended attributes are kept.

        Args:
            check: called again and again while this waits for another, and between the steps; what it raises ends the work.

        Raises:
            Unsupported: it cannot be made on this machine. StorageFull, StoreDamaged, Busy. What ``fill`` raises.
        """
        return await to_thread.run_sync(self._keep, key, fill, check)

    async def adopt(self, digest: str, fill: Callable[[Path], None], *, check: Check = unstoppable) -> Image:
        """The image of the tree with that digest, made here of what ``fill`` says is that tree, unless it is stored already.

        Raises:
            BadRequest: it is another tree. As :meth:`keep`.
        """
        return await to_thread.run_sync(self._adopt, digest, fill, check)

    def _adopt(self, digest: str, fill: Callable[[Path], None], check: Check) -> Image:
        self._shelf.prepare()
        key = f"tree-{digest.removeprefix('sha256:')}"
        with locked(self._root / "locks" / key, check=check):
            with suppress(StoreDamaged):  # then it is made again
                found = self._shelf.by_digest(digest, digest)
                if found is not None:
                    return found
            return self._make(key, fill, check, wanted=digest)

    def _keep(self, key: str, fill: Callable[[Path], None], check: Check) -> Image:
        self._shelf.prepare()
        found = self._find(key)
        if found is not None:
            return found
        with locked(self._root / "locks" / key, check=check):
            return self._find(key) or self._make(key, fill, check)

    def _find(self, key: str) -> Image | None:
        """None when there is none, or what there is was damaged: it is made again."""
        meaning = self._shelf.meaning(key)
        with suppress(StoreDamaged):
            return self._shelf.load(key, key, meaning) if meaning is not None else None
        return None

    def _make(self, key: str, fill: Callable[[Path], None], check: Check, *, wanted: str = "") -> Image:
        tool = require_builder()
        try:
            with work_directory(self._root) as work:
                tree, file = work / "tree", work / "image"
                tree.mkdir(mode=0o755)
                fill(tree)
                check()
                digest = tree_digest(tree)
                check_tree(wanted or digest, digest)
                check()
                make_erofs(tool, tree, file, str(uuid.UUID(digest[7:39])), attributes=has_attributes(tree))
                with locked(self._root / "lock"):
                    return self._shelf.publish(key, key, file, {"digest": digest})
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no space for a layer in {self._root}", hint="free some") from error
            raise


def check_tree(wanted: str, found: str) -> None:
    """Raises: BadRequest: a tree is another one than it is said to be."""
    if found != wanted:
        raise BadRequest(
            f"what is said to be the tree {wanted} is {found}",
            hint="it was changed on its way: get it from its maker again",
            found=found,
            wanted=wanted,
        )
