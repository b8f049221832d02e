"""Read-only layers that lie over a base: trees that are made once and kept as images, under the key of what they are made from."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from anyio import CancelScope, to_thread

from dsec.errors import BadRequest, StoreDamaged
from dsec.images.attended import Fill, Turns, attended, cancelled_once
from dsec.images.builds import alone, locked, remove, work_directory
from dsec.images.disk import typed
from dsec.images.shelf import Shelf, make_ready
from dsec.images.system import make_erofs, require_builder
from dsec.images.tools import Check
from dsec.images.tree import has_attributes, tree_digest
from dsec.ports.storage import Image

AT_ONCE: Final = 4
"""Layers that one store makes at a time; those beyond wait for their turn."""
MOST: Final = 256
"""Of those that make layers or wait: beyond, whoever asks is refused."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A tree that is an image file now, and stored nowhere yet."""

    digest: str
    file: Path


class LayerStore:
    """Shares the directory of :class:`~dsec.images.store.ImageStore`.

    Whoever waits here holds no thread, so that what is being made can have those that it needs.

    Args:
        root: of the store.
        at_once, most: layers that are made, and callers that there may be, at a time.
    """

    def __init__(self, root: Path, *, at_once: int = AT_ONCE, most: int = MOST) -> None:
        self._root = root
        self._shelf = Shelf(root)
        self._turns = Turns(at_once, most)

    async def keep(self, key: str, fill: Fill) -> Image:
        """The layer of that key, made by ``fill`` when there is none yet.

        Two who ask at once make it once. One that fails, is cancelled or killed leaves nothing: when this raises, ``fill`` has ended.
        Whiteouts and extended attributes are kept.

        Raises:
            Unsupported: it cannot be made on this machine. StorageFull, StoreDamaged, Denied.
            Busy: too many ask at once, or another process is at it and does not end. What ``fill`` raises, errors of the disk typed.
        """
        return await cancelled_once(self._keep(key, fill))

    async def adopt(self, trees: Mapping[str, Fill]) -> None:
        """The images of the trees with these digests, made here of what is said to be those trees: all of them, or none.

        What is stored already is not made. They have no name: what nobody holds in the next minutes may be collected.

        Raises:
            BadRequest: one is another tree. As :meth:`keep`.
        """
        await cancelled_once(self._adopt(trees))

    async def _keep(self, key: str, fill: Fill) -> Image:
        with typed(self._root), self._turns.admitted():
            await attended(lambda _: self._shelf.prepare())
            found = await attended(lambda _: self._find(key))
            if found is not None:
                return found
            async with alone(self._root / "locks" / key):
                return await attended(lambda _: self._find(key)) or await self._make(key, fill)

    async def _make(self, key: str, fill: Fill) -> Image:
        async with self._turns.turn(), self._work() as work:
            made = await self._made(work, fill)
            return await attended(lambda _: self._publish(key, [made])[0])

    async def _adopt(self, trees: Mapping[str, Fill]) -> None:
        with typed(self._root), self._turns.admitted():
            await attended(lambda _: self._shelf.prepare())
            missing = [each for each in trees if not await attended(partial(self._has, each))]
            if not missing:
                return
            async with self._turns.turn(), self._work() as work:
                made = []
                for number, digest in enumerate(missing):
                    made.append(await self._made(work / str(number), trees[digest], wanted=digest))
                await attended(lambda _: self._publish("", made))

    def _has(self, digest: str, _: Check) -> bool:
        """What is damaged is made again."""
        with suppress(StoreDamaged):
            return self._shelf.by_digest(digest, digest) is not None
        return False

    def _find(self, key: str) -> Image | None:
        """None when there is none, or what there is was damaged: it is made again."""
        meaning = self._shelf.meaning(key)
        with suppress(StoreDamaged):
            return self._shelf.load(key, key, meaning) if meaning is not None else None
        return None

    async def _made(self, work: Path, fill: Fill, *, wanted: str = "") -> _Made:
        tree = work / "tree"
        tool = await attended(lambda _: require_builder())
        await attended(lambda _: _begin(work, tree))
        await fill(tree)
        return await attended(partial(self._written, tool, work, wanted))

    def _written(self, tool: str, work: Path, wanted: str, check: Check) -> _Made:
        tree, file = work / "tree", work / "image"
        digest = tree_digest(tree, check=check)
        check_tree(wanted or digest, digest)
        make_erofs(
            tool, tree, file, str(uuid.UUID(digest[7:39])), attributes=has_attributes(tree), check=check
        )
        check()
        remove(tree)
        return _Made(digest, file)

    def _publish(self, key: str, made: list[_Made]) -> list[Image]:
        ready = [make_ready(each.file) for each in made]  # before: the lock is for moments
        with locked(self._root / "lock"):
            return [
                self._shelf.publish(key, key or each.digest, each.file, {"digest": each.digest}, facts)
                for each, facts in zip(made, ready, strict=True)
            ]

    @asynccontextmanager
    async def _work(self) -> AsyncIterator[Path]:
        """A directory that goes at the end, or with the process."""
        stack = ExitStack()
        try:
            yield await attended(lambda _: stack.enter_context(work_directory(self._root)))
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(stack.close)


def _begin(work: Path, tree: Path) -> None:
    work.mkdir(mode=0o700, exist_ok=True)
    tree.mkdir(mode=0o755)


def check_tree(wanted: str, found: str) -> None:
    """Raises: BadRequest: a tree is another one than it is said to be."""
    if found != wanted:
        raise BadRequest(
            f"what is said to be the tree {wanted} is {found}",
            hint="it was changed on its way: get it from its maker again",
            found=found,
            wanted=wanted,
        )
